"""Finds the records of some turns: by reference where one is known, else by reading a bounded stretch of the log."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import orjson

from clawstream.bus.interface import Bus, Consumer, Record, TopicPartition
from clawstream.bus.ranges import Progress, partitions_of, ranges_since, read_ranges
from clawstream.codec import decode, header
from clawstream.errors import DecodeError, ForgottenContent
from clawstream.topics import NEXT_STATES, SAMPLES, SCORES, TURNS, full_name
from schemas.events import NextStateEvent, SampleEvent, ScoreEvent, TurnEvent
from schemas.events.base import RecordReference

CLOCK_TOLERANCE_MILLISECONDS = 300_000
"""How far the clocks of processes may differ: what follows a turn may look so much older."""

ScanProgress = Callable[[str], Progress]
"""Begins a line of progress for what is read, and returns who is told how far it is."""


@dataclass(slots=True)
class TurnRecords:
    """All that the log holds of one turn."""

    turn_id: str
    partition: int | None = None
    """Of its session, in every topic that is partitioned by session."""
    turn: TurnEvent | None = None
    turn_ref: RecordReference | None = None
    since_milliseconds: int | None = None
    """Time of the turn's record: nothing of it is older."""
    next_states: dict[str, tuple[NextStateEvent, RecordReference]] = field(
        default_factory=dict[str, tuple[NextStateEvent, RecordReference]]
    )
    """By id."""
    scores: dict[tuple[str, int], ScoreEvent] = field(default_factory=dict[tuple[str, int], ScoreEvent])
    """By id and promotion epoch: a promotion writes the score of a replay again, under its epoch."""
    samples: dict[str, tuple[SampleEvent, RecordReference]] = field(
        default_factory=dict[str, tuple[SampleEvent, RecordReference]]
    )
    """By id: those that compaction has left."""


class LogScan:
    """Reads without a group. Not thread-safe."""

    def __init__(self, bus: Bus, namespace: str, progress: ScanProgress) -> None:
        self._bus = bus
        self._namespace = namespace
        self._progress = progress
        self._reader: Consumer = bus.reader()

    def close(self) -> None:
        """Releases the client."""
        self._reader.close()

    def find_turn_of(self, identity: str) -> TurnRecords | None:
        """The turn that `identity` (of a turn, sample, next state or score) belongs to; None when no topic has it.

        Reads whole topics, by the id in the records' headers.
        """
        for topic in (TURNS, SAMPLES, NEXT_STATES, SCORES):
            for record in self._records(topic, None, None):
                if header(record.headers, "ce_id") != identity:
                    continue
                try:
                    event = decode(record)
                except ForgottenContent:
                    return TurnRecords(orjson.loads(record.value or b"")["turn_id"], partition=record.partition)
                assert isinstance(event, TurnEvent | SampleEvent | NextStateEvent | ScoreEvent)
                return TurnRecords(event.turn_id, partition=record.partition)
        return None

    def read_turns(self, found: Mapping[str, TurnRecords]) -> None:
        """Fills in the turns themselves: one partition each where it is known."""
        missing = {turn_id: each for turn_id, each in found.items() if each.turn is None}
        if not missing:
            return
        for record in self._records(TURNS, _partitions(missing.values()), None):
            turn_id = header(record.headers, "ce_id") or ""
            if turn_id not in missing:
                continue
            try:
                event = decode(record)
            except ForgottenContent:
                continue
            assert isinstance(event, TurnEvent)
            each = missing.pop(turn_id)
            each.turn, each.turn_ref = event, _reference(record)
            each.partition, each.since_milliseconds = record.partition, record.timestamp_milliseconds
            if not missing:
                return

    def read_followers(self, found: Mapping[str, TurnRecords]) -> None:
        """Fills in next states, scores and the samples that compaction has left."""
        times = [each.since_milliseconds for each in found.values()]
        known = [time for time in times if time is not None]
        since = min(known) - CLOCK_TOLERANCE_MILLISECONDS if len(known) == len(times) and known else None
        partitions = _partitions(found.values())
        mentions = re.compile(b"|".join(re.escape(turn_id.encode()) for turn_id in found))
        for topic in (NEXT_STATES, SCORES, SAMPLES):
            for record in self._records(topic, partitions, since):
                if record.value is None or not mentions.search(record.value):
                    continue
                try:
                    event = decode(record)
                except DecodeError:  # Poison: the stage that reads it has a dead letter, and a trace goes on.
                    continue
                each = found.get(getattr(event, "turn_id", ""))
                if each is None:
                    continue
                if isinstance(event, NextStateEvent):
                    each.next_states[event.next_state_id] = (event, _reference(record))
                elif isinstance(event, ScoreEvent):
                    each.scores[event.score_id, event.promotion_epoch] = event
                elif isinstance(event, SampleEvent):
                    each.samples[event.sample_id] = (event, _reference(record))

    def read_served(
        self, policy: str, weight_versions: Iterable[int], since_milliseconds: int | None
    ) -> dict[int, list[str]]:
        """Turn ids by the version that made at least one of their tokens, in the order of the log."""
        served: dict[int, list[str]] = {version: [] for version in weight_versions}
        if not served:
            return served
        numbers = b"|".join(str(version).encode() for version in served)
        mentions = re.compile(rb'"weight_version":\s*(?:' + numbers + rb")\b")
        since = None if since_milliseconds is None else since_milliseconds - CLOCK_TOLERANCE_MILLISECONDS
        for record in self._records(TURNS, None, since):
            if record.value is None or not mentions.search(record.value):
                continue
            try:
                turn = decode(record)
            except DecodeError:
                continue
            if isinstance(turn, TurnEvent) and turn.policy == policy:
                for version in sorted({span.weight_version for span in turn.version_spans} & set(served)):
                    served[version].append(turn.turn_id)
        return served

    def _records(
        self, topic: str, partitions: frozenset[int] | None, since_milliseconds: int | None
    ) -> Iterable[Record]:
        every = partitions_of(self._bus, full_name(self._namespace, topic))
        wanted: list[TopicPartition] = [each for each in every if partitions is None or each.partition in partitions]
        ranges = ranges_since(self._reader, wanted, since_milliseconds)
        return read_ranges(self._reader, ranges, self._progress(topic))


def _partitions(found: Iterable[TurnRecords]) -> frozenset[int] | None:
    """Those that may hold them; None for all."""
    numbers = [each.partition for each in found]
    known = [number for number in numbers if number is not None]
    return frozenset(known) if len(known) == len(numbers) else None


def _reference(record: Record) -> RecordReference:
    return RecordReference(topic=record.topic, partition=record.partition, offset=record.offset)
