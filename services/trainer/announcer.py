"""Writes the trainer's events: those of one step in one transaction, each exactly once.

A transaction whose end is unknown is never repeated blindly: the log is asked first whether it is there. The
transactional id is the trainer's name, so a second trainer of that name fences the first.
"""

import threading
from collections.abc import Callable, Sequence

from clawstream.bus.interface import Bus, OutgoingRecord, TransactionalProducer
from clawstream.errors import BusError, FatalBusError, Fenced
from clawstream.log import Logger

_FLUSH_SECONDS = 30.0
_RETRY_SECONDS = 1.0


class Announcer:
    """One trainer's writer. Not thread-safe after the first `write`."""

    def __init__(self, bus: Bus, transactional_id: str, *, stop: threading.Event, logger: Logger) -> None:
        """`stop` ends the waiting for a broker that is away: what is not written then is written after a restart."""
        self._bus = bus
        self._transactional_id = transactional_id
        self._stop = stop
        self._logger = logger
        self._producer: TransactionalProducer | None = None

    def open(self) -> None:
        """Fences a predecessor and ends what it left open. Raises BusError."""
        if self._producer is None:
            self._producer = self._bus.transactional_producer(self._transactional_id)

    def write(self, records: Sequence[OutgoingRecord], is_on_log: Callable[[], bool]) -> None:
        """Returns when the records are on the log, all of them, once.

        Waits for a broker that is away. Raises Fenced, FatalBusError, and any BusError once `stop` is set.
        """
        attempts = 0
        while True:
            try:
                if attempts:
                    # First the fence: it decides a transaction whose end was not answered. Only then does the log tell.
                    self.open()
                    if is_on_log():
                        return
                self._write(records)
            except (Fenced, FatalBusError):
                raise
            except BusError as error:
                self._discard()
                attempts += 1
                if self._stop.is_set():
                    raise
                self._logger.warning("events could not be written; trying again", error=str(error), attempts=attempts)
                self._stop.wait(_RETRY_SECONDS)
            else:
                return

    def _write(self, records: Sequence[OutgoingRecord]) -> None:
        self.open()
        producer = self._producer
        assert producer is not None
        producer.begin()
        for record in records:
            producer.produce(record)
        producer.flush(_FLUSH_SECONDS)
        producer.commit()
        if producer.needs_replacement:
            self._discard()

    def _discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def close(self) -> None:
        """Releases the client."""
        self._discard()
