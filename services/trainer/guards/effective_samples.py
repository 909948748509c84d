"""Effective samples: is a batch large enough to mean something? One that closed on age may hold a single sample.

effective_samples       samples of the batch with a teacher or an advantage that is not 0
"""

from collections.abc import Sequence

from services.trainer.guards.bounds import Bound
from services.trainer.sample import TrainingSample

GUARD = "effective_samples"
COUNT = "effective_samples"


def measure(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """Of a batch; nothing of an empty one, which makes no update anyway."""
    return {COUNT: float(sum(sample.has_signal for sample in samples))} if samples else {}


def bounds(min_samples: int | None) -> tuple[Bound, ...]:
    """Those that are set."""
    return () if min_samples is None else (Bound(GUARD, COUNT, low=float(min_samples)),)
