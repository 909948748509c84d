"""Limits of measurements, and what is beyond them. A value at its limit is good; one that is no number is none."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Breach:
    """A measurement beyond its limit."""

    guard: str
    measurement: str
    value: float
    limit: float

    @property
    def is_low(self) -> bool:
        """Whether the value is below its limit."""
        return self.value < self.limit

    def __str__(self) -> str:
        side = "below" if self.is_low else "above"
        return f"{self.measurement} {self.value:.4g} {side} {self.limit:.4g}"


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a measurement should stay."""

    guard: str
    measurement: str
    low: float | None = None
    high: float | None = None

    def breach(self, measurements: Mapping[str, float]) -> Breach | None:
        """What is wrong; None where nothing is, or nothing was measured."""
        value = measurements.get(self.measurement)
        if value is None or math.isnan(value):
            return None
        if self.low is not None and value < self.low:
            return Breach(self.guard, self.measurement, value, self.low)
        if self.high is not None and value > self.high:
            return Breach(self.guard, self.measurement, value, self.high)
        return None

    def as_document(self) -> dict[str, Any]:
        """As JSON, for other ranks."""
        return asdict(self)


def breaches(bounds: Iterable[Bound], measurements: Mapping[str, float]) -> list[Breach]:
    """All that is beyond its limit, in the order of `bounds`."""
    found = (bound.breach(measurements) for bound in bounds)
    return [breach for breach in found if breach is not None]


def is_measured(bounds: Iterable[Bound], measurements: Mapping[str, float]) -> bool:
    """Whether there is a number for any of `bounds`."""
    return any(not math.isnan(measurements.get(bound.measurement, math.nan)) for bound in bounds)
