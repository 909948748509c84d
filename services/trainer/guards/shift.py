"""Shift: was the batch sampled by nearly the policy that learns from it?

    age_mean, age_max       versions since the oldest token of an answer was sampled
    shift_mean_abs          mean |l_prox - mu| per active token in nats          (this and the following: in the step)
    effective_sample_share  Kish's effective sample size over the number of tokens
    clipped_share           share of tokens whose gradient a clip removed

A sample offends by its own age, by its own mean shift, or by its own share of clipped tokens.
"""

from collections.abc import Sequence
from statistics import fmean

from services.trainer.guards.bounds import Bound

GUARD = "shift"
AGE = "age_mean"
OLDEST = "age_max"
SHIFT = "shift_mean_abs"
EFFECTIVE_SHARE = "effective_sample_share"
CLIPPED = "clipped_share"


def measure(ages: Sequence[int]) -> dict[str, float]:
    """Of the ages of a batch's samples."""
    return {AGE: fmean(ages), OLDEST: float(max(ages))} if ages else {}


def bounds(
    max_age_versions: float | None,
    max_shift_nats: float | None,
    min_effective_sample_share: float | None,
    max_clipped_share: float | None,
) -> tuple[Bound, ...]:
    """Those that are set."""
    found = (
        Bound(GUARD, AGE, high=max_age_versions),
        Bound(GUARD, SHIFT, high=max_shift_nats),
        Bound(GUARD, EFFECTIVE_SHARE, low=min_effective_sample_share),
        Bound(GUARD, CLIPPED, high=max_clipped_share),
    )
    return tuple(bound for bound in found if (bound.low, bound.high) != (None, None))
