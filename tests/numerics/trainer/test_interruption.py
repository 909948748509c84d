"""A step that is given up because the process is to end: nothing half done is kept, and a later one is as ever."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clawstream.errors import StepInterrupted
from services.trainer.algorithms.binary import Binary
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.own_teacher import OwnTeacherOptions
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from tests.fixtures.training_samples import random_samples
from tests.numerics.trainer.conftest import assert_same_weights, snapshot
from tests.numerics.trainer.test_own_teacher import asking

RATE = 1e-3
REWARDS = [1.0, -1.0, 1.0]
NewPolicy = Callable[..., PolicyTrainer]


class EndsAfter:
    """Says that the process is to end, but not the first so many times."""

    def __init__(self) -> None:
        self.times = math.inf
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        self.times -= 1
        return self.times < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", ["decoupled", "recomputed"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.7, 0.9, 1.0])
def test_a_step_that_is_given_up_leaves_every_bit(
    share: float, ratio: str, dtype: torch.dtype, layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    """Between micro-batches, in a forward pass and in a backward pass; `recomputed` has one more forward pass."""
    ending = EndsAfter()
    policies = [
        PolicyTrainer(
            layout,
            Binary(ratio=ratio),
            model_options=ModelOptions(dtype=dtype),
            tokens_per_micro_batch=1,
            is_ending=is_ending,
        )
        for is_ending in (ending, None)
    ]
    for each in policies:
        each.load(model_directory("qwen3"))
        each.train_step(random_samples(REWARDS, seed=7), RATE)  # moments and decay would move the weights now
    policy, untouched = policies
    before = snapshot(policy)
    ending.times = round(share * (ending.asked - 1))  # the first step asked as often as this one would
    with pytest.raises(StepInterrupted):
        policy.train_step(random_samples(REWARDS), RATE)
    after = snapshot(policy)
    assert_same_weights(before.weights, after.weights)
    for name in before.moments:
        assert_same_weights(before.moments[name], after.moments[name])
    assert before.num_updates == after.num_updates == 1
    for parameters in policy.model.trained_parameters():
        assert not policy.optimizer.gradient(parameters).any(), f"{parameters}: something is left of the given-up step"
    ending.times = math.inf
    for each in policies:
        assert each.train_step(random_samples(REWARDS), RATE).changed
    assert_same_weights(snapshot(policy).weights, snapshot(untouched).weights)


@pytest.mark.parametrize(
    "options",
    [ModelOptions(), ModelOptions(recompute_activations=True), ModelOptions(lora=LoraSettings(rank=3, alpha=12.0))],
)
def test_it_is_asked_before_every_micro_batch_and_around_every_layer(
    options: ModelOptions, new_policy: NewPolicy
) -> None:
    """So an end waits for a layer, however many micro-batches a step has and however large they are."""
    ending = EndsAfter()
    policy = new_policy(tokens_per_micro_batch=1, is_ending=ending, model_options=options)
    assert policy.train_step(random_samples(REWARDS), RATE).changed
    num_layers = len(policy.model.network.decoder.layers)
    assert num_layers > 1
    assert ending.asked == len(REWARDS) * (1 + 2 * num_layers)
    policy.score(random_samples(REWARDS))
    assert ending.asked == len(REWARDS) * (1 + 2 * num_layers), "nobody has to give up what is no step"


def test_after_its_first_update_a_step_is_finished(new_policy: NewPolicy) -> None:
    """Half of the batch is in the weights by then."""
    policy = new_policy(updates_per_batch=3, is_ending=lambda: policy.optimizer.num_updates > 0)
    assert policy.train_step(random_samples(REWARDS), RATE).changed
    assert snapshot(policy).num_updates == 3


def test_the_own_teacher_is_interrupted_too(new_policy: NewPolicy) -> None:
    ending = EndsAfter()
    policy = new_policy(teacher=OwnTeacherOptions(top_k=3), tokens_per_micro_batch=1, is_ending=ending)
    ending.times = 1
    with pytest.raises(StepInterrupted):
        policy.taught(asking())
    assert ending.times == -1, "it went on after it was told to end"
    ending.times = math.inf
    assert all(sample.asked_prompt_ids is None for sample in policy.taught(asking()))
