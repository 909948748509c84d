"""Signal: does the evidence distinguish good answers from bad ones?

signal_share        samples with a teacher or an advantage that is not 0, over these and the neutral ones that were
                    read since the step before
advantage_variance  population variance of the RL advantages of the batch; none with fewer than two
"""

from collections.abc import Sequence
from statistics import pvariance

from services.trainer.guards.bounds import Bound
from services.trainer.sample import TrainingSample

GUARD = "signal"
SHARE = "signal_share"
VARIANCE = "advantage_variance"
_FEWEST = 2


def measure(samples: Sequence[TrainingSample], num_neutral: int) -> dict[str, float]:
    """Of a batch and the number of samples that were dropped for want of an advantage."""
    found: dict[str, float] = {}
    if samples or num_neutral:
        found[SHARE] = sum(sample.has_signal for sample in samples) / (len(samples) + num_neutral)
    advantages = [sample.rl_advantage for sample in samples if sample.rl_mask.any()]
    if len(advantages) >= _FEWEST:
        found[VARIANCE] = pvariance(advantages)
    return found


def bounds(min_share: float | None, min_variance: float | None) -> tuple[Bound, ...]:
    """Those that are set."""
    found = (Bound(GUARD, SHARE, low=min_share), Bound(GUARD, VARIANCE, low=min_variance))
    return tuple(bound for bound in found if bound.low is not None)
