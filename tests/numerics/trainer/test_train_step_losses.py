"""Steps of every loss through the real model: packed as padded, in parts, with a reference, and without a gradient."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.algorithms.base import Algorithm, GivenIds, TokenBatch, load_algorithm
from services.trainer.algorithms.options import IdSource
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.policy import PolicyTrainer
from services.trainer.sample import TrainingSample, UnchangedReason
from tests.fixtures.training_samples import random_samples, with_teachers
from tests.numerics.trainer.conftest import assert_other_weights, assert_same_weights, padded, snapshot

RATE = 1e-3
REWARDS = [1.0, -1.0, 0.0, 1.0, -1.0, 1.0]
LOSSES = {
    "binary": "services.trainer.algorithms.binary:Binary",
    "opd": "services.trainer.algorithms.opd:Opd",
    "combine": "services.trainer.algorithms.combine:Combine",
    "topk": "services.trainer.algorithms.topk:TopK",
    "hybrid": "services.trainer.algorithms.hybrid:Hybrid",
}
MakePolicy = Callable[..., PolicyTrainer]


@pytest.fixture
def policy_of(layout: ParallelLayout, model_directory: Callable[[str], Path]) -> MakePolicy:
    def make(loss: str, options: dict[str, object] | None = None, **further: object) -> PolicyTrainer:
        policy = PolicyTrainer(layout, load_algorithm(LOSSES[loss], options or {}), **further)  # type: ignore[arg-type] # forwarded as they are
        policy.load(model_directory("qwen3"))
        return policy

    return make


def samples() -> list[TrainingSample]:
    """With a reward, with both, and one with a teacher only."""
    found = with_teachers(random_samples(REWARDS))
    return [*found[:-2], replace(found[-2], rl_mask=np.zeros_like(found[-2].rl_mask)), found[-1]]


def padded_gradient_norm(directory: Path, batch: list[TrainingSample], algorithm: Algorithm) -> tuple[float, float]:
    """(loss, gradient norm) with a padded batch through Hugging Face, torch's own softmax and no packing."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids, attention = padded(batch)
    all_logits = model(ids, attention_mask=attention, use_cache=False).logits
    at_own, at_one, entropies, given, wanted, teachers = [], [], [], [], [], []
    for row, sample in enumerate(batch):
        start, end = sample.prompt_ids.size - 1, sample.prompt_ids.size + sample.response_ids.size - 1
        logits, own = all_logits[row, start:end], ids[row, start + 1 : end + 1, None]
        hot = (logits / sample.sampling_temperature).log_softmax(-1)
        one = logits.log_softmax(-1)
        at_own.append(hot.gather(1, own).squeeze(1))
        at_one.append(one.gather(1, own).squeeze(1))
        entropies.append(-(hot.exp() * hot).sum(-1))
        targets = None
        if sample.teacher is not None:
            targets = {
                IdSource.NONE: None,
                IdSource.TEACHER_TOP: sample.teacher.top,
                IdSource.STUDENT_TOP: sample.teacher.support,
            }[algorithm.needs.ids]
        if targets is None:
            shape = (sample.response_ids.size, 5)
            chosen, values = torch.full(shape, -1), torch.zeros(shape)
        else:
            chosen, values = torch.as_tensor(targets.ids).long(), torch.as_tensor(targets.log_probs)
        keep = algorithm.needs.ids_per_token or 5
        if algorithm.needs.ids is IdSource.STUDENT_TOP:
            chosen, values = chosen[:, :keep], values[:, :keep]
        given.append(one.gather(1, chosen.clamp(min=0)))
        wanted.append((chosen >= 0) & torch.as_tensor(sample.opd_mask)[:, None])
        teachers.append(values)
    log_probs, unit, further = torch.cat(at_own), torch.cat(at_one), torch.cat(given)
    tokens = TokenBatch(
        log_probs=log_probs,
        proximal_log_probs=log_probs.detach(),
        behaviour_log_probs=torch.as_tensor(np.concatenate([sample.behaviour_log_probs for sample in batch])),
        sample_of_token=torch.repeat_interleave(torch.tensor([sample.response_ids.size for sample in batch])),
        advantages=torch.tensor([sample.reward for sample in batch]),
        rl_mask=torch.as_tensor(np.concatenate([sample.rl_mask for sample in batch])),
        opd_mask=torch.as_tensor(np.concatenate([sample.opd_mask for sample in batch])),
        rollout_of_sample=torch.arange(len(batch)),
        teacher_log_probs=torch.as_tensor(
            np.concatenate(
                [
                    np.zeros(sample.response_ids.size, np.float32)
                    if sample.teacher is None
                    else sample.teacher.log_probs * sample.teacher.mask
                    for sample in batch
                ]
            )
        ),
        unit_log_probs=unit,
        unit_proximal_log_probs=unit.detach(),
        entropies=torch.cat(entropies),
        given=GivenIds(further, further.detach(), torch.cat(teachers), torch.cat(wanted)),
    )
    loss = algorithm.loss(tokens, algorithm.sample_weights(tokens)).per_sample.sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(loss.detach()), float(norm)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_packed_step_equals_a_padded_one(
    loss: str, policy_of: MakePolicy, model_directory: Callable[[str], Path]
) -> None:
    result = policy_of(loss).train_step(samples(), RATE)
    expected_loss, norm = padded_gradient_norm(model_directory("qwen3"), samples(), load_algorithm(LOSSES[loss], {}))
    assert result.changed
    assert result.metrics["loss"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    assert result.metrics["gradient_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_change_nothing_but_rounding(loss: str, policy_of: MakePolicy) -> None:
    whole, cut = policy_of(loss, tokens_per_micro_batch=10_000), policy_of(loss, tokens_per_micro_batch=1)
    results = [policy.train_step(samples(), RATE) for policy in (whole, cut)]
    for name in set(results[0].metrics) - {"num_updates"}:
        assert results[0].metrics[name] == pytest.approx(results[1].metrics[name], rel=1e-3, abs=1e-6), name
    moments = [snapshot(policy).moments["exp_avg"] for policy in (whole, cut)]
    for name in moments[0]:
        torch.testing.assert_close(moments[0][name], moments[1][name], rtol=1e-3, atol=1e-6)


def test_a_batch_of_rewards_only_is_the_same_step_under_binary_and_combine(policy_of: MakePolicy) -> None:
    binary, combine = policy_of("binary"), policy_of("combine")
    results = [policy.train_step(random_samples(REWARDS), RATE) for policy in (binary, combine)]
    assert_same_weights(snapshot(binary).weights, snapshot(combine).weights)
    assert results[1].metrics["opd_active_tokens"] == 0.0
    assert results[1].metrics["rl_loss"] == results[0].metrics["loss"]


def test_components_are_measured_by_themselves(policy_of: MakePolicy) -> None:
    result = policy_of("combine").train_step(samples(), RATE)
    rewarded = [sample for sample in samples() if sample.rl_mask.any()]
    # The neutral sample without a teacher is not computed: it has no gradient.
    assert result.metrics["rl_active_tokens"] == sum(each.rl_mask.sum() for each in rewarded)
    assert result.metrics["opd_active_tokens"] == sum(each.opd_mask.sum() for each in samples())
    assert result.metrics["loss"] == pytest.approx(result.metrics["rl_loss"] + result.metrics["opd_loss"], rel=1e-5)
    assert (result.metrics["num_rl_samples"], result.metrics["num_opd_samples"]) == (5.0, 3.0)
    assert result.metrics["opd_advantage_mean_abs"] > 0.1


def test_updates_on_parts_are_bounded_against_the_start_of_the_batch(policy_of: MakePolicy) -> None:
    """The first part trains as if alone; by the second the policy has moved, and the ratio says so."""
    batch = samples()
    parts, first = policy_of("combine", updates_per_batch=2), policy_of("combine")
    result = parts.train_step(batch, 0.01)
    alone = first.train_step(batch[:3], 0.01)
    assert (parts.optimizer.num_updates, result.changed) == (2, True)
    assert alone.metrics["ratio_max"] == 1.0
    assert result.metrics["ratio_max"] > 1.01
    for sample in batch[:3]:
        assert result.samples[sample.sample_id].loss == pytest.approx(alone.samples[sample.sample_id].loss, rel=1e-5)
    start = policy_of("combine")
    proximal = start.score(batch[3:])
    first_part = start.train_step(batch[:3], 0.01)
    assert first_part.changed
    ratios = [np.exp(now - before) for now, before in zip(start.score(batch[3:]), proximal, strict=True)]
    rewarded = np.concatenate([r for r, sample in zip(ratios, batch[3:], strict=True) if sample.rl_mask.any()])
    assert result.metrics["ratio_max"] >= rewarded.max() - 1e-3


def test_more_updates_than_samples_are_as_many_as_samples(policy_of: MakePolicy) -> None:
    policy = policy_of("binary", updates_per_batch=5)
    assert policy.train_step(random_samples([1.0, -1.0]), RATE).changed
    assert policy.optimizer.num_updates == 2


def test_a_part_that_is_not_finite_leaves_the_other_part_to_train(policy_of: MakePolicy) -> None:
    good, bad = random_samples([1.0, float("nan")])
    policy, alone = policy_of("binary", updates_per_batch=2), policy_of("binary")
    result = policy.train_step([good, bad], RATE)
    alone.train_step([good], RATE)
    assert (result.changed, result.non_finite_samples) == (True, ("sample-1",))
    assert np.isfinite(result.metrics["loss"])
    assert_same_weights(snapshot(policy).weights, snapshot(alone).weights)


def test_a_ratio_against_a_second_pass_is_1_and_knows_no_age(policy_of: MakePolicy) -> None:
    batch = random_samples(REWARDS)
    older = [replace(sample, behaviour_log_probs=sample.behaviour_log_probs - 1.0) for sample in batch]
    recomputed = [policy_of("binary", {"ratio": "recomputed"}) for _ in range(2)]
    results = [policy.train_step(each, RATE) for policy, each in zip(recomputed, (batch, older), strict=True)]
    assert results[0].metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert results[0].metrics["gradient_norm"] == results[1].metrics["gradient_norm"]
    decoupled = [policy_of("binary").train_step(each, RATE).metrics["gradient_norm"] for each in (batch, older)]
    assert decoupled[0] != pytest.approx(decoupled[1], rel=1e-3)


def test_the_divergence_from_the_base_model_pulls_back(policy_of: MakePolicy) -> None:
    batch = random_samples(REWARDS)
    free, held = policy_of("binary"), policy_of("binary", {"kl_coefficient": 0.5, "kl_estimator": "k2"})
    base = free.score(batch)
    first = [policy.train_step(batch, RATE).metrics for policy in (free, held)]
    assert first[1]["regularisation"] == pytest.approx(0.0, abs=1e-9), "it starts at the base model"
    for _ in range(8):
        for policy in (free, held):
            policy.train_step(batch, RATE)
    moved = [
        np.mean([np.abs(now - before).mean() for now, before in zip(policy.score(batch), base, strict=True)])
        for policy in (free, held)
    ]
    assert moved[1] < 0.7 * moved[0]


def test_an_entropy_bonus_keeps_the_policy_open(policy_of: MakePolicy) -> None:
    batch = random_samples([1.0, 1.0, 1.0])
    entropies = []
    for coefficient in (0.0, 1.0):
        policy = policy_of("binary", {"entropy_coefficient": coefficient})
        results = [policy.train_step(batch, RATE) for _ in range(5)]
        entropies.append(results[-1].metrics["entropy_mean"])
    assert entropies[1] > entropies[0]


def test_nothing_is_learned_from_a_divergence_alone(policy_of: MakePolicy) -> None:
    """A batch without advantages changes no bit, also where KL or entropy would have a gradient."""
    policy = policy_of("binary", {"entropy_coefficient": 1.0})
    before = snapshot(policy).weights
    assert policy.train_step(random_samples([0.0, 0.0]), RATE).unchanged_reason is UnchangedReason.ZERO_ADVANTAGE
    assert_same_weights(before, snapshot(policy).weights)


@pytest.mark.parametrize("loss", ["opd", "combine", "topk", "hybrid"])
def test_batches_without_a_gradient_change_no_bit_and_others_do(loss: str, policy_of: MakePolicy) -> None:
    policy = policy_of(loss)
    hinted = samples()[0]
    assert hinted.teacher is not None
    nothing = np.zeros_like(hinted.rl_mask)
    masked = replace(hinted, rl_mask=nothing, teacher=replace(hinted.teacher, mask=nothing))
    broken = replace(hinted, teacher=replace(hinted.teacher, log_probs=hinted.teacher.log_probs * np.float32("nan")))
    before = snapshot(policy).weights
    for batch, reason in (([masked], UnchangedReason.ALL_MASKED), ([broken], UnchangedReason.NON_FINITE)):
        assert policy.train_step(batch, RATE).unchanged_reason is reason
        assert_same_weights(before, snapshot(policy).weights)
    assert policy.train_step([hinted], RATE).changed, "a batch of one trains"
    assert_other_weights(before, snapshot(policy).weights)


def test_ids_of_the_teacher_must_fit_the_vocabulary(policy_of: MakePolicy) -> None:
    hinted = samples()[0]
    assert hinted.teacher is not None
    assert hinted.teacher.top is not None
    foreign = replace(hinted.teacher.top, ids=hinted.teacher.top.ids + 1000)
    with pytest.raises(ValueError, match=r"sample-0.*another tokenizer"):
        policy_of("topk").train_step([replace(hinted, teacher=replace(hinted.teacher, top=foreign))], RATE)
