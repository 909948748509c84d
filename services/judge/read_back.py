"""Reads the ledger back before the first input of a partition that was just assigned."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from clawstream.bus.interface import Record, TopicPartition


class ReadBack:
    """Holds back a partition's inputs until its part of the ledger was read.

    The first input after an assignment is the oldest unresolved one, so its timestamp says where to begin. Used on one
    event loop, but for `assigned`.
    """

    def __init__(self, read: Callable[[int, int], Awaitable[int]]) -> None:
        """`read` takes a partition number and a timestamp in milliseconds."""
        self._read = read
        self._reading: dict[TopicPartition, asyncio.Task[int]] = {}

    def assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Others may have judged these partitions since: what was read before is out of date."""
        for partition in partitions:
            self._reading.pop(partition, None)

    async def ready(self, record: Record) -> None:
        """Returns when the ledger for `record`'s partition was read. Raises what reading raised; the next call retries."""
        partition = record.topic_partition
        reading = self._reading.get(partition)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = asyncio.ensure_future(self._read(record.partition, record.timestamp_milliseconds))
            self._reading[partition] = reading
        await asyncio.shield(reading)
