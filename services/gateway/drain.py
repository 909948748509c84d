"""The thread that moves the outbox onto the log, in order, each entry exactly once.

One drain is one transaction: turns first; then, with their real offsets, index entries and next states; then the
outbox position. A transaction whose end is unknown is decided by the log: a new producer is initialised, which ends
the old transaction, and the position on the log says whether it was committed.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawstream.bus.interface import Bus, Delivery, OutgoingRecord, TransactionalProducer
from clawstream.clock import Clock
from clawstream.codec import encode
from clawstream.errors import BusError, FatalBusError, Fenced, OutboxError, RecordRejected
from clawstream.ids import derive
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.topics import partition_for
from schemas.events.base import RecordReference
from services.gateway.index_follower import IndexFollower
from services.gateway.outbox import Outbox, OutboxEntry
from services.gateway.outbox_entries import NextStateEntry, TurnEntry, decode_entry
from services.gateway.outbox_position import position_record, read_position
from services.gateway.turn_index import TurnIndex

_MAX_ENTRIES = 500
_MAX_BATCH_BYTES = 8 * 1024 * 1024
_FLUSH_SECONDS = 15.0
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 5.0
_WAIT_SECONDS = 0.5
_CATCH_UP_SECONDS = 30.0
"""A next state whose turn was drained before a restart takes its place from the index; so long it may take to load."""


@dataclass(frozen=True, slots=True)
class GatewayTopics:
    """Full names of the topics that a gateway writes."""

    turns: str
    next_states: str
    turn_index: str
    outbox: str


class UnknownPlace(BusError):  # noqa: N818 - reads as the condition it names
    """The turn of a next state is not known to be on the log yet."""


class OutboxDrain:
    """Owns the transactional producer. `start`, then `stop`."""

    def __init__(
        self,
        *,
        bus: Bus,
        outbox: Outbox,
        index: TurnIndex,
        follower: IndexFollower,
        topics: GatewayTopics,
        gateway: str,
        source: str,
        transactional_id: str,
        linger_seconds: float,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """`linger_seconds`: how long a drain waits for company when there is little to do."""
        self._bus = bus
        self._outbox = outbox
        self._index = index
        self._follower = follower
        self._topics = topics
        self._gateway = gateway
        self._source = source
        self._transactional_id = transactional_id
        self._linger_seconds = linger_seconds
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._producer: TransactionalProducer | None = None
        self._index_partitions = 0
        self._position = 0
        self._stopping = threading.Event()
        self._drained = threading.Condition()
        self._oversized: set[int] = set()
        self.failure: Exception | None = None
        """Why the thread gave up, if it did: the process should end."""
        self._thread = threading.Thread(target=self._run, name="outbox-drain", daemon=True)

    def start(self) -> None:
        """Starts draining."""
        self._thread.start()

    def stop(self, drain_seconds: float) -> int:
        """Drains for at most so long, ends, and returns how many entries are left in the outbox."""
        self.wait_until_drained(drain_seconds)
        self._stopping.set()
        self._outbox.interrupt()
        if self._thread.is_alive():
            self._thread.join()
        return self._outbox.undrained_entries

    def wait_until_drained(self, timeout_seconds: float) -> bool:
        """Whether everything that is in the outbox now is on the log, waiting for it if need be."""
        target = self._outbox.accepted_sequence
        with self._drained:
            return self._drained.wait_for(
                lambda: self._position >= target or not self._thread.is_alive(), timeout_seconds
            ) and (self._position >= target)

    # ---- the thread

    def _run(self) -> None:
        retry_seconds = _FIRST_RETRY_SECONDS
        try:
            while not self._stopping.is_set():
                try:
                    self._drain_while_it_works()
                    retry_seconds = _FIRST_RETRY_SECONDS
                except UnknownPlace as error:
                    self._logger.info("waiting for a turn's place on the log", reason=str(error))
                    self._abandon()
                    self._stopping.wait(_FIRST_RETRY_SECONDS)
                except RecordRejected as error:
                    self._abandon()
                    self._set_aside(error)
                except (Fenced, FatalBusError):
                    raise
                except BusError as error:
                    self._logger.warning(
                        "the outbox cannot be drained; chat goes on",
                        error=str(error),
                        entries=self._outbox.undrained_entries,
                        retry_seconds=retry_seconds,
                    )
                    self._abandon()
                    self._stopping.wait(retry_seconds)
                    retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)
        except Exception as error:
            # The boundary of this thread: the process is told, and ends.
            self.failure = error
            self._logger.error("the outbox is not drained any more", error=str(error), kind=type(error).__name__)
        finally:
            self._abandon()
            with self._drained:
                self._drained.notify_all()

    def _drain_while_it_works(self) -> None:
        producer = self._ready_producer()
        while not self._stopping.is_set():
            if not self._outbox.wait_for(self._position, _WAIT_SECONDS):
                continue
            if self._linger_seconds and self._outbox.undrained_entries < _MAX_ENTRIES:
                self._stopping.wait(self._linger_seconds)
            batch = self._outbox.read(self._position, max_entries=_MAX_ENTRIES, max_bytes=_MAX_BATCH_BYTES)
            if not batch:
                continue
            started = self._clock.monotonic_seconds()
            self._transact(producer, batch)
            self._metrics.observe("outbox_drain_seconds", self._clock.monotonic_seconds() - started)
            if producer.needs_replacement:
                self._abandon()
                producer = self._ready_producer()

    def _ready_producer(self) -> TransactionalProducer:
        """A new producer has decided all earlier transactions, so that the position on the log is the truth."""
        if self._producer is not None:
            return self._producer
        producer = self._bus.transactional_producer(self._transactional_id)
        try:
            self._index_partitions = self._partition_count(self._topics.turn_index)
            self._take_position_from_log()
        except BaseException:
            producer.close()
            raise
        self._producer = producer
        return producer

    def _take_position_from_log(self) -> None:
        on_log = read_position(self._bus, self._topics.outbox, self._gateway)
        position = self._outbox.first_sequence
        if on_log is not None and on_log.outbox_id == self._outbox.outbox_id:
            if on_log.next_sequence > self._outbox.next_sequence:
                raise OutboxError(
                    f"the log holds entries of this outbox up to {on_log.next_sequence}, the disk only up to "
                    f"{self._outbox.next_sequence}: an old copy of the outbox was restored; remove its folder"
                )
            position = max(position, on_log.next_sequence)
        self._moved_to(position)

    def _transact(self, producer: TransactionalProducer, batch: Sequence[OutboxEntry]) -> None:
        entries = [
            decode_entry(entry.payload, where=f"outbox entry {entry.sequence}")
            for entry in batch
            if entry.sequence not in self._oversized
        ]
        places: dict[str, RecordReference] = {}
        producer.begin()
        for entry in entries:
            if isinstance(entry, TurnEntry):
                self._produce_turn(producer, entry, places)
        producer.flush(_FLUSH_SECONDS)
        for entry in entries:
            if isinstance(entry, TurnEntry):
                producer.produce(self._index_record(entry, places[entry.known.turn_id]))
            elif (record := self._next_state_record(entry, places)) is not None:
                producer.produce(record)
        next_sequence = batch[-1].sequence + 1
        producer.produce(
            position_record(
                topic=self._topics.outbox,
                gateway=self._gateway,
                source=self._source,
                outbox_id=self._outbox.outbox_id,
                next_sequence=next_sequence,
                clock=self._clock,
            )
        )
        producer.commit()
        for turn_id, place in places.items():
            self._index.placed(turn_id, place)
        self._moved_to(next_sequence)

    def _produce_turn(
        self, producer: TransactionalProducer, entry: TurnEntry, places: dict[str, RecordReference]
    ) -> None:
        def delivered(delivery: Delivery) -> None:
            places[entry.known.turn_id] = RecordReference(
                topic=delivery.record.topic, partition=delivery.partition, offset=delivery.offset
            )

        producer.produce(entry.record, delivered)

    def _index_record(self, entry: TurnEntry, place: RecordReference) -> OutgoingRecord:
        event = entry.known.at(place).to_event()
        return encode(
            event,
            topic=self._topics.turn_index,
            key=f"{event.answer_key}/{event.turn_id}",
            event_id=derive("turn-index", event.turn_id),
            source=self._source,
            partition=partition_for(event.answer_key, self._index_partitions),
            traceparent=entry.traceparent,
        )

    def _next_state_record(self, entry: NextStateEntry, places: Mapping[str, RecordReference]) -> OutgoingRecord | None:
        place = self._place_of(entry, places)
        if place is None:
            return None
        event = entry.draft.at(place)
        return encode(
            event,
            topic=self._topics.next_states,
            key=event.session_id,
            event_id=event.next_state_id,
            source=self._source,
            traceparent=entry.traceparent,
        )

    def _place_of(self, entry: NextStateEntry, places: Mapping[str, RecordReference]) -> RecordReference | None:
        """Where the next state's turn is. None when no record of it exists (any more): there is nothing to judge."""
        event = entry.draft.event
        place = event.turn_ref if entry.draft.place_known else places.get(event.turn_id)
        if place is None:
            place = self._index.turn_ref(event.turn_id)
        if place is None:
            # It was drained before this process started, so the index topic holds it; or it was not recorded at all.
            if not self._follower.wait_until_caught_up(_CATCH_UP_SECONDS):
                raise UnknownPlace(f"turn {event.turn_id} of next state {event.next_state_id}: the index is not loaded")
            place = self._index.turn_ref(event.turn_id)
        if place is None:
            self._logger.error(
                "a next state is dropped: its turn is neither in the outbox nor in the index",
                next_state_id=event.next_state_id,
                turn_id=event.turn_id,
            )
        return place

    def _set_aside(self, error: RecordRejected) -> None:
        """A record larger than its topic allows can never be drained: it must not hold up what comes after it."""
        for entry in self._outbox.read(self._position, max_entries=_MAX_ENTRIES, max_bytes=_MAX_BATCH_BYTES):
            if entry.sequence not in self._oversized and error.record is not None and self._made(entry, error.record):
                self._oversized.add(entry.sequence)
                self._logger.error("an outbox entry is dropped", sequence=entry.sequence, error=str(error))
                return
        raise OutboxError(f"the log refuses a record that no outbox entry made: {error}") from error

    def _made(self, entry: OutboxEntry, record: object) -> bool:
        decoded = decode_entry(entry.payload, where=f"outbox entry {entry.sequence}")
        if not isinstance(record, OutgoingRecord):
            return False
        event_id = dict(record.headers).get("ce_id")
        if isinstance(decoded, TurnEntry):
            return event_id in (
                dict(decoded.record.headers)["ce_id"],
                derive("turn-index", decoded.known.turn_id).encode(),
            )
        return event_id == decoded.draft.event.next_state_id.encode()

    def _moved_to(self, position: int) -> None:
        with self._drained:
            self._position = position
            self._drained.notify_all()
        self._outbox.release(position)
        self._oversized = {sequence for sequence in self._oversized if sequence >= position}
        self._metrics.set("outbox_entries", self._outbox.undrained_entries)
        self._metrics.set("outbox_bytes", self._outbox.undrained_bytes)

    def _partition_count(self, topic: str) -> int:
        admin = self._bus.admin()
        try:
            return len(admin.partitions(topic))
        finally:
            admin.close()

    def _abandon(self) -> None:
        """Closes the producer. What it left open is aborted when its successor is initialised."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None
