"""What guards may turn: a step up or down within limits, and the way back. Pure arithmetic on one number.

    up        v <- min(high, max(v * step, first_raise))
    down      v <- max(low, v / step)
    back      v <- c + (v - c) * decay,  and c itself when it is within 1 % of high - low

c is the configured value. The learning rate's number is a factor on the schedule, so its c is 1. `first_raise` is what
a raise from 0 gives, which no factor would move.
"""

from dataclasses import dataclass
from enum import StrEnum

_NEAR_SHARE = 0.01


class Knob(StrEnum):
    """What may be turned."""

    ENTROPY_COEFFICIENT = "entropy_coefficient"
    """Weight of the entropy in the loss."""
    LEARNING_RATE = "learning_rate"
    """Factor on the scheduled learning rate."""
    KL_COEFFICIENT = "kl_coefficient"
    """Weight of the KL divergence from the reference."""


class Direction(StrEnum):
    """Where to."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class KnobRules:
    """Limits and speed."""

    configured: float
    low: float
    high: float
    step: float
    """Factor, above 1."""
    decay: float
    """Share of the distance from `configured` that is left after a good step."""
    first_raise: float = 0.0

    def within(self, value: float) -> float:
        """The nearest allowed value."""
        return min(self.high, max(self.low, value))

    def moved(self, value: float, direction: Direction) -> float:
        """One step."""
        if direction is Direction.UP:
            return self.within(max(value * self.step, self.first_raise))
        return self.within(value / self.step)

    def decayed(self, value: float) -> float:
        """One step back toward the configured value."""
        distance = (value - self.configured) * self.decay
        return self.configured if abs(distance) <= _NEAR_SHARE * (self.high - self.low) else self.configured + distance


def direction_of(knob: Knob, *, exploration_is_low: bool, exploration_is_high: bool) -> Direction:
    """What helps. Slower and closer to the reference is always safer; entropy is what exploration lacks or exceeds."""
    if knob is Knob.ENTROPY_COEFFICIENT:
        return Direction.DOWN if exploration_is_high and not exploration_is_low else Direction.UP
    return Direction.DOWN if knob is Knob.LEARNING_RATE else Direction.UP
