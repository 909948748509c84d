"""Every loss that ships, from the logits on: against another writing of its formula, finite differences, and cuts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.trainer.algorithms.base import Algorithm, load_algorithm
from tests.numerics.trainer.loss_cases import loss_and_gradient, random_answers, with_current
from tests.numerics.trainer.loss_reference import reference_loss

PATHS = {
    "binary": "services.trainer.algorithms.binary:Binary",
    "opd": "services.trainer.algorithms.opd:Opd",
    "combine": "services.trainer.algorithms.combine:Combine",
    "topk": "services.trainer.algorithms.topk:TopK",
    "hybrid": "services.trainer.algorithms.hybrid:Hybrid",
}
AGGREGATIONS: list[dict[str, Any]] = [
    {},
    {"aggregation": "token_mean"},
    {"aggregation": "sample_sum"},
    {"aggregation": "sample_sum_norm", "aggregation_norm_tokens": 9},
    {"aggregation": "rollout_mean"},
]
RATIOS: list[dict[str, Any]] = [
    {},
    {"ratio": "behaviour"},
    {"ratio": "recomputed"},
    {"ratio_level": "sequence"},
    {"ratio_level": "sequence", "ratio": "behaviour"},
    {"behaviour_weight_cap": 1.1, "clip_low": 0.05, "clip_high": 0.05},
]
CONTROLS: list[dict[str, Any]] = [
    {},
    {"dual_clip": 1.4},
    {"icepop_low": 0.7, "icepop_high": 1.5},
    {"opsm_delta": 0.05},
    {"sequence_rejection": "geometric", "sequence_rejection_low": 0.8, "sequence_rejection_high": 1.2},
    {"sequence_rejection": "sum", "sequence_rejection_high": 1.1},
]
REGULARISERS: list[dict[str, Any]] = [
    {},
    {"kl_coefficient": 0.3, "kl_estimator": "k1"},
    {"kl_coefficient": 0.3, "kl_estimator": "k2", "kl_reference": "proximal"},
    {"kl_coefficient": 0.3, "kl_estimator": "k3"},
    {"kl_coefficient": 0.3, "entropy_coefficient": 0.2},
    {"entropy_coefficient": 0.2},
]
PARTICULAR: dict[str, list[dict[str, Any]]] = {
    "binary": [{}],
    "opd": [{}, {"advantage_clip": 0.8}],
    "combine": [{}, {"rl_coefficient": 0.5, "opd_coefficient": 2.0}, {"summed": True}],
    "topk": [{}],
    "hybrid": [{}, {"advantage_clip": 0.3}, {"support": "teacher", "support_size": 2}, {"support": "overlap"}],
}
SEEDS = st.integers(0, 2**32 - 1)


def options_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    groups = [AGGREGATIONS, REGULARISERS, PARTICULAR[name]]
    if name != "topk":
        groups += [RATIOS, CONTROLS]
    return st.tuples(*(st.sampled_from(group) for group in groups)).map(
        lambda parts: {key: value for part in parts for key, value in part.items()}
    )


def algorithm(name: str, options: dict[str, Any]) -> Algorithm:
    return load_algorithm(PATHS[name], options)


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS, data=st.data())
def test_the_loss_equals_its_formula(name: str, seed: int, data: st.DataObject) -> None:
    options = data.draw(options_of(name))
    answers = random_answers(seed)
    loss, _, _ = loss_and_gradient(answers, algorithm(name, options))
    assert loss == pytest.approx(reference_loss(name, answers, options), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS, data=st.data())
def test_the_gradient_equals_finite_differences_of_the_formula(name: str, seed: int, data: st.DataObject) -> None:
    """A difference is right up to a kink of a clip inside its step: there the two one-sided ones disagree."""
    options = data.draw(options_of(name))
    answers = random_answers(seed, largest_batch=2)
    _, gradient, _ = loss_and_gradient(answers, algorithm(name, options))
    logits = np.concatenate([answer.current for answer in answers])

    def at(place: tuple[int, ...], change: float) -> float:
        moved = logits.copy()
        moved[place] += change
        return reference_loss(name, with_current(answers, moved), options)

    middle = reference_loss(name, answers, options)
    for place in np.ndindex(*logits.shape):
        above, below = at(place, 1e-5), at(place, -1e-5)
        if abs(above - 2 * middle + below) > 1e-7:
            continue
        assert gradient[place] == pytest.approx((above - below) / 2e-5, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", PATHS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS, data=st.data())
def test_cut_into_micro_batches_losses_and_gradients_are_the_same(name: str, seed: int, data: st.DataObject) -> None:
    chosen = algorithm(name, data.draw(options_of(name)))
    answers = random_answers(seed)
    order = data.draw(st.permutations(range(len(answers))))
    cut = data.draw(st.integers(0, len(answers)))
    cuts = [sorted(part) for part in (order[:cut], order[cut:]) if part]
    whole_loss, whole_gradient, _ = loss_and_gradient(answers, chosen)
    loss, gradient, _ = loss_and_gradient(answers, chosen, cuts)
    assert loss == pytest.approx(whole_loss, rel=1e-12, abs=1e-14)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-9, atol=1e-14)
