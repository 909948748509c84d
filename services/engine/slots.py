"""Which request owns which slot of key-value memory, and which prompts can start from what a slot still holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engine.answer import Answer

LEAST_COPIED_TOKENS = 16
"""Shorter shared prefixes are computed again: copying them gains nothing."""


@dataclass(slots=True)
class Slot:
    """One slot."""

    index: int
    answer: Answer | None = None
    """Its owner."""
    retained: list[int] = field(default_factory=list[int])
    """While free: the tokens whose keys and values it still holds, all from the weights in service."""
    mixed_weights: bool = False
    """While owned: it holds keys and values of earlier weights, which no other request may reuse."""
    last_used: int = 0
    """Rank of its last release."""

    def reusable_tokens(self) -> list[int]:
        """Tokens whose keys and values another request may start from."""
        if self.answer is None:
            return self.retained
        return [] if self.mixed_weights else list(self.answer.token_ids(0, self.answer.filled))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request was put."""

    slot: int
    copy_from: int | None
    """The slot whose first `prefix_tokens` positions must be copied; None when they are in place already."""
    prefix_tokens: int
    """Leading tokens that need no computing."""


class Slots:
    """All slots. Pure bookkeeping: whoever calls it moves the memory."""

    def __init__(self, count: int) -> None:
        self._slots = [Slot(index) for index in range(count)]
        self._releases = 0

    @property
    def has_free(self) -> bool:
        """Whether `place` would succeed."""
        return any(slot.answer is None for slot in self._slots)

    def place(self, answer: Answer) -> Placement:
        """Give `answer` a free slot, starting from the longest prefix that any slot holds. One must be free."""
        wanted = answer.token_ids(0, answer.largest_reusable_prefix)
        source = max(self._slots, key=lambda slot: common_prefix(slot.reusable_tokens(), wanted))
        length = common_prefix(source.reusable_tokens(), wanted)
        target = min((slot for slot in self._slots if slot.answer is None), key=lambda slot: slot.last_used)
        if source.answer is None and 2 * length >= len(source.retained) > 0:
            target = source  # most of what it holds is used: nothing worth keeping is overwritten
        elif source is not target and length < LEAST_COPIED_TOKENS:
            length = 0
        target.answer, target.retained, target.mixed_weights = answer, [], False
        answer.slot, answer.filled, answer.cached_tokens = target.index, length, length
        copy_from = source.index if length and source is not target else None
        return Placement(target.index, copy_from, length)

    def release(self, answer: Answer, *, keep: bool = True) -> None:
        """Take the slot back; its contents stay for later prompts unless `keep` is false."""
        assert answer.slot is not None
        slot = self._slots[answer.slot]
        reusable = slot.reusable_tokens() if keep else []
        self._releases += 1
        slot.answer, slot.retained, slot.last_used = None, reusable, self._releases
        slot.mixed_weights = False
        answer.slot = None

    def forget(self) -> None:
        """Empty the prefix cache: what free slots hold is never reused, what owned slots hold only by their owners."""
        for slot in self._slots:
            slot.retained = []
            slot.mixed_weights = slot.answer is not None and slot.answer.filled > 0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that agree."""
    shorter = min(len(one), len(other))
    return next((index for index in range(shorter) if one[index] != other[index]), shorter)
