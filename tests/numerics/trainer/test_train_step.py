"""Training steps against Hugging Face, autograd and torch's own AdamW on padded batches; and steps that must not be."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.policy import PolicyTrainer
from services.trainer.sample import TrainingSample, UnchangedReason
from tests.fixtures.training_samples import VOCABULARY_SIZE, masked, random_samples, replace_sample
from tests.numerics.trainer.conftest import assert_other_weights, assert_same_weights, padded, snapshot

NewPolicy = Callable[..., PolicyTrainer]
RATE = 1e-3
REWARDS = [1.0, -1.0, 0.0, 1.0, -1.0, 1.0]


def reference_step(directory: Path, samples: list[TrainingSample]) -> tuple[dict[str, torch.Tensor], float]:
    """(weights after one step, gradient norm): a padded batch through Hugging Face and autograd, torch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids, attention = padded(samples)
    logits = model(ids, attention_mask=attention, use_cache=False).logits
    total = torch.zeros(())
    for row, sample in enumerate(samples):
        start, end = sample.prompt_ids.size - 1, sample.prompt_ids.size + sample.response_ids.size - 1
        scaled = logits[row, start:end] / sample.sampling_temperature
        log_probs = scaled.log_softmax(-1).gather(1, ids[row, start + 1 : end + 1, None]).squeeze(1)
        weight = (log_probs.detach() - torch.as_tensor(sample.behaviour_log_probs)).exp().clamp(max=2.0)
        ratio = (log_probs - log_probs.detach()).exp()
        total = total + (weight * -ratio * sample.reward).mean() / len(samples)
    total.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], RATE, (0.9, 0.98)
    ).step()
    return model.state_dict(), norm


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_packed_step_equals_hugging_face_on_a_padded_batch(
    architecture: str, new_policy: NewPolicy, model_directory: Callable[[str], Path]
) -> None:
    samples = random_samples(REWARDS)
    policy = new_policy(architecture)
    result = policy.train_step(samples, RATE)
    expected, norm = reference_step(model_directory(architecture), samples)
    assert result.changed
    assert result.metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    for name, tensor in snapshot(policy).weights.items():
        # Adam's first update is rate * sign(gradient) nearly everywhere: compare where the sign is not noise.
        difference = (tensor - expected[name]).abs()
        assert difference.mean() < 1e-3 * RATE, name
        assert (difference > 0.05 * RATE).float().mean() < 1e-3, name


def test_micro_batches_change_nothing_but_rounding(new_policy: NewPolicy) -> None:
    samples = random_samples(REWARDS)
    whole, cut = new_policy(tokens_per_micro_batch=10_000), new_policy(tokens_per_micro_batch=1)
    results = [policy.train_step(samples, RATE) for policy in (whole, cut)]
    for name in ("loss", "gradient_norm", "entropy_mean", "effective_sample_share", "shift_mean_abs", "active_tokens"):
        assert results[0].metrics[name] == pytest.approx(results[1].metrics[name], rel=1e-4, abs=1e-7), name
    moments = [snapshot(policy).moments["exp_avg"] for policy in (whole, cut)]
    for name in moments[0]:
        torch.testing.assert_close(moments[0][name], moments[1][name], rtol=1e-3, atol=1e-6)


def test_the_same_batch_from_the_same_state_gives_the_same_bits(new_policy: NewPolicy) -> None:
    samples = random_samples(REWARDS)
    policies = [new_policy(tokens_per_micro_batch=40) for _ in range(2)]
    for policy in policies:
        for _ in range(3):
            policy.train_step(samples, RATE)
    assert_same_weights(snapshot(policies[0]).weights, snapshot(policies[1]).weights)


