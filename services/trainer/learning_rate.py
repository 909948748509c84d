"""The learning rate as a pure function of the number of updates made."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Linear warm-up, then constant, or a cosine down to `final_share`."""

    peak: float = 1e-5
    """Learning rate after the warm-up."""
    shape: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_updates: int = 0
    """Updates until the peak: update n (from 1) of the warm-up runs at peak * n / warmup_updates."""
    decay_updates: int = 1000
    """Updates from the end of the warm-up to the end of the cosine."""
    final_share: float = 0.1
    """Share of the peak at the end of the cosine and ever after."""

    def at(self, updates_made: int) -> float:
        """The rate of the next update, when `updates_made` have been made."""
        if updates_made < self.warmup_updates:
            return self.peak * (updates_made + 1) / self.warmup_updates
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (updates_made - self.warmup_updates) / max(1, self.decay_updates))
        return self.peak * (self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress)))
