"""How much to read, and which partitions to pause. Pure.

Pausing throws away what the client has read ahead, and lasts for a second at least, so it is the last resort. First the
worker stops asking for more than it has room for. A partition that holds many inputs is no reason: a backlog comes
partition by partition, hundreds in a row. It is paused when it holds many and does not go on: its oldest unresolved
input stayed the same for a second. Until one has shown that it goes on nothing more is read; the room is
never filled with inputs of which nobody knows how slow they are. A paused partition is resumed when it holds half as
many. All are paused when the few records that a member gets while it polls to stay one have added up to twice the
capacity.

In hand is what is not resolved, or waits for nothing but its transaction. What is done behind an unresolved input is
not counted: a few inputs that hang would else fill the room with it, in partitions that hold no more than a few each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clawstream.bus.interface import TopicPartition

_DWELL_SECONDS = 1.0
_STUCK_SECONDS = 1.0
"""Longer than a quick partition waits for its turn behind all that the worker has in hand of others."""
_MANY = 128
"""A partition holds many inputs when it has so many; or twice its window, or half the capacity, if that is less."""


@dataclass(frozen=True, slots=True)
class Change:
    """What to do now. Never inside a rebalance callback."""

    pause: list[TopicPartition]
    resume: list[TopicPartition]


@dataclass(frozen=True, slots=True)
class _Head:
    """The oldest unresolved input of a partition."""

    offset: int
    since_seconds: float
    follows_quickly: bool
    """Whether there was another one just before it, which did not take long."""


@dataclass(slots=True)
class Backpressure:
    """Remembers what is paused, and since when each partition waits for the same input."""

    window_per_partition: int
    capacity: int
    """Inputs in hand, over all partitions that are not paused: a paused one must not starve the others."""
    _paused_since: dict[TopicPartition, float] = field(default_factory=dict[TopicPartition, float], init=False)
    _heads: dict[TopicPartition, _Head] = field(default_factory=dict[TopicPartition, _Head], init=False)

    def update(
        self, in_hand: Mapping[TopicPartition, int], heads: Mapping[TopicPartition, int], now_seconds: float
    ) -> Change:
        """`in_hand`: inputs, for every partition that is ours. `heads`: the offset of the oldest unresolved
        one, for those that have one.
        """
        # A partition that left us is not paused when it comes back: a new assignment starts unpaused.
        self._paused_since = {key: since for key, since in self._paused_since.items() if key in in_hand}
        self._heads = {each: self._head(each, offset, now_seconds) for each, offset in heads.items()}
        total = self._total(in_hand)
        pause = [
            partition
            for partition, count in in_hand.items()
            if partition not in self._paused_since
            and (total >= 2 * self.capacity or (count >= self._many and self._is_stuck(partition, now_seconds)))
        ]
        resume = [
            partition
            for partition, since in self._paused_since.items()
            if 2 * in_hand[partition] <= self._many and total <= self.capacity and now_seconds - since >= _DWELL_SECONDS
        ]
        for partition in pause:
            self._paused_since[partition] = now_seconds
        for partition in resume:
            del self._paused_since[partition]
        return Change(pause, resume)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """A new assignment starts unpaused, also one that came before `update` saw that the old one had ended."""
        for partition in partitions:
            self._paused_since.pop(partition, None)
            self._heads.pop(partition, None)

    def room(self, in_hand: Mapping[TopicPartition, int]) -> int:
        """How many records to ask for; 0 when the worker has enough in hand, or does not know yet."""
        for partition, head in self._heads.items():
            if not head.follows_quickly and partition not in self._paused_since and in_hand[partition] >= self._many:
                return 0
        return max(0, self.capacity - self._total(in_hand))

    @property
    def _many(self) -> int:
        return min(2 * self.window_per_partition, self.capacity // 2, _MANY)

    def _head(self, partition: TopicPartition, offset: int, now_seconds: float) -> _Head:
        known = self._heads.get(partition)
        if known is None:
            return _Head(offset, now_seconds, follows_quickly=False)
        if known.offset == offset:
            return known
        return _Head(offset, now_seconds, follows_quickly=now_seconds - known.since_seconds < _STUCK_SECONDS)

    def _is_stuck(self, partition: TopicPartition, now_seconds: float) -> bool:
        head = self._heads.get(partition)
        return head is not None and now_seconds - head.since_seconds >= _STUCK_SECONDS

    def _total(self, in_hand: Mapping[TopicPartition, int]) -> int:
        return sum(count for partition, count in in_hand.items() if partition not in self._paused_since)
