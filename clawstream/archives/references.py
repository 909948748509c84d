"""Records that refer to others by offset, on their way to a log that gives new offsets. Pure.

What is translated: every `RecordReference` (`turn_ref`, `next_state_ref`, a train-step's `ref`), a sample's revision,
`next_offsets` of train-steps, `turn_ends` of forgotten principals, the offsets of skipped inputs, and the headers of
dead letters. References stand beside encrypted content, so that no key is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import orjson

from clawstream.bus.interface import Record
from clawstream.codec import header
from clawstream.errors import ArchiveError
from clawstream.stages import STAGES
from clawstream.topics import (
    FORGOTTEN,
    NEXT_STATES,
    SAMPLES,
    SCORES,
    SCORES_REPLAY,
    SKIPS,
    TRAIN_STEPS,
    TURN_INDEX,
    TURNS,
    full_name,
)

NOWHERE: Final = 2**63 - 1
"""The offset of a record that was not archived: beyond any end, so that whoever follows it is told that it is gone."""
TRANSLATED_TO: Final = (TURNS, NEXT_STATES, SCORES, SCORES_REPLAY, SAMPLES)
"""Topics that others refer to: each only to those before it."""
_DEAD_LETTERS: Final = tuple(stage.dead_letter_topic for stage in STAGES.values())
REFERRING: Final = frozenset(
    (NEXT_STATES, SCORES, SCORES_REPLAY, SAMPLES, TRAIN_STEPS, TURN_INDEX, FORGOTTEN, SKIPS, *_DEAD_LETTERS)
)
"""Topics whose events refer to others by offset. The rest is restored byte for byte."""


def in_order(topics: Sequence[str]) -> list[str]:
    """`topics` (without namespace) so that each comes after those that it refers to."""
    return sorted(
        topics, key=lambda topic: TRANSLATED_TO.index(topic) if topic in TRANSLATED_TO else len(TRANSLATED_TO)
    )


class Places:
    """Where the records of an archive are now. 16 bytes for each."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        self._topics: set[str] = set()

    def add(self, topic: str, partition: int, new_by_old: Mapping[int, int]) -> None:
        """All records of one partition of `topic` (without namespace)."""
        old = np.fromiter(sorted(new_by_old), np.int64, len(new_by_old))
        new = np.fromiter((new_by_old[offset] for offset in old.tolist()), np.int64, len(new_by_old))
        self._places[topic, partition] = (old, new)
        self._topics.add(topic)

    def knows(self, topic: str) -> bool:
        """Whether anything of this topic was restored."""
        return topic in self._topics

    def of(self, topic: str, partition: int, offset: int) -> int:
        """The new offset; NOWHERE of what was not archived."""
        old, new = self._found(topic, partition)
        index = int(np.searchsorted(old, offset))
        return int(new[index]) if index < old.size and old[index] == offset else NOWHERE

    def after(self, topic: str, partition: int, next_offset: int) -> int:
        """The new offset behind the last record before `next_offset`; 0 when there is none."""
        old, new = self._found(topic, partition)
        index = int(np.searchsorted(old, next_offset))
        return int(new[index - 1]) + 1 if index > 0 else 0

    def _found(self, topic: str, partition: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        empty = np.empty(0, np.int64)
        return self._places.get((topic, partition), (empty, empty))


@dataclass(slots=True)
class Translator:
    """From the archive's namespace and offsets to those of the restore."""

    old_namespace: str
    new_namespace: str
    places: Places
    allow_dangling: bool
    """Whether records of topics that were never restored may be referred to: the references then lead nowhere."""
    dangling: int = 0
    """References to records that are not in the archive."""

    def translated(self, topic: str, record: Record) -> Record:
        """`record` of `topic` (without namespace) with its references as they are now.

        Raises ArchiveError when it refers to a topic that was not restored yet.
        """
        if topic not in REFERRING:
            return record
        headers = self._headers(record)
        if record.value is None:
            return replace(record, headers=headers)
        try:
            document: object = orjson.loads(record.value)
        except orjson.JSONDecodeError:
            return replace(record, headers=headers)  # Poison, which its stage has buried: it stays what it was.
        if not isinstance(document, dict):
            return replace(record, headers=headers)
        event = cast("dict[str, Any]", document)
        where = str(record)
        self._special(topic, event, where)
        self._walk(event, where)
        return replace(record, value=orjson.dumps(event), headers=headers)

    def _special(self, topic: str, event: dict[str, Any], where: str) -> None:
        """Offsets that are no whole references. Before the references themselves are changed."""
        if topic == TRAIN_STEPS:
            event["next_offsets"] = self._ends(SAMPLES, event.get("next_offsets", {}), where)
            for sample in event.get("samples", []):
                self._revision(sample, sample["ref"]["partition"], where)
        elif topic == FORGOTTEN:
            event["turn_ends"] = self._ends(TURNS, event.get("turn_ends", {}), where)
        elif topic == SKIPS:
            self._skips(event, where)
        elif "revision" in event and "next_state_ref" in event:
            self._revision(event, event["next_state_ref"]["partition"], where)

    def _revision(self, holder: dict[str, Any], partition: int, where: str) -> None:
        """Samples and next states of a session lie in the same partition number."""
        revision = holder["revision"]
        revision["next_state_offset"] = self._place(NEXT_STATES, partition, revision["next_state_offset"], where)

    def _ends(self, topic: str, ends: Mapping[str, int], where: str) -> dict[str, int]:
        if ends:
            self._require(topic, where)
        return {partition: self.places.after(topic, int(partition), end) for partition, end in ends.items()}

    def _skips(self, event: dict[str, Any], where: str) -> None:
        topic = self._without_namespace(event["topic"])
        if topic is None:
            return
        event["topic"] = full_name(self.new_namespace, topic)
        translated = {
            reason: [self._place(topic, event["partition"], offset, where) for offset in offsets]
            for reason, offsets in event["offsets_by_reason"].items()
        }
        kept = {reason: [each for each in offsets if each != NOWHERE] for reason, offsets in translated.items()}
        # Of inputs that are gone only one place is left, for an event names at least one.
        event["offsets_by_reason"] = {reason: offsets or [NOWHERE] for reason, offsets in kept.items()}

    def _walk(self, value: object, where: str) -> None:
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            if fields.keys() == {"topic", "partition", "offset"}:
                topic = self._without_namespace(fields["topic"])
                if topic is not None:
                    fields["topic"] = full_name(self.new_namespace, topic)
                    fields["offset"] = self._place(topic, fields["partition"], fields["offset"], where)
                return
            for each in fields.values():
                self._walk(each, where)
        elif isinstance(value, list):
            for each in cast("list[Any]", value):
                self._walk(each, where)

    def _headers(self, record: Record) -> tuple[tuple[str, bytes], ...]:
        """Of a dead letter: where its original was."""
        topic = self._without_namespace(header(record.headers, "dlq.topic") or "")
        partition, offset = (header(record.headers, name) or "" for name in ("dlq.partition", "dlq.offset"))
        if topic is None or not partition.isdecimal() or not offset.isdecimal():
            return record.headers
        place = self._place(topic, int(partition), int(offset), str(record))
        changed = {"dlq.topic": full_name(self.new_namespace, topic).encode(), "dlq.offset": str(place).encode()}
        return tuple((name, changed.get(name, value)) for name, value in record.headers)

    def _place(self, topic: str, partition: int, offset: int, where: str) -> int:
        if offset == NOWHERE:
            return offset
        self._require(topic, where)
        place = self.places.of(topic, partition, offset)
        self.dangling += place == NOWHERE
        return place

    def _require(self, topic: str, where: str) -> None:
        if not self.allow_dangling and not self.places.knows(topic):
            raise ArchiveError(
                f"{where} refers to records of {topic} by offset, and where those are now is not known: restore "
                f"{topic} with it, or before it with the same --offsets (then --resume), or say --dangling-references"
            )

    def _without_namespace(self, name: str) -> str | None:
        prefix = f"{self.old_namespace}."
        return name.removeprefix(prefix) if name.startswith(prefix) else None
