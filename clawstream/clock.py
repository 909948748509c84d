"""Time as an argument: nothing in clawstream reads the wall clock except through a `Clock`."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What code that needs the time is given."""

    def now(self) -> datetime:
        """The present moment, timezone-aware in UTC. May jump; for records that people and other machines read."""
        ...

    def monotonic_seconds(self) -> float:
        """Seconds from an arbitrary start that never go back. For durations and deadlines."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_seconds(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock for tests that moves only when told to."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._monotonic_seconds = 0.0

    def now(self) -> datetime:
        return self._now

    def monotonic_seconds(self) -> float:
        return self._monotonic_seconds

    def advance(self, seconds: float) -> None:
        """Moves both clocks forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} seconds")
        self._now += timedelta(seconds=seconds)
        self._monotonic_seconds += seconds
