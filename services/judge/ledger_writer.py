"""Writes ledger entries from an event loop through a blocking producer, many at a time."""

import asyncio
import queue
import threading
from collections.abc import Callable

from clawstream.bus.interface import OutgoingRecord, Producer
from clawstream.errors import BusError

_Entry = tuple[OutgoingRecord, asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class LedgerWriter:
    """One thread that owns one producer. What waits is written together, so that one flush serves many votes."""

    def __init__(self, make_producer: Callable[[], Producer], *, flush_timeout_seconds: float) -> None:
        """`make_producer` is called on the writer's thread, and again after a failure."""
        self._make_producer = make_producer
        self._flush_timeout_seconds = flush_timeout_seconds
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    async def write(self, record: OutgoingRecord) -> None:
        """Returns when `record` is on the log. Raises BusError when it is not known to be."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put((record, loop, done))
        await done

    def close(self) -> None:
        """Writes what waits and ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        producer: Producer | None = None
        while (batch := self._next_batch()) is not None:
            failure: BusError | None = None
            try:
                producer = producer or self._make_producer()
                for record, _, _ in batch:
                    producer.produce(record)
                producer.flush(self._flush_timeout_seconds)
            except BusError as error:
                failure = error
                if producer is not None:
                    producer.close()
                producer = None
            for _, loop, done in batch:
                loop.call_soon_threadsafe(_resolve, done, failure)
        if producer is not None:
            producer.close()

    def _next_batch(self) -> list[_Entry] | None:
        """Everything that waits, at least one entry; None when the writer is closed."""
        batch: list[_Entry] = []
        entry = self._queue.get()
        while entry is not None:
            batch.append(entry)
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)
            return batch
        return None


def _resolve(done: "asyncio.Future[None]", failure: BusError | None) -> None:
    if done.cancelled():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)
