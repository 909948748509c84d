"""When a process that ended is started again. Pure: it is told how long a run lasted."""

from dataclasses import dataclass, field

from clawstream.supervisor.settings import RestartSettings


@dataclass(slots=True)
class RestartHistory:
    """Failures of one process in a row."""

    settings: RestartSettings
    failures: int = field(default=0, init=False)
    """Failures since the process was last healthy."""

    def delay_after_exit(self, ran_seconds: float) -> float | None:
        """Seconds to wait before the next start, or None when the process is crash-looping.

        The delay doubles: d, 2d, 4d... up to the largest. A run of `stable_seconds` starts the count anew.
        """
        if ran_seconds >= self.settings.stable_seconds:
            self.failures = 0
        self.failures += 1
        if self.failures >= self.settings.largest_failure_count:
            return None
        return min(self.settings.first_delay_seconds * 2.0 ** (self.failures - 1), self.settings.largest_delay_seconds)
