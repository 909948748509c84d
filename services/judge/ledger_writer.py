"""Writes ledger entries from an event loop through a blocking producer, many at a time."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clawstream.bus.interface import Delivery, OutgoingRecord, Producer
from clawstream.errors import BrokerUnavailable, BusError, FatalBusError, RecordRejected


@dataclass(eq=False, slots=True)
class _Group:
    """Records that somebody waits for together."""

    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"
    left: int
    """How many of them are not ended."""


@dataclass(eq=False, slots=True)
class _Entry:
    """One record."""

    record: OutgoingRecord
    group: _Group
    is_written: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)
    failure: BusError | None = field(default=None, init=False)

    def delivered(self, _: Delivery) -> None:
        self.is_written = True

    def end(self, failure: BusError | None = None) -> None:
        if not self.has_ended:
            self.has_ended, self.failure = True, failure
            self.group.left -= 1


class LedgerWriter:
    """One thread that owns one producer. What waits is written together, so that one flush serves many votes."""

    def __init__(
        self,
        make_producer: Callable[[], Producer],
        *,
        flush_timeout_seconds: float,
        on_failure: Callable[[], None],
    ) -> None:
        """`make_producer` is called on the writer's thread, and again after a failure.

        `on_failure` is called on that thread when the writer broke: the process must end with `failure`.
        """
        self._make_producer = make_producer
        self._flush_timeout_seconds = flush_timeout_seconds
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Sequence[_Entry] | None] = queue.SimpleQueue()
        self._breaking = threading.Lock()
        self._producer: Producer | None = None
        self.failure: FatalBusError | None = None
        """Why nothing can be written any more; None while the writer works."""
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    async def write(self, records: Sequence[OutgoingRecord]) -> list[BusError | None]:
        """Returns when each of `records` is on the log, or why not.

        RecordRejected when this very record is too large, BrokerUnavailable when it is not known to be on the log (try
        again: the writer makes a new producer), and FatalBusError when the writer broke.
        """
        if not records:
            return []
        loop = asyncio.get_running_loop()
        group = _Group(loop, loop.create_future(), len(records))
        entries = [_Entry(record, group) for record in records]
        with self._breaking:  # Else entries could be queued after the last look into the queue, and wait for ever.
            if self.failure is not None:
                return [self.failure] * len(records)
            self._queue.put(entries)
        await group.done
        return [entry.failure for entry in entries]

    def close(self) -> None:
        """Writes what waits and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        batch: list[_Entry] = []
        try:
            while batch := self._next_batch():
                self._write(batch)
        except Exception as error:  # The thread's boundary: those who wait are told, and the process ends.
            self._break(error, batch)
        finally:
            self._drop_producer()

    def _next_batch(self) -> list[_Entry]:
        """Everything that waits; nothing when the writer is closed."""
        batch: list[_Entry] = []
        entries = self._queue.get()
        while entries is not None:
            batch += entries
            try:
                entries = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)
        return batch

    def _write(self, waiting: list[_Entry]) -> None:
        """Ends every entry: what is refused fails alone, an outage fails what is not on the log."""
        batch = waiting
        while waiting:
            refused, failure = self._send(waiting)
            for entry in waiting:
                if entry in refused:
                    entry.end(refused[entry])
                elif entry.is_written or (failure is None and not refused):
                    entry.end()
                elif failure is not None:
                    entry.end(failure)
            if failure is not None or not refused:
                break
            # A broker refuses a batch of records whole: its others are sent again, without the one at fault.
            waiting = [entry for entry in waiting if not entry.is_written and entry not in refused]
        _tell(batch)

    def _send(self, entries: Sequence[_Entry]) -> tuple[dict[_Entry, RecordRejected], BrokerUnavailable | None]:
        """Which entries were refused, and what kept the rest from being written."""
        refused: dict[_Entry, RecordRejected] = {}
        try:
            self._producer = self._producer or self._make_producer()
            for entry in entries:
                try:
                    self._producer.produce(entry.record, entry.delivered)
                except RecordRejected as error:
                    refused[entry] = error
            try:
                self._producer.flush(self._flush_timeout_seconds)
            except RecordRejected as error:
                at_fault = [entry for entry in entries if entry.record is error.record]
                if not at_fault:
                    # Of an earlier batch. Who is to blame for this one is not known: a new producer tells.
                    raise BrokerUnavailable(f"a record that nobody waits for was refused: {error}") from error
                refused[at_fault[0]] = error
        except BusError as error:
            # Even what is fatal for a producer is an outage here: the next one is a new one.
            self._drop_producer()
            unavailable = BrokerUnavailable(f"a ledger entry is not known to be on the log: {error}")
            unavailable.__cause__ = error
            return refused, unavailable
        return refused, None

    def _break(self, error: Exception, batch: Sequence[_Entry]) -> None:
        failure = FatalBusError(f"the ledger cannot be written any more: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._breaking:
            self.failure = failure
        waiting = list(batch)
        while not self._queue.empty():
            waiting += self._queue.get_nowait() or ()
        for entry in waiting:
            entry.end(failure)
        _tell(waiting)
        self._on_failure()

    def _drop_producer(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None


def _tell(entries: Sequence[_Entry]) -> None:
    """Those who wait for these, from the writer's thread: one call for all, since each one wakes the loop."""
    ended: dict[asyncio.AbstractEventLoop, dict[_Group, None]] = {}
    for entry in entries:
        if entry.group.left == 0:
            ended.setdefault(entry.group.loop, {})[entry.group] = None
    for loop, groups in ended.items():
        loop.call_soon_threadsafe(_resolve, list(groups))


def _resolve(groups: Sequence[_Group]) -> None:
    for group in groups:
        if not group.done.done():
            group.done.set_result(None)
