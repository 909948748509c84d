"""What is remembered of turns that have left the batcher for good. Pure.

Each leaving is one entry, and entries are only ever added: a checkpoint needs no copy of them, but says how many of
them are its own, and which (`LedgerMark`). So the cost of a step follows from what it trains, not from what was trained
before it. The newest entry of a turn counts.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import orjson
from pydantic import BaseModel, ConfigDict, Field

RevisionOrder = tuple[int, bool, int]

_DIGEST_OF_NOTHING = "0" * 64


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One turn left."""

    turn_id: str
    left_at: float
    """When, in seconds since 1970."""
    revision: RevisionOrder | None = None
    """The revision that was dropped for good: a lower one must not be trained after it. None: the turn was trained."""

    def as_bytes(self) -> bytes:
        """What the digest is of."""
        return orjson.dumps([self.turn_id, self.left_at, self.revision])


class LedgerMark(BaseModel):
    """The first so many entries, and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    entries: int = Field(default=0, ge=0)
    """How many there are."""
    digest: str = Field(default=_DIGEST_OF_NOTHING, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the digest before the last entry and that entry, in hexadecimal; zeros before the first."""

    def after(self, entries: Iterable[LedgerEntry]) -> "LedgerMark":
        """With these added."""
        digest, count = bytes.fromhex(self.digest), self.entries
        for entry in entries:
            digest, count = hashlib.sha256(digest + entry.as_bytes()).digest(), count + 1
        return LedgerMark(entries=count, digest=digest.hex())


@dataclass(frozen=True, slots=True)
class LedgerAddition:
    """What a checkpoint adds to what the checkpoint before it remembers."""

    base: LedgerMark
    """What was there; whatever stands behind it belongs to nobody."""
    mark: LedgerMark
    """What is there then."""
    entries: tuple[LedgerEntry, ...] = ()
    """In the order in which the turns left."""
    forget_before: float = 0.0
    """Turns that left before this time, in seconds since 1970, need not be remembered any more."""


class RememberedTurns(Protocol):
    """Entries that outlive the process."""

    def find_turn(self, turn_id: str, entries: int) -> LedgerEntry | None:
        """The newest entry of a turn among the first `entries` ones; None when there is none, or it was forgotten."""
        ...


class TurnLedger:
    """The entries of a run: old ones where they are kept, those of the last two checkpoints in memory."""

    def __init__(self, remembered: RememberedTurns, mark: LedgerMark) -> None:
        """Goes on where `mark` is."""
        self._remembered = remembered
        self._saved = mark
        """What can be asked for."""
        self._mark = mark
        """The end of what was taken."""
        self._taken: dict[str, LedgerEntry] = {}
        """Between the two: it is being saved."""
        self._new: list[LedgerEntry] = []
        self._newest: dict[str, LedgerEntry] = {}
        """Of every turn among the new ones."""

    def find(self, turn_id: str) -> LedgerEntry | None:
        """The newest entry of a turn. Asks the disk for all but the newest turns."""
        found = self._newest.get(turn_id) or self._taken.get(turn_id)
        return found or self._remembered.find_turn(turn_id, self._saved.entries)

    def add(self, entry: LedgerEntry) -> None:
        """A turn leaves."""
        self._new.append(entry)
        self._newest[entry.turn_id] = entry

    @property
    def num_new(self) -> int:
        """Turns that left since the last `take`."""
        return len(self._new)

    def take_back(self, num_new: int) -> None:
        """All but the first so many of these have not left after all."""
        del self._new[num_new:]
        self._newest = {entry.turn_id: entry for entry in self._new}

    def take(self, *, forget_before: float) -> LedgerAddition:
        """What was added since the last call, to be saved. What that call returned must be on the disk by now."""
        base = self._mark
        addition = LedgerAddition(base, base.after(self._new), tuple(self._new), forget_before)
        self._saved, self._mark = base, addition.mark
        self._taken, self._new, self._newest = self._newest, [], {}
        return addition