def test_a_good_answer_becomes_likelier_and_a_bad_one_less_likely(new_policy: NewPolicy) -> None:
    samples = random_samples([1.0, -1.0])
    policy = new_policy()
    before = [float(score.sum()) for score in policy.score(samples)]
    for _ in range(5):
        policy.train_step(samples, RATE)
    after = [float(score.sum()) for score in policy.score(samples)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def with_nan(sample: TrainingSample) -> TrainingSample:
    damaged = sample.behaviour_log_probs.copy()
    damaged[-1] = np.nan
    return replace_sample(sample, behaviour_log_probs=damaged)


@pytest.mark.parametrize(
    ("samples", "reason", "culprits"),
    [
        ([masked(sample) for sample in random_samples([1.0, -1.0])], UnchangedReason.ALL_MASKED, ()),
        (random_samples([0.0, 0.0]), UnchangedReason.ZERO_ADVANTAGE, ()),
        (
            [random_samples([1.0])[0], with_nan(random_samples([1.0, 1.0])[1])],
            UnchangedReason.NON_FINITE,
            ("sample-1",),
        ),
        (random_samples([1.0, float("inf")]), UnchangedReason.NON_FINITE, ("sample-1",)),
        (
            [replace_sample(s, behaviour_log_probs=s.behaviour_log_probs + 1e6) for s in random_samples([1.0])],
            UnchangedReason.ZERO_GRADIENT,
            (),
        ),
    ],
    ids=["all masked", "zero advantage", "NaN log-prob", "infinite reward", "weight of exactly 0"],
)
def test_a_batch_without_a_gradient_changes_no_bit(
    samples: list[TrainingSample], reason: UnchangedReason, culprits: tuple[str, ...], new_policy: NewPolicy
) -> None:
    policy = new_policy()
    policy.train_step(random_samples([1.0, -1.0], seed=7), RATE)  # moments and decay would move the weights now
    before = snapshot(policy)
    result = policy.train_step(samples, RATE)
    after = snapshot(policy)
    assert (result.changed, result.unchanged_reason, result.non_finite_samples) == (False, reason, culprits)
    assert_same_weights(before.weights, after.weights)
    for name in before.moments:
        assert_same_weights(before.moments[name], after.moments[name])
    assert before.num_updates == after.num_updates == 1


def test_a_gradient_that_overflows_changes_no_bit_and_leaves_nothing_behind(new_policy: NewPolicy) -> None:
    samples = random_samples([1.0, -1.0])
    policy, untouched = new_policy(), new_policy()
    parameter = next(iter(policy.model.named_parameters().values()))
    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    before = snapshot(policy)
    result = policy.train_step(samples, RATE)
    handle.remove()
    assert result.unchanged_reason is UnchangedReason.NON_FINITE
    assert_same_weights(before.weights, snapshot(policy).weights)
    policy.train_step(samples, RATE)
    untouched.train_step(samples, RATE)
    assert_same_weights(snapshot(policy).weights, snapshot(untouched).weights)


@pytest.mark.parametrize("rewards", [[-1.0, -1.0, -1.0], [1.0]], ids=["all of it bad", "a batch of one"])
def test_batches_that_group_methods_would_drop_do_train(rewards: list[float], new_policy: NewPolicy) -> None:
    policy = new_policy()
    before = snapshot(policy).weights
    assert policy.train_step(random_samples(rewards), RATE).changed
    assert_other_weights(before, snapshot(policy).weights)


def test_masked_and_neutral_samples_count_only_where_they_should(new_policy: NewPolicy) -> None:
    """A neutral sample is in the denominator; a masked one is not, whatever stands in its log-probs."""
    good = random_samples([1.0, 0.0])
    alone, with_masked, with_neutral = new_policy(), new_policy(), new_policy()
    base = alone.train_step(good[:1], RATE)
    noise = masked(with_nan(good[1]))
    masked_result = with_masked.train_step([good[0], noise], RATE)
    neutral_result = with_neutral.train_step(good, RATE)
    assert masked_result.metrics["loss"] == base.metrics["loss"]
    assert neutral_result.metrics["loss"] == pytest.approx(base.metrics["loss"] / 2, rel=1e-6)
    assert_same_weights(snapshot(alone).weights, snapshot(with_masked).weights)
    assert neutral_result.samples["sample-1"].active_tokens == 0


def test_metrics_equal_their_definitions(new_policy: NewPolicy) -> None:
    samples = random_samples([1.0, -1.0, 1.0])
    policy = new_policy()
    shifts = [
        score.astype(np.float64) - sample.behaviour_log_probs
        for sample, score in zip(samples, policy.score(samples), strict=True)
    ]
    result = policy.train_step(samples, RATE)
    every = np.concatenate(shifts)
    weights = np.exp(every)
    assert result.metrics["active_tokens"] == every.size
    assert result.metrics["computed_tokens"] == sum(sample.num_tokens for sample in samples)
    assert result.metrics["shift_mean_abs"] == pytest.approx(np.abs(every).mean(), rel=1e-4)
    assert result.metrics["shift_max_abs"] == pytest.approx(np.abs(every).max(), rel=1e-4)
    expected_share = weights.sum() ** 2 / (every.size * (weights**2).sum())
    assert result.metrics["effective_sample_share"] == pytest.approx(expected_share, rel=1e-4)
    assert result.metrics["behaviour_weight_capped_share"] == pytest.approx((weights > 2).mean())
    assert result.metrics["ratio_mean"] == 1.0
    assert result.metrics["reward_mean"] == pytest.approx(1 / 3)
    assert 0 < result.metrics["entropy_mean"] < np.log(VOCABULARY_SIZE)
    for sample, shift in zip(samples, shifts, strict=True):
        statistics = result.samples[sample.sample_id]
        assert statistics.mean_absolute_shift == pytest.approx(np.abs(shift).mean(), rel=1e-4)
        assert statistics.active_tokens == sample.response_ids.size
    assert sum(s.loss for s in result.samples.values()) == pytest.approx(result.metrics["loss"])


def test_an_empty_batch_is_refused(new_policy: NewPolicy) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        new_policy().train_step([], RATE)


def test_ids_of_another_tokenizer_are_refused_by_sample(new_policy: NewPolicy) -> None:
    sample = random_samples([1.0])[0]
    foreign = replace_sample(sample, prompt_ids=np.array([VOCABULARY_SIZE], dtype=np.int32))
    with pytest.raises(ValueError, match=r"sample-0.*another tokenizer"):
        new_policy().train_step([foreign], RATE)
