"""Single records by their position: how the teacher reads the turn that a score points to.

References of one partition mostly rise, so after a seek the fetcher reads on and keeps what it passes: later requests
find their record in memory. A request behind the position, or far before it, costs a seek.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from clawstream.bus.interface import Bus, Consumer, Record, TopicPartition
from clawstream.errors import BrokerUnavailable, BusError, FatalBusError, Fenced, OffsetNotRetained

_BATCH_RECORDS = 100
_WAIT_SECONDS = 0.1
_READ_AHEAD_OFFSETS = 1000
"""A wanted record this near is read up to; farther ones are sought."""


class Reference(Protocol):
    """The position of a record; `schemas.events.base.RecordReference` is one."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...


class _RecordCache:
    """The records that were read last, up to a number of bytes. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._records: OrderedDict[tuple[TopicPartition, int], Record] = OrderedDict()

    def add(self, record: Record) -> None:
        key = (record.topic_partition, record.offset)
        if key in self._records:
            return
        self._records[key] = record
        self._bytes += _size(record)
        while self._bytes > self._max_bytes and len(self._records) > 1:
            _, oldest = self._records.popitem(last=False)
            self._bytes -= _size(oldest)

    def get(self, partition: TopicPartition, offset: int) -> Record | None:
        return self._records.get((partition, offset))


def _size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"") + len(record.encrypted_value or b"") + 200


class _Request:
    """Those who wait for one record."""

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self.future: Future[Record] = Future()


class RecordFetcher:
    """Reads records by reference on a thread of its own. Thread-safe."""

    def __init__(
        self,
        bus: Bus,
        *,
        cache_bytes: int = 64 * 1024 * 1024,
        timeout_seconds: float = 30.0,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects at the first request. `timeout_seconds` bounds how long a request waits for a broker."""
        self._bus = bus
        self._timeout_seconds = timeout_seconds
        self._monotonic_seconds = monotonic_seconds
        self._cache = _RecordCache(cache_bytes)
        self._waiting: dict[TopicPartition, dict[int, _Request]] = {}
        self._condition = threading.Condition()
        self._stopping = False
        self._ended: BusError = BusError("the record fetcher is closed")
        # Only the thread uses these:
        self._consumer: Consumer | None = None
        self._positions: dict[TopicPartition, int] = {}
        self._ranges: dict[TopicPartition, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="record-fetcher", daemon=True)
        self._thread.start()

    def fetch(self, reference: Reference) -> Future[Record]:
        """The record at `reference`; with asyncio, `await asyncio.wrap_future(fetcher.fetch(reference))`.

        The future fails with OffsetNotRetained when there is no such record (removed, aborted, beyond the end), and
        with BrokerUnavailable when no broker answers in time. FatalBusError, raised or in the future, says that
        reading broke: the process must end.
        """
        partition = TopicPartition(reference.topic, reference.partition)
        with self._condition:
            if self._stopping:
                raise self._ended
            found = self._cache.get(partition, reference.offset)
            if found is not None:
                future: Future[Record] = Future()
                future.set_result(found)
                return future
            requests = self._waiting.setdefault(partition, {})
            request = requests.get(reference.offset)
            if request is None:
                request = _Request(self._monotonic_seconds() + self._timeout_seconds)
                requests[reference.offset] = request
                self._condition.notify()
            # Each caller gets a future of its own, so that one that is cancelled leaves the others alone.
            future = Future()
            request.future.add_done_callback(lambda done: _copy(done, future))
            return future

    def close(self) -> None:
        """Stops reading. What is still asked for fails."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait_for_requests():
                try:
                    self._serve()
                except OffsetNotRetained:
                    # Retention was faster than what we knew of it. Ask again; `_aim` then refuses the right request.
                    self._disconnect()
                except BrokerUnavailable as unavailable:
                    self._expire(unavailable)
                else:
                    self._expire(None)
        except Exception as failure:  # The thread's boundary: all who wait, or ask later, are told to end the process.
            broken = FatalBusError(f"records cannot be read by reference any more: {type(failure).__name__}: {failure}")
            broken.__cause__ = failure
            self._ended = broken
        finally:
            with self._condition:
                self._stopping = True
                left = [request for requests in self._waiting.values() for request in requests.values()]
                self._waiting.clear()
            for request in left:
                request.future.set_exception(self._ended)
            self._disconnect()

    def _wait_for_requests(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._stopping or any(self._waiting.values()))
            return not self._stopping

    def _serve(self) -> None:
        """One round: aim at what is wanted, read some, refuse what was passed without being met."""
        if self._consumer is None:
            self._consumer = self._bus.reader()
        with self._condition:
            wanted = {partition: sorted(requests) for partition, requests in self._waiting.items() if requests}
        aims = {
            partition: aim
            for partition, offsets in wanted.items()
            if (aim := self._aim(self._consumer, partition, offsets)) is not None
        }
        for record in self._consumer.consume(_BATCH_RECORDS, _WAIT_SECONDS):
            self._take(record)
        for partition, aim in aims.items():
            position = max(self._consumer.position(partition) or 0, self._positions[partition])
            self._positions[partition] = position
            for offset in wanted[partition]:
                if aim <= offset < position:
                    self._refuse(partition, offset)

    def _aim(self, consumer: Consumer, partition: TopicPartition, offsets: list[int]) -> int | None:
        """Makes the next record of `partition` one at or shortly before the lowest of `offsets` that exists.

        Returns the position, or None when no offset exists.
        """
        existing: list[int] = []
        for offset in offsets:
            if self._exists(consumer, partition, offset):
                existing.append(offset)
            else:
                self._refuse(partition, offset)
        if not existing:
            return None
        position = self._positions.get(partition)
        if position is not None and position <= existing[0] <= position + _READ_AHEAD_OFFSETS:
            return position
        self._positions[partition] = existing[0]
        if position is None:
            consumer.assign(self._positions)
        else:
            consumer.seek(partition, existing[0])
        return existing[0]

    def _exists(self, consumer: Consumer, partition: TopicPartition, offset: int) -> bool:
        first, end = self._ranges.get(partition, (0, 0))
        if not first <= offset < end:
            first, end = self._ranges[partition] = self._range(consumer, partition)
        return first <= offset < end

    def _range(self, consumer: Consumer, partition: TopicPartition) -> tuple[int, int]:
        """First offset and end. A partition that does not exist holds nothing: that is the reference's fault."""
        try:
            return consumer.watermarks(partition)
        except (BrokerUnavailable, Fenced, FatalBusError):
            raise
        except BusError:
            return 0, 0

    def _take(self, record: Record) -> None:
        partition = record.topic_partition
        self._positions[partition] = record.offset + 1
        with self._condition:
            self._cache.add(record)
            request = self._waiting.get(partition, {}).pop(record.offset, None)
        if request is not None:
            request.future.set_result(record)

    def _refuse(self, partition: TopicPartition, offset: int) -> None:
        with self._condition:
            request = self._waiting.get(partition, {}).pop(offset, None)
        if request is None:
            return
        first, end = self._ranges[partition]
        if offset < first:
            reason = "retention removed it"
        elif offset >= end:
            reason = "it is beyond the end of the log"
        else:
            reason = "it was compacted away, or never committed"
        request.future.set_exception(
            OffsetNotRetained(
                f"{partition}@{offset}: there is no such record: {reason}. The partition holds {first} to {end - 1}",
                offset=offset,
                first=first,
                end=end,
            )
        )

    def _expire(self, cause: BrokerUnavailable | None) -> None:
        now = self._monotonic_seconds()
        with self._condition:
            late = [
                (partition, offset, requests.pop(offset))
                for partition, requests in self._waiting.items()
                for offset in list(requests)
                if requests[offset].deadline_seconds <= now
            ]
        for partition, offset, request in late:
            error = BrokerUnavailable(f"{partition}@{offset}: not read within {self._timeout_seconds:.0f} seconds")
            error.__cause__ = cause
            request.future.set_exception(error)

    def _disconnect(self) -> None:
        self._positions.clear()
        self._ranges.clear()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


def _copy(source: Future[Record], target: Future[Record]) -> None:
    if not target.set_running_or_notify_cancel():
        return
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())
