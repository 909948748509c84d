"""What guards ask of a step, on the real compute half: held, dropped, and with other coefficients."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from services.trainer.algorithms.base import Algorithm
from services.trainer.algorithms.binary import Binary
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.guards.bounds import Bound
from services.trainer.guards.controls import StepControls
from services.trainer.policy import PolicyTrainer
from services.trainer.sample import TrainingSample, UnchangedReason
from tests.fixtures.training_samples import random_samples, replace_sample
from tests.numerics.trainer.conftest import assert_other_weights, assert_same_weights, snapshot

RATE = 1e-3
NewPolicy = Callable[..., PolicyTrainer]


def binary(coefficients: Mapping[str, float]) -> Algorithm:
    return Binary(**coefficients)


def hold(measurement: str, *, low: float | None = None, high: float | None = None) -> StepControls:
    return StepControls(hold=(Bound("guard", measurement, low, high),))


def far(sample: TrainingSample) -> TrainingSample:
    """Sampled by quite another policy."""
    return replace_sample(sample, behaviour_log_probs=(sample.behaviour_log_probs + 9.0).astype(np.float32))


@pytest.mark.parametrize(
    "controls",
    [
        hold("entropy_mean", low=100.0),
        hold("shift_mean_abs", high=1e-6),
        hold("effective_sample_share", low=1.1),
    ],
    ids=["entropy", "shift", "effective sample size"],
)
def test_a_held_step_changes_no_bit_and_leaves_nothing_behind(controls: StepControls, new_policy: NewPolicy) -> None:
    samples = random_samples([1.0, -1.0])
    policy, untouched = new_policy(), new_policy()
    for each in (policy, untouched):
        each.train_step(random_samples([1.0, -1.0], seed=7), RATE)  # moments and decay would move the weights now
    before = snapshot(policy)
    result = policy.train_step(samples, RATE, controls)
    after = snapshot(policy)
    assert (result.changed, result.unchanged_reason) == (False, UnchangedReason.HELD)
    assert [each.measurement for each in result.held] == [controls.hold[0].measurement]
    assert result.metrics["entropy_mean"] > 0, "what was measured is told"
    assert_same_weights(before.weights, after.weights)
    for name in before.moments:
        assert_same_weights(before.moments[name], after.moments[name])
    assert before.num_updates == after.num_updates == 1
    policy.train_step(samples, RATE)
    untouched.train_step(samples, RATE)
    assert_same_weights(snapshot(policy).weights, snapshot(untouched).weights)


def test_within_its_limits_a_step_is_as_without_them(new_policy: NewPolicy) -> None:
    samples = random_samples([1.0, -1.0])
    policy, free = new_policy(), new_policy()
    assert policy.train_step(samples, RATE, hold("entropy_mean", low=0.0)).changed
    free.train_step(samples, RATE)
    assert_same_weights(snapshot(policy).weights, snapshot(free).weights)


def test_a_part_that_is_held_holds_those_after_it(new_policy: NewPolicy) -> None:
    """The second part is clipped away from the policy at the start of the batch, which the first has moved."""
    samples = random_samples([1.0, -1.0])
    samples = [samples[0], *(replace_sample(samples[0], sample_id=f"again-{n}") for n in range(2))]
    policy, once = new_policy(updates_per_batch=3), new_policy()
    result = policy.train_step(samples, 0.1, hold("clipped_share", high=0.0))
    once.train_step(samples[:1], 0.1)
    assert result.changed
    assert [each.measurement for each in result.held] == ["clipped_share"]
    assert snapshot(policy).num_updates == 1
    assert_same_weights(snapshot(policy).weights, snapshot(once).weights)


@pytest.mark.parametrize("options", [{}, {"ratio": "recomputed"}], ids=["decoupled", "recomputed"])
def test_a_dropped_sample_is_as_if_it_had_not_been_there(
    options: dict[str, str], layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    good = random_samples([1.0, -1.0, 1.0])
    samples = [good[0], far(good[1]), good[2]]
    policies = [PolicyTrainer(layout, Binary(**options)) for _ in range(2)]
    for policy in policies:
        policy.load(model_directory("qwen3"))
    controls = StepControls(drop=(Bound("shift", "shift_mean_abs", high=6.0),))
    result = policies[0].train_step(samples, RATE, controls)
    alone = policies[1].train_step([samples[0], samples[2]], RATE)
    assert {name: breach.limit for name, breach in result.dropped.items()} == {"sample-1": 6.0}
    assert result.changed
    assert result.samples["sample-1"].active_tokens == 0
    for name in ("loss", "gradient_norm", "shift_mean_abs", "num_samples", "reward_mean"):
        assert result.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-6), name
    assert_same_weights(snapshot(policies[0]).weights, snapshot(policies[1]).weights)


def test_when_every_sample_is_dropped_nothing_changes(new_policy: NewPolicy) -> None:
    policy = new_policy()
    before = snapshot(policy).weights
    controls = StepControls(drop=(Bound("exploration", "entropy_mean", low=100.0),))
    result = policy.train_step(random_samples([1.0, -1.0]), RATE, controls)
    assert (result.unchanged_reason, len(result.dropped)) == (UnchangedReason.ALL_MASKED, 2)
    assert_same_weights(before, snapshot(policy).weights)


def test_dropping_with_several_updates_is_refused(new_policy: NewPolicy) -> None:
    controls = StepControls(drop=(Bound("shift", "shift_mean_abs", high=1.0),))
    with pytest.raises(ValueError, match="one update per batch"):
        new_policy(updates_per_batch=2).train_step(random_samples([1.0, 1.0]), RATE, controls)


def test_an_adapted_entropy_coefficient_reaches_the_gradient(new_policy: NewPolicy) -> None:
    """The update equals that of a loss configured so, and lowers the likelihood of nothing else."""
    samples = random_samples([1.0, -1.0])
    adapted, configured, plain = (new_policy(with_coefficients=binary) for _ in range(3))
    configured._algorithm = Binary(entropy_coefficient=0.5)  # pyright: ignore[reportPrivateUsage]
    adapted.train_step(samples, RATE, StepControls({"entropy_coefficient": 0.5}))
    configured.train_step(samples, RATE)
    plain.train_step(samples, RATE)
    assert_same_weights(snapshot(adapted).weights, snapshot(configured).weights)
    assert_other_weights(snapshot(adapted).weights, snapshot(plain).weights)
    back = adapted.train_step(samples, RATE, StepControls({"entropy_coefficient": 0.0}))
    assert back.metrics["regularisation"] == 0.0


def test_an_adapted_kl_coefficient_pulls_toward_the_base_model(
    layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    policy = PolicyTrainer(layout, Binary(), with_coefficients=binary, keeps_reference=True)
    policy.load(model_directory("qwen3"))
    samples = random_samples([1.0, -1.0])
    plain = policy.train_step(samples, RATE, StepControls({"kl_coefficient": 0.0}))
    assert plain.metrics["regularisation"] == 0.0
    pulled = policy.train_step(samples, RATE, StepControls({"kl_coefficient": 0.5}))
    assert pulled.metrics["regularisation"] > 0.0


def test_coefficients_without_a_way_to_set_them_are_refused(new_policy: NewPolicy) -> None:
    with pytest.raises(ValueError, match="entropy_coefficient"):
        new_policy().train_step(random_samples([1.0]), RATE, StepControls({"entropy_coefficient": 0.5}))
