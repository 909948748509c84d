"""Runs a worker over a stretch of the log and stops it when everything in it is committed."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping

from clawstream.bus.interface import Admin, Bus, TopicPartition
from clawstream.bus.ranges import OffsetRange
from clawstream.errors import BrokerUnavailable
from clawstream.worker.worker import EosWorker
from services.judge.replay.plan import committed_share

_LOOK_SECONDS = 0.3


def begin_group(bus: Bus, group: str, ranges: Mapping[TopicPartition, OffsetRange]) -> None:
    """Lets a group start where the stretch does. Partitions that have an offset keep it: the run is continued.

    Raises BusError.
    """
    admin = bus.admin()
    try:
        committed = admin.group_offsets(group)
        missing = {partition: start for partition, (start, _) in ranges.items() if partition not in committed}
        if missing:
            admin.set_group_offsets(group, missing)
    finally:
        admin.close()


def is_complete(bus: Bus, group: str, ranges: Mapping[TopicPartition, OffsetRange]) -> bool:
    """Whether the group has committed all of the stretch. Raises BusError."""
    admin = bus.admin()
    try:
        done, total = committed_share(ranges, admin.group_offsets(group))
    finally:
        admin.close()
    return done == total


async def run_to_end(
    bus: Bus,
    worker: EosWorker,
    group: str,
    ranges: Mapping[TopicPartition, OffsetRange],
    *,
    stop: threading.Event,
    progress: Callable[[int, int], None],
) -> bool:
    """True when the whole stretch is committed, by this process or others of the group; False when `stop` came first.

    `progress` is told how many of how many offsets are committed. Raises what ended the worker.
    """
    admin = await asyncio.to_thread(bus.admin)
    running = asyncio.create_task(worker.run())
    try:
        while True:
            with contextlib.suppress(BrokerUnavailable):  # The worker waits too; how far it is will be known later.
                done, total = committed_share(ranges, await asyncio.to_thread(admin.group_offsets, group))
                progress(done, total)
                if done == total:
                    return True
            if stop.is_set() or running.done():
                return False
            await asyncio.wait({running}, timeout=_LOOK_SECONDS)
    finally:
        worker.request_stop()
        await running
        await asyncio.to_thread(_close, admin)


def _close(admin: Admin) -> None:
    admin.close()
