"""Which runs there are, which are next, and how long they will take. Pure."""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from examples.study.results import Run, RunResult

_OVERHEAD_SECONDS = 240.0
"""Starting, measuring twice and settling, as long as no run has told better."""


def planned_runs(modes: Sequence[str], seeds: int) -> list[Run]:
    """Every mode with every seed, seed by seed: an interrupted study has all modes for its first seeds."""
    return [Run(mode, seed) for seed in range(1, seeds + 1) for mode in modes]


def runs_left(planned: Sequence[Run], done: Collection[Run]) -> list[Run]:
    """Those that are not whole, in order."""
    return [run for run in planned if run not in done]


def seconds_left(left: Sequence[Run], done: Mapping[Run, RunResult], minutes_per_run: float) -> float:
    """An estimate: what the whole runs took on average, or the conversations and what surrounds them."""
    if done:
        return len(left) * fmean(result.total_seconds for result in done.values())
    return len(left) * (minutes_per_run * 60 + _OVERHEAD_SECONDS)


def duration(seconds: float) -> str:
    """`2 h 05 min`."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
