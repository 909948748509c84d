"""What the log holds of a session or a principal. Reads the topics once, and changes nothing.

Topics that are compacted can be cleared: a tombstone takes the place of every key. In the others a record stays
readable until the topic's retention removes it; the survey says how many there are and until when, and how many of them
are encrypted: they are unreadable as soon as the keys are deleted. Takes a bus that decrypts nothing: what it needs
stands beside the content.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import orjson

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.bus.ranges import read_once, topic_ranges
from clawstream.codec import decode_as, header
from clawstream.encryption.deletion import keys_of_principal, keys_of_session
from clawstream.encryption.envelope import KEY_HEADER
from clawstream.forgetting.lineage import SeenStep, descendants
from clawstream.topics import TRAIN_STEPS, TURNS, TopicDefinition, full_name, partition_for, topic_definitions
from schemas.arrays import BlobReference
from schemas.events.forgotten import ForgottenKind
from schemas.events.train_step import TrainStepEvent


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom or what to forget."""

    kind: ForgottenKind
    name: str
    """The session's id, or the principal's name."""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"


@dataclass(slots=True)
class Retained:
    """What stays readable in one topic that is not compacted."""

    records: int = 0
    value_bytes: int = 0
    encrypted_records: int = 0
    """Of `records`: their content goes with the key of their session."""
    newest_milliseconds: int = 0
    """Timestamp of the newest record."""
    retention: timedelta | None = None
    """Of the topic; None keeps for ever."""

    @property
    def gone_after(self) -> datetime | None:
        """When retention has removed the newest record, give or take the time that a segment stays open."""
        if self.retention is None:
            return None
        return datetime.fromtimestamp(self.newest_milliseconds / 1000, UTC) + self.retention


LiveKeys = dict[tuple[bytes, int], None]
"""Keys with their partition that have a value now, in the order of the log."""


@dataclass(slots=True)
class Survey:
    """What was found."""

    turn_ends: dict[str, int] = field(default_factory=dict[str, int])
    """Partition of `turns` (as text) to its end when it was read."""
    session_ids: set[str] = field(default_factory=set[str])
    turn_ids: set[str] = field(default_factory=set[str])
    next_state_ids: set[str] = field(default_factory=set[str])
    session_keys: list[bytes] = field(default_factory=list[bytes])
    """Ids of the keys that the sessions have: what they encrypt is unreadable without."""
    live: dict[str, LiveKeys] = field(default_factory=dict[str, LiveKeys])
    """Compacted topic, without namespace, to what a tombstone removes."""
    retained: dict[str, Retained] = field(default_factory=dict[str, Retained])
    """Other topic, without namespace, to what stays in it."""
    blobs: dict[str, BlobReference] = field(default_factory=dict[str, BlobReference])
    """By checksum: those that nothing else on the log names."""
    shared_blobs: set[str] = field(default_factory=set[str])
    """Checksums of blobs that others name too: they stay."""
    steps: list[SeenStep] = field(default_factory=list[SeenStep])
    """Training steps that learned from it, in the order of the log."""
    weight_versions: list[int] = field(default_factory=list[int])
    """Versions that these steps made, and all that descend from them."""

    @property
    def is_empty(self) -> bool:
        """Whether the log holds nothing of it that could be removed or was trained."""
        return not (self.turn_ids or self.session_keys or any(self.live.values()) or self.retained or self.steps)


def survey(bus: Bus, namespace: str, subject: Subject) -> Survey:
    """Reads the log up to its present end. Raises BusError, and DecodeError for a train-step that cannot be read."""
    return _Surveyor(bus, namespace, subject).run()


