"""How much to read, and which partitions to pause. Pure.

Pausing throws away what the client has read ahead, so it is the last resort. First the worker stops asking for more
than it has room for. Only a partition that is stuck behind a slow input, while others go on, is paused: at twice its
window, until it is back at once the window, and for a second at least. All are paused when the few records that a
member gets while it polls to stay one have added up to twice the capacity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from clawstream.bus.interface import TopicPartition

_DWELL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """What to do now. Never inside a rebalance callback."""

    pause: list[TopicPartition]
    resume: list[TopicPartition]


@dataclass(slots=True)
class Backpressure:
    """Remembers what is paused."""

    window_per_partition: int
    capacity: int
    """Inputs in hand, over all partitions that are not paused: a paused one must not starve the others."""
    _paused_since: dict[TopicPartition, float] = field(default_factory=dict[TopicPartition, float], init=False)

    def update(self, unfinished: Mapping[TopicPartition, int], now_seconds: float) -> Change:
        """`unfinished`: inputs in hand, for every partition that is ours."""
        # A partition that left us is not paused when it comes back: a new assignment starts unpaused.
        self._paused_since = {key: since for key, since in self._paused_since.items() if key in unfinished}
        total = self._total(unfinished)
        pause = [
            partition
            for partition, count in unfinished.items()
            if partition not in self._paused_since
            and (count >= 2 * self.window_per_partition or total >= 2 * self.capacity)
        ]
        resume = [
            partition
            for partition, since in self._paused_since.items()
            if unfinished[partition] <= self.window_per_partition
            and total <= self.capacity
            and now_seconds - since >= _DWELL_SECONDS
        ]
        for partition in pause:
            self._paused_since[partition] = now_seconds
        for partition in resume:
            del self._paused_since[partition]
        return Change(pause, resume)

    def room(self, unfinished: Mapping[TopicPartition, int]) -> int:
        """How many records to ask for; 0 when the worker has enough in hand."""
        return max(0, self.capacity - self._total(unfinished))

    def _total(self, unfinished: Mapping[TopicPartition, int]) -> int:
        return sum(count for partition, count in unfinished.items() if partition not in self._paused_since)
