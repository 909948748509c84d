"""The thread that folds the turn-index topic into the index, so that every gateway knows every turn."""

import threading
from collections.abc import Mapping
from datetime import timedelta

from clawstream.bus.fold import LogReader
from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.clock import Clock
from clawstream.codec import decode_as, header
from clawstream.errors import BusError, DecodeError, OffsetNotRetained, TurnIndexUnwritable
from clawstream.log import Logger
from schemas.events import TurnIndexEvent
from services.gateway.known_turn import KnownTurn
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore

_POLL_SECONDS = 0.1
_RETRY_SECONDS = 1.0
_REFUSED_SECONDS = 3.0
_FORGET_EVERY_SECONDS = 3600.0


class IndexFollower:
    """Reads the topic from where the store stands, for ever."""

    def __init__(
        self,
        *,
        bus: Bus,
        topic: str,
        source: str,
        store: TurnIndexStore,
        index: TurnIndex,
        retention: timedelta,
        clock: Clock,
        logger: Logger,
    ) -> None:
        """`source` is what this gateway writes into its records, so that it knows its own."""
        self._bus = bus
        self._topic = topic
        self._source = source
        self._store = store
        self._index = index
        self._retention = retention
        self._clock = clock
        self._logger = logger
        self._stopping = threading.Event()
        self._caught_up = threading.Event()
        self._moved = threading.Condition()
        self._read_to: dict[int, int] = {}
        """Partition to the offset before which everything is in the store. Markers and aborted records count."""
        self._last_foreign_seconds: float | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="index-follower", daemon=True)

    @property
    def failure(self) -> Exception | None:
        """Why the index is not followed any more: for example its file is damaged."""
        return self._failure

    def start(self) -> None:
        """Starts reading."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def caught_up(self) -> bool:
        """Whether the topic was read once to the end that it had when reading began."""
        return self._caught_up.is_set()

    def wait_until_read(self, ends: Mapping[int, int], timeout_seconds: float) -> bool:
        """Whether everything before `ends` (partition to offset) is in the store, waiting for it if need be."""
        with self._moved:
            return self._moved.wait_for(lambda: self.has_read(ends), timeout_seconds)

    def has_read(self, ends: Mapping[int, int]) -> bool:
        """Whether everything before `ends` (partition to offset) is in the store."""
        return all(self._read_to.get(partition, 0) >= end for partition, end in ends.items())

    def saw_another_gateway_within(self, seconds: float) -> bool:
        """Whether another gateway wrote an entry lately: then an answer that is unknown here may be one of its."""
        last = self._last_foreign_seconds
        return last is not None and self._clock.monotonic_seconds() - last <= seconds

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            except BusError as error:
                self._logger.warning("the turn index cannot be read; trying again", error=str(error))
                self._stopping.wait(_RETRY_SECONDS)
            except TurnIndexUnwritable as error:
                # Chat goes on: what is in the index is found, and what is not waits on the topic.
                self._logger.error(
                    "the turn index cannot be written; trying again",
                    error=str(error),
                    again_in_seconds=_REFUSED_SECONDS,
                )
                self._stopping.wait(_REFUSED_SECONDS)
            except Exception as error:  # The thread's boundary: who asks for `failure` ends the process.
                self._failure = error
                self._logger.exception("the turn index cannot be followed")
                return

    def _follow(self) -> None:
        reader = self._open_reader()
        try:
            started_at = self._store.positions()
            ends = {partition: end for partition, end in reader.ends().items() if end > 0}
            next_forgetting = self._clock.monotonic_seconds()
            while not self._stopping.is_set():
                records = reader.poll(_POLL_SECONDS)
                positions = {partition.partition: offset for partition, offset in reader.positions().items()}
                if records:
                    self._fold(records, positions)
                with self._moved:
                    self._read_to = positions
                    self._moved.notify_all()
                if not self._caught_up.is_set() and all(
                    max(positions.get(partition.partition, 0), started_at.get(partition.partition, 0)) >= end
                    for partition, end in ends.items()
                ):
                    self._caught_up.set()
                if self._clock.monotonic_seconds() >= next_forgetting:
                    self._store.forget_before(self._clock.now() - self._retention)
                    next_forgetting = self._clock.monotonic_seconds() + _FORGET_EVERY_SECONDS
        except OffsetNotRetained as error:
            # What retention removed is older than what the index keeps. An end before our position is another topic.
            if error.offset > error.end:
                self._logger.warning("the turn index is not the topic that was read before; reading it anew")
                self._store.reset()
            else:
                self._store.fold([], self._first_offsets(reader))
        finally:
            reader.close()

    def _open_reader(self) -> LogReader:
        positions = self._store.positions()
        start = {TopicPartition(self._topic, partition): offset for partition, offset in positions.items()}
        return LogReader(self._bus, [self._topic], start=start, follows=True)

    def _first_offsets(self, reader: LogReader) -> dict[int, int]:
        consumer = self._bus.reader()
        try:
            firsts = {partition.partition: consumer.watermarks(partition)[0] for partition in reader.partitions}
        finally:
            consumer.close()
        return {partition: max(first, self._store.positions().get(partition, 0)) for partition, first in firsts.items()}

    def _fold(self, records: list[Record], positions: dict[int, int]) -> None:
        turns: dict[str, tuple[KnownTurn, bool]] = {}
        removed: set[str] = set()
        for record in records:
            if record.value is None:
                # A forgotten turn: no request may be recognised by its answer any more.
                turn_id = (record.key or b"").decode(errors="replace").rpartition("/")[2]
                turns.pop(turn_id, None)
                removed.add(turn_id)
                continue
            try:
                turn = KnownTurn.from_event(decode_as(record, TurnIndexEvent))
            except DecodeError as error:
                self._logger.error("an entry of the turn index cannot be read; its turn is not found", error=str(error))
                continue
            own = header(record.headers, "ce_source") == self._source
            if not own:
                self._last_foreign_seconds = self._clock.monotonic_seconds()
            turns[turn.turn_id] = (turn, own)
            removed.discard(turn.turn_id)
        self._store.fold(list(turns.values()), positions, removed=removed)
        self._index.stored([*turns, *removed])