class _Surveyor:
    def __init__(self, bus: Bus, namespace: str, subject: Subject) -> None:
        self._bus = bus
        self._namespace = namespace
        self._subject = subject
        self._needle = orjson.dumps(subject.name)
        self._found = Survey()
        self._named_blobs: dict[str, BlobReference] = {}

    def run(self) -> Survey:
        definitions = topic_definitions()
        kept = [each for each in definitions.values() if _holds_conversations(each) and not _is_compacted(each)]
        compacted = [each for each in definitions.values() if _holds_conversations(each) and _is_compacted(each)]
        for definition in sorted(kept, key=lambda each: each.topic != TURNS):
            self._read_retained(definition)
        for definition in compacted:
            self._read_compacted(definition)
        self._keep_shared_blobs([*kept, *compacted])
        self._read_steps()
        self._found.session_keys = self._keys()
        return self._found

    def _keys(self) -> list[bytes]:
        name = self._subject.name
        if self._subject.kind is ForgottenKind.SESSION:
            return keys_of_session(self._bus, self._namespace, name)
        return keys_of_principal(self._bus, self._namespace, name, sorted(self._found.session_ids))

    def _read_retained(self, definition: TopicDefinition) -> None:
        ranges = self._ranges(definition)
        if definition.topic == TURNS and self._subject.kind is ForgottenKind.PRINCIPAL:
            self._found.turn_ends = {str(partition.partition): end for partition, (_, end) in ranges.items() if end > 0}
        retained = Retained(retention=_retention(definition))
        for record in read_once(self._bus, ranges):
            document = self._document(record)
            if document is None:
                continue
            retained.records += 1
            retained.value_bytes += len(record.value or b"")
            retained.encrypted_records += header(record.headers, KEY_HEADER) is not None
            retained.newest_milliseconds = max(retained.newest_milliseconds, record.timestamp_milliseconds)
            self._note(document)
        if retained.records:
            self._found.retained[definition.topic] = retained

    def _read_compacted(self, definition: TopicDefinition) -> None:
        live: LiveKeys = {}
        blobs_of: dict[tuple[bytes, int], dict[str, Any]] = {}
        for record in read_once(self._bus, self._ranges(definition)):
            if record.key is None:
                continue
            place = (record.key, record.partition)
            document = self._document(record)
            if document is not None:
                live[place] = None
                blobs_of[place] = document
            else:
                live.pop(place, None)
        for document in blobs_of.values():
            self._note(document)
        self._found.live[definition.topic] = live

    def _ranges(self, definition: TopicDefinition) -> dict[TopicPartition, tuple[int, int]]:
        """A session lies in one partition of the topics that are partitioned by it."""
        ranges = topic_ranges(self._bus, [full_name(self._namespace, definition.topic)])
        by_session = definition.partition_by == "session_id"
        if self._subject.kind is ForgottenKind.SESSION and by_session:
            number = partition_for(self._subject.name, len(ranges))
            return {partition: each for partition, each in ranges.items() if partition.partition == number}
        return ranges

    def _document(self, record: Record) -> dict[str, Any] | None:
        """The value of a record that belongs to the subject."""
        value = record.value
        if value is None:
            return None
        # Most records belong to others: look before parsing.
        if self._needle not in value and _first_of_key(record) not in self._found.next_state_ids:
            return None
        try:
            document: object = orjson.loads(value)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(document, dict):
            return None
        fields = cast("dict[str, Any]", document)
        name = "session_id" if self._subject.kind is ForgottenKind.SESSION else "principal"
        is_its = fields.get(name) == self._subject.name
        # Entries of the ledger do not say whose they are.
        is_its = is_its or ("principal" not in fields and fields.get("next_state_id") in self._found.next_state_ids)
        return fields if is_its else None

    def _note(self, document: Mapping[str, Any]) -> None:
        session_id, turn_id, next_state_id = (document.get(name) for name in ("session_id", "turn_id", "next_state_id"))
        if isinstance(session_id, str):
            self._found.session_ids.add(session_id)
        if isinstance(turn_id, str):
            self._found.turn_ids.add(turn_id)
        if isinstance(next_state_id, str):
            self._found.next_state_ids.add(next_state_id)
        for reference in _blobs_in(document):
            self._named_blobs[reference.sha256] = reference

    def _keep_shared_blobs(self, definitions: list[TopicDefinition]) -> None:
        """A blob is named after its content: another turn with the same array names the same one."""
        if not self._named_blobs:
            return
        shared: set[str] = set()
        for definition in definitions:
            for record in read_once(self._bus, topic_ranges(self._bus, [full_name(self._namespace, definition.topic)])):
                value = record.value
                if value is None or b'"sha256"' not in value or self._document(record) is not None:
                    continue
                shared.update(checksum for checksum in self._named_blobs if checksum.encode() in value)
        self._found.shared_blobs = shared
        self._found.blobs = {checksum: one for checksum, one in self._named_blobs.items() if checksum not in shared}

    def _read_steps(self) -> None:
        topic = full_name(self._namespace, TRAIN_STEPS)
        made: list[tuple[str, int, int]] = []
        for record in read_once(self._bus, topic_ranges(self._bus, [topic])):
            event = decode_as(record, TrainStepEvent)
            if event.weight_version is not None:
                made.append((event.policy, event.base_version, event.weight_version))
            sample_ids = [sample.sample_id for sample in event.samples if sample.turn_id in self._found.turn_ids]
            if sample_ids:
                self._found.steps.append(SeenStep.of(event, sample_ids))
        self._found.weight_versions = descendants(self._found.steps, made)


def _first_of_key(record: Record) -> str:
    """What stands before the first slash: of a ledger entry, the next state."""
    return (record.key or b"").decode(errors="replace").partition("/")[0]


def _holds_conversations(definition: TopicDefinition) -> bool:
    return definition.partition_by in {"session_id", "answer_key", "original key"}


def _is_compacted(definition: TopicDefinition) -> bool:
    return "compact" in definition.config["cleanup.policy"]


def _retention(definition: TopicDefinition) -> timedelta | None:
    milliseconds = int(definition.config.get("retention.ms", "-1"))
    return None if milliseconds < 0 else timedelta(milliseconds=milliseconds)


def _blobs_in(value: object) -> Iterator[BlobReference]:
    """References to blobs anywhere in a document."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if {"uri", "sha256", "size_bytes"} <= fields.keys():
            yield BlobReference.model_validate(fields)
        for each in fields.values():
            yield from _blobs_in(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _blobs_in(each)
