"""Exploration: does the policy still try different things? A policy that has collapsed learns nothing more.

    entropy_mean      mean entropy per active token in nats, at the sampling temperature   (measured in the step)
    answer_diversity  distinct bigrams / bigrams over all answers of the batch, each with a start mark (distinct-2 of
                      Li et al. 2016 on token ids): n equal answers have 1/n of what one has

A sample offends when its own mean entropy is beyond the limits, or when its answer was given before in the batch.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.trainer.guards.bounds import Bound

GUARD = "exploration"
ENTROPY = "entropy_mean"
DIVERSITY = "answer_diversity"
_START = -1


def measure(answers: Sequence[NDArray[np.int32]]) -> dict[str, float]:
    """Of the answers' ids, each [response_tokens]."""
    bigrams = [pair for answer in answers for pair in _bigrams(answer)]
    return {DIVERSITY: len(set(bigrams)) / len(bigrams)} if bigrams else {}


def repeated(answers: Sequence[NDArray[np.int32]]) -> list[int]:
    """Places of the answers that are equal to an earlier one."""
    seen: set[bytes] = set()
    places: list[int] = []
    for place, answer in enumerate(answers):
        content = answer.tobytes()
        if content in seen:
            places.append(place)
        seen.add(content)
    return places


def bounds(
    min_entropy_nats: float | None, max_entropy_nats: float | None, min_answer_diversity: float | None
) -> tuple[Bound, ...]:
    """Those that are set."""
    found = (
        Bound(GUARD, ENTROPY, low=min_entropy_nats, high=max_entropy_nats),
        Bound(GUARD, DIVERSITY, low=min_answer_diversity),
    )
    return tuple(bound for bound in found if (bound.low, bound.high) != (None, None))


def _bigrams(answer: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    ids = [_START, *answer.tolist()]
    return itertools.pairwise(ids)
