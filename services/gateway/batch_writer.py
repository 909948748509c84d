"""One batch of the outbox as one transaction: turns, then with their real offsets what refers to them.

Everything that may have to be waited for is looked up before the transaction begins: an open transaction holds up all
readers of its partitions, and the broker ends one that is open for too long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawstream.bus.interface import Delivery, OutgoingRecord, TransactionalProducer
from clawstream.bus.write_together import write_together
from clawstream.clock import Clock
from clawstream.codec import encode
from clawstream.errors import BusError
from clawstream.ids import derive
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.topics import partition_for
from schemas.events.base import RecordReference
from services.gateway.index_follower import IndexFollower
from services.gateway.outbox import OutboxEntry
from services.gateway.outbox_entries import Entry, NextStateEntry, TurnEntry, decode_entry
from services.gateway.outbox_position import position_record
from services.gateway.turn_index import TurnIndex

_FLUSH_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class GatewayTopics:
    """Full names of the topics that a gateway writes."""

    turns: str
    next_states: str
    turn_index: str
    outbox: str


class UnknownPlace(BusError):  # noqa: N818 - reads as the condition it names
    """The turn of a next state is not known to be on the log yet."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Entries whose turns are all placed, or part of the batch."""

    entries: Sequence[Entry]
    """In the order of the outbox."""
    places: Mapping[str, RecordReference]
    """Of turns that are on the log already, by turn id."""
    next_sequence: int
    """The outbox position once the batch is on the log."""


class BatchWriter:
    """Makes the records of a batch and writes them. One thread uses it."""

    def __init__(
        self,
        *,
        index: TurnIndex,
        follower: IndexFollower,
        topics: GatewayTopics,
        gateway: str,
        source: str,
        outbox_id: str,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """`gateway` is the key of the outbox position, `source` what the records say of their origin."""
        self._index = index
        self._follower = follower
        self._topics = topics
        self._gateway = gateway
        self._source = source
        self._outbox_id = outbox_id
        self._clock = clock
        self._metrics = metrics
        self._logger = logger

    def prepare(
        self, batch: Sequence[OutboxEntry], *, without: set[int], index_ends: Mapping[int, int]
    ) -> PreparedBatch:
        """Decodes the batch, less the sequence numbers in `without`, and looks up where earlier turns are.

        `index_ends` are where the partitions of the index ended when all earlier transactions were decided: the turns
        of earlier processes, and of our own commits that were not answered, are before them. A next state whose turn
        has no record (any more) is left out: there is nothing to judge. Raises UnknownPlace while the index is not
        read so far.
        """
        decoded = [
            decode_entry(entry.payload, where=f"outbox entry {entry.sequence}")
            for entry in batch
            if entry.sequence not in without
        ]
        in_batch = {entry.known.turn_id for entry in decoded if isinstance(entry, TurnEntry)}
        places: dict[str, RecordReference] = {}
        entries: list[Entry] = []
        for entry in decoded:
            if isinstance(entry, NextStateEntry) and entry.draft.event.turn_id not in in_batch:
                place = self._place_of(entry, index_ends)
                if place is None:
                    continue
                places[entry.draft.event.turn_id] = place
            entries.append(entry)
        return PreparedBatch(entries, places, batch[-1].sequence + 1)

    def write(
        self, producer: TransactionalProducer, prepared: PreparedBatch, *, index_partitions: int
    ) -> dict[str, RecordReference]:
        """One transaction. Returns where the batch's turns are now. Raises what the producer raises."""
        started = self._clock.monotonic_seconds()
        written: dict[str, RecordReference] = {}
        producer.begin()
        for entry in prepared.entries:
            if isinstance(entry, TurnEntry):
                self._produce_turn(producer, entry, written)
        producer.flush(_FLUSH_SECONDS)
        started = self._observe("turns", started)
        places = {**prepared.places, **written}
        for entry in prepared.entries:
            if isinstance(entry, TurnEntry):
                producer.produce(self._index_record(entry, written[entry.known.turn_id], index_partitions))
            else:
                producer.produce(self._next_state_record(entry, places[entry.draft.event.turn_id]))
        producer.produce(self._position(prepared.next_sequence))
        started = self._observe("dependants", started)
        producer.commit()
        self._observe("commit", started)
        return written

    def write_position(self, producer: TransactionalProducer, next_sequence: int) -> None:
        """One transaction that says only how far this outbox is on the log, and so that it is in use."""
        write_together(producer, [self._position(next_sequence)])

    def _observe(self, phase: str, started: float) -> float:
        now = self._clock.monotonic_seconds()
        self._metrics.observe("outbox_drain_phase_seconds", now - started, phase=phase)
        return now

    def _produce_turn(
        self, producer: TransactionalProducer, entry: TurnEntry, written: dict[str, RecordReference]
    ) -> None:
        def delivered(delivery: Delivery) -> None:
            written[entry.known.turn_id] = RecordReference(
                topic=delivery.record.topic, partition=delivery.partition, offset=delivery.offset
            )

        producer.produce(entry.record, delivered)

    def _index_record(self, entry: TurnEntry, place: RecordReference, partitions: int) -> OutgoingRecord:
        event = entry.known.at(place).to_event()
        return encode(
            event,
            topic=self._topics.turn_index,
            key=f"{event.answer_key}/{event.turn_id}",
            event_id=derive("turn-index", event.turn_id),
            source=self._source,
            partition=partition_for(event.answer_key, partitions),
            traceparent=entry.traceparent,
        )

    def _next_state_record(self, entry: NextStateEntry, place: RecordReference) -> OutgoingRecord:
        event = entry.draft.at(place)
        return encode(
            event,
            topic=self._topics.next_states,
            key=event.session_id,
            event_id=event.next_state_id,
            source=self._source,
            traceparent=entry.traceparent,
        )

    def _position(self, next_sequence: int) -> OutgoingRecord:
        return position_record(
            topic=self._topics.outbox,
            gateway=self._gateway,
            source=self._source,
            outbox_id=self._outbox_id,
            next_sequence=next_sequence,
            clock=self._clock,
        )

    def _place_of(self, entry: NextStateEntry, index_ends: Mapping[int, int]) -> RecordReference | None:
        """Where a next state's turn is that an earlier batch wrote. None when no record of it exists (any more)."""
        event = entry.draft.event
        if entry.draft.place_known:
            return event.turn_ref
        # Asked before the index is: what was loaded in between is then found, and nothing is taken for missing.
        index_is_loaded = self._follower.has_read(index_ends)
        place = self._index.turn_ref(event.turn_id)
        if place is None and not index_is_loaded:
            raise UnknownPlace(f"turn {event.turn_id} of next state {event.next_state_id}: the index is not loaded")
        if place is None:
            self._logger.error(
                "a next state is dropped: its turn is neither in the outbox nor in the index",
                next_state_id=event.next_state_id,
                turn_id=event.turn_id,
            )
        return place


def made_record(entry: OutboxEntry, record: object) -> bool:
    """Whether `record` is one that this entry brings to the log."""
    if not isinstance(record, OutgoingRecord):
        return False
    decoded = decode_entry(entry.payload, where=f"outbox entry {entry.sequence}")
    event_id = dict(record.headers).get("ce_id")
    if isinstance(decoded, TurnEntry):
        return event_id in (
            dict(decoded.record.headers)["ce_id"],
            derive("turn-index", decoded.known.turn_id).encode(),
        )
    return event_id == decoded.draft.event.next_state_id.encode()
