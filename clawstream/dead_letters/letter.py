"""A record on a dead-letter topic, as data: where it came from, why it is there, and whether it was sent back. Pure.

Sending a letter back leaves a *marker* behind it on the dead-letter topic, in the same transaction: whoever reads the
topic sees which letters are done. Both kinds of record stay until the topic's retention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from clawstream.bus.interface import Headers, OutgoingRecord, Record
from clawstream.codec import header
from clawstream.stages import Stage

REASON_OF_OLD: Final = "undecodable"
"""Letters without the header `dlq.reason`: their writer buries only what it cannot decode."""
REDRIVE_COUNT: Final = "redrive.count"
"""Header of a record that was sent back: how often by now."""
_REDRIVE_OF: Final = "redrive.of"
_REDRIVE_TIME: Final = "redrive.time"
_MARKED_OFFSET: Final = "redrive.marker"
_OURS: Final = ("dlq.", "redrive.")


@dataclass(frozen=True, slots=True)
class Letter:
    """One input that a stage could not handle."""

    stage: Stage
    """Whose."""
    record: Record
    """As it is on the dead-letter topic, without its value: see `value_bytes`."""
    value_bytes: int | None
    """Size of the value; None for a tombstone, or when it did not fit into the dead-letter topic."""
    origin: Record | None
    """Where the input was, without key and value; None when the headers do not say."""
    reason: str
    """A word: `undecodable`, `deadline`, `handler_failed`, `missing_turn`, `oversize`..."""
    error_type: str
    """Class of the error."""
    error_message: str
    """What it said, up to 512 bytes."""
    attempts: int
    """How often handling was tried."""
    buried_at: datetime
    """When it became a dead letter."""
    redrives: int
    """How often the input had been sent back before it came here."""
    redriven_at: datetime | None = None
    """When this letter was sent back; None while it waits."""
    copies: int = 1
    """Letters with this origin: a crash of the stage may have buried it again."""

    @property
    def name(self) -> str:
        """What people call it: `judge/3@17` is at offset 17 of partition 3 of the judge's dead letters."""
        return f"{self.stage.name}/{self.record.partition}@{self.record.offset}"

    @property
    def is_value_omitted(self) -> bool:
        """Whether the value has to be read from where the input was."""
        return header(self.record.headers, "dlq.value.omitted") is not None


class Letters:
    """A fold over the dead-letter topic of one stage. Keeps no values: there may be many, and large ones."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._letters: dict[str, Letter] = {}
        """By origin."""
        self._marked: dict[tuple[int, int], datetime] = {}

    def apply(self, record: Record) -> None:
        """Takes a letter or a marker in."""
        offset = header(record.headers, _MARKED_OFFSET)
        if offset is not None:
            self._marked[record.partition, int(offset)] = _time(record, _REDRIVE_TIME)
            return
        letter = _letter(self._stage, record)
        first = self._letters.setdefault(str(letter.origin or record), letter)
        if first is not letter:
            self._letters[str(letter.origin)] = replace(first, copies=first.copies + 1)

    def all(self) -> list[Letter]:
        """Every letter, oldest first, with what markers say about it."""
        return sorted(
            (
                replace(letter, redriven_at=self._marked.get((letter.record.partition, letter.record.offset)))
                for letter in self._letters.values()
            ),
            key=lambda letter: (letter.buried_at, letter.record.partition, letter.record.offset),
        )


def original(letter: Letter, value: bytes | None, *, now: datetime) -> OutgoingRecord:
    """The input again, for the partition that it was on: key, value and headers as they were, and how often by now."""
    assert letter.origin is not None
    return OutgoingRecord(
        topic=letter.origin.topic,
        key=letter.record.key,
        value=value,
        headers=(
            *_original_headers(letter.record.headers),
            (REDRIVE_COUNT, str(letter.redrives + 1).encode()),
            (_REDRIVE_OF, str(letter.record).encode()),
            (_REDRIVE_TIME, now.isoformat().encode()),
        ),
        partition=letter.origin.partition,
    )


def marker(letter: Letter, *, now: datetime) -> OutgoingRecord:
    """What says that the letter was sent back. On its partition, so that it is read behind it and outlives it."""
    return OutgoingRecord(
        topic=letter.record.topic,
        key=letter.record.key,
        value=None,
        headers=(
            (_MARKED_OFFSET, str(letter.record.offset).encode()),
            (_REDRIVE_TIME, now.isoformat().encode()),
        ),
        partition=letter.record.partition,
    )


def counts(letters: Sequence[Letter]) -> dict[tuple[str, str], tuple[int, int]]:
    """Stage and reason to the number of letters that wait, and of those that were sent back."""
    table: dict[tuple[str, str], tuple[int, int]] = {}
    for letter in letters:
        waiting, redriven = table.get((letter.stage.name, letter.reason), (0, 0))
        done = letter.redriven_at is not None
        table[letter.stage.name, letter.reason] = (waiting + (not done), redriven + done)
    return table


def _letter(stage: Stage, record: Record) -> Letter:
    return Letter(
        stage=stage,
        record=replace(record, value=None),
        value_bytes=None if record.value is None else len(record.value),
        origin=_origin(record),
        reason=header(record.headers, "dlq.reason") or REASON_OF_OLD,
        error_type=header(record.headers, "dlq.error.type") or "",
        error_message=header(record.headers, "dlq.error.message") or "",
        attempts=_number(record, "dlq.attempts", 1),
        buried_at=_time(record, "dlq.time"),
        redrives=_number(record, REDRIVE_COUNT, 0),
    )


def _origin(record: Record) -> Record | None:
    topic = header(record.headers, "dlq.topic")
    partition, offset = _number(record, "dlq.partition", -1), _number(record, "dlq.offset", -1)
    if topic is None or partition < 0 or offset < 0:
        return None
    timestamp = _number(record, "dlq.timestamp", record.timestamp_milliseconds)
    return Record(topic, partition, offset, None, None, _original_headers(record.headers), timestamp)


def _original_headers(headers: Headers) -> Headers:
    return tuple((name, value) for name, value in headers if not name.startswith(_OURS))


def _number(record: Record, name: str, default: int) -> int:
    text = header(record.headers, name)
    return int(text) if text is not None and text.isdecimal() else default


def _time(record: Record, name: str) -> datetime:
    text = header(record.headers, name)
    try:
        time = datetime.fromisoformat(text) if text is not None else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        return datetime.fromtimestamp(record.timestamp_milliseconds / 1000, UTC)
    return time
