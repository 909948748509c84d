"""What guards ask of one step, on every rank. What it measures is the same on all of them, so all decide the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.trainer.guards.bounds import Bound, Breach, breaches


@dataclass(frozen=True, slots=True)
class StepControls:
    """Orders for one step; none by default."""

    coefficients: Mapping[str, float] = field(default_factory=dict[str, float])
    """Options of the loss in place of the configured ones."""
    hold: tuple[Bound, ...] = ()
    """Where a measurement of the step is beyond one of these, no weight changes."""
    drop: tuple[Bound, ...] = ()
    """A sample whose own measurements are beyond one of these takes no part."""

    def offenders(self, samples: Sequence[Mapping[str, float]]) -> dict[int, Breach]:
        """By place in the batch: samples to be left out, each with the first reason."""
        found = ((index, breaches(self.drop, measurements)) for index, measurements in enumerate(samples))
        return {index: wrong[0] for index, wrong in found if wrong}

    def as_document(self) -> dict[str, Any]:
        """As JSON, for other ranks."""
        return {
            "coefficients": dict(self.coefficients),
            "hold": [bound.as_document() for bound in self.hold],
            "drop": [bound.as_document() for bound in self.drop],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "StepControls":
        """What `as_document` wrote."""
        return cls(
            document["coefficients"],
            tuple(Bound(**bound) for bound in document["hold"]),
            tuple(Bound(**bound) for bound in document["drop"]),
        )
