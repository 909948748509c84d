"""How long the reader waits for the store of a blob before it gives one sample up. Pure: time comes in."""

from dataclasses import dataclass

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


@dataclass(slots=True)
class BlobPatience:
    """Of one record at a time."""

    seconds: float
    """A record whose blob cannot be read for so long is given up."""
    _since_seconds: float | None = None
    _pause_seconds: float = _FIRST_PAUSE_SECONDS
    _again_at_seconds: float = 0.0

    def is_due(self, now_seconds: float) -> bool:
        """Whether to try (again)."""
        return self._since_seconds is None or now_seconds >= self._again_at_seconds

    def failed(self, now_seconds: float) -> bool:
        """A try was in vain. Returns whether to try again: pauses double from 1 to 60 seconds, until it is over."""
        if self._since_seconds is None:
            self._since_seconds = now_seconds
        if now_seconds - self._since_seconds >= self.seconds:
            self.ended()
            return False
        self._again_at_seconds = now_seconds + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
        return True

    def ended(self) -> None:
        """The record is taken, or given up: the next one has all the time again."""
        self._since_seconds, self._pause_seconds = None, _FIRST_PAUSE_SECONDS
