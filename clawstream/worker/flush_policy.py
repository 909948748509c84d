"""When to commit what is done. Pure."""

from dataclasses import dataclass, field

_DUTY = 4.0
"""A flush may take at most about a quarter of the Kafka thread's time: wait at least so many times its own length."""
_SMOOTHING = 0.2
_FIRST_GUESS_SECONDS = 0.01


@dataclass(slots=True)
class FlushPolicy:
    """At once when nothing else is under way; else after a wait in proportion to what a flush costs, with a ceiling."""

    ceiling_seconds: float
    results: int
    """So many finished inputs end the wait."""
    _flush_seconds: float = field(default=_FIRST_GUESS_SECONDS, init=False)
    _waiting_since: float | None = field(default=None, init=False)

    def due(self, finished: int, in_flight: int, now_seconds: float) -> bool:
        """Whether to commit now, with `finished` inputs that could be and `in_flight` others under way."""
        if finished == 0:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now_seconds
        wait = min(self.ceiling_seconds, _DUTY * self._flush_seconds)
        return in_flight == 0 or finished >= self.results or now_seconds - self._waiting_since >= wait

    def flushed(self, took_seconds: float) -> None:
        """Learns what a flush costs."""
        self._waiting_since = None
        self._flush_seconds += _SMOOTHING * (took_seconds - self._flush_seconds)
