"""Follows `weights` and `weights-applied` from their beginning, on a thread, into the event loop."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

from clawstream.bus.interface import Bus, Consumer, Record, TopicPartition
from clawstream.errors import BusError
from clawstream.log import Logger

_POLL_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_MAX_RECORDS = 500


class LogView:
    """Delivers every record of single-partition topics, in order, to `apply` in the event loop."""

    def __init__(
        self,
        bus: Bus,
        topics: Sequence[str],
        *,
        apply: Callable[[Record], None],
        on_fatal: Callable[[Exception], None],
        logger: Logger,
    ) -> None:
        """`on_fatal` is called, in the event loop, when a record could not be applied or reading broke.

        Nothing is delivered after that: what comes later must not be judged without it.
        """
        self._bus = bus
        self._partitions = [TopicPartition(topic, 0) for topic in topics]
        self._apply = apply
        self._on_fatal = on_fatal
        self._is_broken = False
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-log-view", daemon=True)
        self._positions: dict[TopicPartition, int] = {}
        self._moved = asyncio.Event()
        self.caught_up = asyncio.Event()
        """Set when everything that was on the topics at the start has been applied."""

    def start(self) -> None:
        """Starts to read."""
        self._thread.start()

    async def reached(self, topic: str, offset: int) -> None:
        """Returns when the record at `offset` of `topic` has been applied."""
        partition = TopicPartition(topic, 0)
        while self._positions.get(partition, 0) <= offset:
            await self._moved.wait()

    async def close(self) -> None:
        """Stops reading."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        positions: dict[TopicPartition, int] = {}
        while not self._stop.is_set():
            try:
                self._follow(positions)
            except BusError as error:
                self._logger.warning("weights cannot be read; trying again", error=str(error))
                self._stop.wait(_RETRY_SECONDS)
            except Exception as error:  # The thread's boundary: the process is told, and ends.
                self._in_loop(self._break, error)
                return

    def _follow(self, positions: dict[TopicPartition, int]) -> None:
        """Reads until stopped, from `positions` on, which it moves."""
        reader = self._bus.follower()
        try:
            ends = self._assign(reader, positions)
            while not self._stop.is_set():
                # Not the last record's offset: transaction markers take offsets too.
                positions.update((each, reader.position(each) or positions[each]) for each in self._partitions)
                is_caught_up = all(positions[partition] >= end for partition, end in ends.items())
                self._in_loop(self._positions_moved, dict(positions), is_caught_up)
                records = reader.consume(_MAX_RECORDS, _POLL_SECONDS)
                self._in_loop(self._deliver, records)
        finally:
            reader.close()

    def _assign(self, reader: Consumer, positions: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Assigns all partitions and returns their ends."""
        ends: dict[TopicPartition, int] = {}
        for partition in self._partitions:
            first, ends[partition] = reader.watermarks(partition)
            positions[partition] = max(first, positions.get(partition, first))
        reader.assign(positions)
        return ends

    def _in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _deliver(self, records: Sequence[Record]) -> None:
        if self._is_broken:
            return
        try:
            for record in records:
                self._apply(record)
        except Exception as error:  # The loop would log it, and the rest of the batch be lost.
            self._break(error)

    def _break(self, error: Exception) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._stop.set()
            self._on_fatal(error)

    def _positions_moved(self, positions: Mapping[TopicPartition, int], is_caught_up: bool) -> None:
        if self._is_broken:
            return
        self._positions = dict(positions)
        if is_caught_up:
            self.caught_up.set()
        self._moved.set()
        self._moved = asyncio.Event()
