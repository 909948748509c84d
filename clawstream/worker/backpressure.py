"""Which partitions to pause. Pure.

Pausing throws away what the client has read ahead, so it is the last resort: small consume sizes come first. A
partition pauses at twice its window and resumes at once the window, and not before a second has passed.
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
    max_in_flight: int
    _paused_since: dict[TopicPartition, float] = field(default_factory=dict[TopicPartition, float], init=False)

    def update(self, unfinished: Mapping[TopicPartition, int], now_seconds: float) -> Change:
        """`unfinished`: inputs in our hands, for every partition that is ours."""
        # A partition that left us is not paused when it comes back: a new assignment starts unpaused.
        self._paused_since = {key: since for key, since in self._paused_since.items() if key in unfinished}
        total = sum(unfinished.values())
        pause = [
            partition
            for partition, count in unfinished.items()
            if partition not in self._paused_since
            and (count >= 2 * self.window_per_partition or total >= 2 * self.max_in_flight)
        ]
        resume = [
            partition
            for partition, since in self._paused_since.items()
            if unfinished[partition] <= self.window_per_partition
            and total <= self.max_in_flight
            and now_seconds - since >= _DWELL_SECONDS
        ]
        for partition in pause:
            self._paused_since[partition] = now_seconds
        for partition in resume:
            del self._paused_since[partition]
        return Change(pause, resume)

    def room(self, unfinished: Mapping[TopicPartition, int]) -> int:
        """How many records to ask for: never none, for a member must keep polling."""
        return max(1, 2 * self.max_in_flight - sum(unfinished.values()))
