"""What people watch: have and need, rate, time left, and why samples were dropped."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from clawstream.log import Logger
from clawstream.metrics import Metrics

_RATE_WINDOW_SECONDS = 600.0


class ProgressReport:
    """Logs a line now and then, keeps metrics, and answers /status from any thread."""

    def __init__(self, *, need: int, interval_seconds: float, metrics: Metrics, logger: Logger) -> None:
        self._need = need
        self._interval_seconds = interval_seconds
        self._metrics = metrics
        self._logger = logger
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {"phase": "starting", "have": 0, "need": need}
        self._arrivals: deque[tuple[float, int]] = deque()
        self._effective_seen = 0
        self._last_have = 0
        self._last_line = (float("-inf"), -1)
        metrics.set("batch_need", need)

    def update(self, **values: Any) -> None:
        """Sets entries of /status."""
        with self._lock:
            self._status.update(values)

    def status(self) -> Mapping[str, Any]:
        """For the operations port."""
        with self._lock:
            return dict(self._status)

    def waiting(self, have: int, drop_counts: Mapping[str, int], now_seconds: float) -> None:
        """Called between polls: `have` effective samples wait."""
        self._effective_seen += max(0, have - self._last_have)
        self._last_have = have
        self._arrivals.append((now_seconds, self._effective_seen))
        while len(self._arrivals) > 2 and now_seconds - self._arrivals[0][0] > _RATE_WINDOW_SECONDS:
            self._arrivals.popleft()
        rate = self._rate_per_second()
        left = (self._need - have) / rate if rate > 0 and have < self._need else None
        self._metrics.set("batch_have", have)
        self.update(
            phase="collecting",
            have=have,
            need=self._need,
            effective_samples_per_minute=round(60 * rate, 2),
            seconds_left=None if left is None else round(left, 1),
            drops=dict(drop_counts),
        )
        last_seconds, last_have = self._last_line
        if have != last_have and now_seconds - last_seconds >= self._interval_seconds:
            self._last_line = (now_seconds, have)
            self._logger.info(
                "batch",
                have=have,
                need=self._need,
                per_minute=round(60 * rate, 1),
                seconds_left=None if left is None else round(left),
                drops=dict(drop_counts),
            )

    def batch_closed(self) -> None:
        """The samples that waited are being trained."""
        self._last_have = 0
        self.update(phase="training")

    def _rate_per_second(self) -> float:
        (first_seconds, first_count), (last_seconds, last_count) = self._arrivals[0], self._arrivals[-1]
        return (last_count - first_count) / (last_seconds - first_seconds) if last_seconds > first_seconds else 0.0
