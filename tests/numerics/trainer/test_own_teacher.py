"""The trainer's own teacher: the policy's numbers when it is the policy, and other ones when it reads a hint."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from clawstream.errors import SettingsError
from services.trainer.algorithms.base import AlgorithmLoss, TokenBatch, load_algorithm
from services.trainer.algorithms.opd import OPD, Opd
from services.trainer.engine.lora import LoraSettings
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.own_teacher import OwnTeacherOptions
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from services.trainer.questions import question_as_document, question_from_document
from services.trainer.sample import TeacherTargets, TrainingSample, UnchangedReason
from tests.fixtures.training_samples import random_samples
from tests.numerics.trainer.conftest import assert_same_weights

RATE = 1e-2
HINT = np.array([3, 1, 4, 1, 5], np.int32)
MakePolicy = Callable[..., PolicyTrainer]


class WatchedOpd(Opd):
    """Remembers the advantages of every token."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.advantages: list[torch.Tensor] = []

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        loss = super().loss(batch, weights)
        self.advantages.append(loss.components[OPD].advantages)
        return loss


@pytest.fixture
def policy_of(layout: ParallelLayout, model_directory: Callable[[str], Path]) -> MakePolicy:
    def make(algorithm: object = None, top_k: int = 6, **further: object) -> PolicyTrainer:
        options = OwnTeacherOptions(top_k=top_k)
        policy = PolicyTrainer(layout, algorithm or Opd(), teacher=options, **further)  # type: ignore[arg-type] # forwarded
        policy.load(model_directory("qwen3"))
        return policy

    return make


def asking(hint: np.ndarray | None = HINT, temperature: float = 0.6) -> list[TrainingSample]:
    """Samples that ask for the teacher; with `hint` before their prompt, or without one."""
    return [
        replace(
            sample,
            teacher=TeacherTargets.asked(
                sample.prompt_ids if hint is None else np.concatenate([hint, sample.prompt_ids]),
                sample.response_ids.size,
            ),
        )
        for sample in random_samples([1.0, -1.0, 1.0], temperature=temperature)
    ]


def teacher_of(sample: TrainingSample) -> TeacherTargets:
    assert sample.teacher is not None
    return sample.teacher


def by_hugging_face(directory: Path, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """[response_tokens, vocabulary] log-probs at temperature 1, without any code of the trainer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.as_tensor(np.concatenate([prompt, response]))[None].long()).logits[0]
    return logits[prompt.size - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_an_identical_teacher_without_a_hint_teaches_nothing(temperature: float, policy_of: MakePolicy) -> None:
    algorithm = WatchedOpd()
    policy = policy_of(algorithm)
    taught = policy.taught(asking(hint=None, temperature=temperature))
    policy.train_step(taught, RATE)
    assert sum(each.numel() for each in algorithm.advantages) == sum(each.response_ids.size for each in taught)
    assert max(float(each.abs().max()) for each in algorithm.advantages) < 1e-3
    algorithm.advantages.clear()
    policy.train_step(policy.taught(asking(temperature=temperature)), RATE)
    assert max(float(each.abs().max()) for each in algorithm.advantages) > 0.1, "a hint does teach"


def test_it_says_what_hugging_face_says_and_stays_frozen(
    policy_of: MakePolicy, model_directory: Callable[[str], Path]
) -> None:
    policy = policy_of(tokens_per_micro_batch=1)
    before = policy.taught(asking())
    assert policy.train_step(before, RATE).changed
    after = policy.taught(asking())
    for question, first, second in zip(asking(), before, after, strict=True):
        hinted = teacher_of(question).asked_prompt_ids
        assert hinted is not None
        expected = by_hugging_face(model_directory("qwen3"), hinted, question.response_ids)
        own = expected.gather(1, torch.as_tensor(question.response_ids).long()[:, None]).squeeze(1)
        np.testing.assert_allclose(teacher_of(first).log_probs, own, atol=1e-4)
        np.testing.assert_array_equal(teacher_of(first).log_probs, teacher_of(second).log_probs)
        assert teacher_of(first).asked_prompt_ids is None
        assert (first.reward, first.sample_id) == (question.reward, question.sample_id)


@pytest.mark.parametrize(
    ("path", "options", "support_k", "top_k"),
    [
        ("topk:TopK", {}, 0, 6),
        ("hybrid:Hybrid", {}, 4, 0),
        ("hybrid:Hybrid", {"support": "teacher", "support_size": 3}, 0, 3),
        ("hybrid:Hybrid", {"support": "overlap"}, 4, 4),
    ],
)
def test_it_is_asked_at_the_ids_that_the_loss_compares(
    path: str,
    options: dict[str, object],
    support_k: int,
    top_k: int,
    policy_of: MakePolicy,
    model_directory: Callable[[str], Path],
) -> None:
    policy = policy_of(load_algorithm(f"services.trainer.algorithms.{path}", options))
    taught = policy.taught(asking())
    for question, sample in zip(asking(), taught, strict=True):
        teacher, hinted = teacher_of(sample), teacher_of(question).asked_prompt_ids
        assert hinted is not None
        hinted_logs = by_hugging_face(model_directory("qwen3"), hinted, sample.response_ids)
        plain_logs = by_hugging_face(model_directory("qwen3"), sample.prompt_ids, sample.response_ids)
        for targets, k, chooser in ((teacher.support, support_k, plain_logs), (teacher.top, top_k, hinted_logs)):
            assert (targets is None) == (k == 0)
            if targets is not None:
                ids = chooser.topk(k, dim=1).indices
                np.testing.assert_array_equal(targets.ids, ids)
                np.testing.assert_allclose(targets.log_probs, hinted_logs.gather(1, ids), atol=1e-4)
    assert policy.train_step(taught, RATE).changed


def test_samples_that_do_not_ask_stay_as_they_are_and_masks_survive(policy_of: MakePolicy) -> None:
    policy = policy_of()
    first, second, third = asking()
    half_stale = second.without_tokens(np.arange(second.response_ids.size) < 2)
    plain = replace(third, teacher=None)
    answers = policy.taught([first, half_stale, plain])
    assert answers[2] is plain
    np.testing.assert_array_equal(teacher_of(answers[1]).mask, teacher_of(half_stale).mask)
    np.testing.assert_array_equal(teacher_of(answers[1]).log_probs, teacher_of(policy.taught([second])[0]).log_probs)


def test_nothing_can_be_learned_from_a_question_that_was_not_answered(policy_of: MakePolicy) -> None:
    policy = policy_of()
    result = policy.train_step(asking(), RATE)
    assert (result.changed, result.unchanged_reason) == (False, UnchangedReason.NON_FINITE)


def test_without_a_teacher_a_question_is_refused(
    layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    policy = PolicyTrainer(layout, Opd())
    policy.load(model_directory("qwen3"))
    with pytest.raises(ValueError, match="asks for a teacher"):
        policy.taught(asking())


def test_adapters_need_no_second_copy_of_the_model(
    policy_of: MakePolicy, layout: ParallelLayout, model_directory: Callable[[str], Path]
) -> None:
    """The base model is the policy without its adapters, for the teacher and for the KL divergence."""
    algorithm = load_algorithm("services.trainer.algorithms.opd:Opd", {"kl_coefficient": 0.2})
    policy = policy_of(algorithm, model_options=ModelOptions(lora=LoraSettings(rank=3, alpha=12.0)))
    apart = PolicyTrainer(
        layout,
        algorithm,
        model_options=ModelOptions(lora=LoraSettings(rank=3, alpha=12.0)),
        reference_directory=copy_of(model_directory("qwen3")),
        teacher=OwnTeacherOptions(),
    )
    apart.load(model_directory("qwen3"))
    assert policy.models.frozen == {}
    assert len(apart.models.frozen) == 1, "teacher and reference share one"
    for _ in range(3):  # B starts as 0
        one, other = policy.taught(asking()), apart.taught(asking())
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(teacher_of(left).log_probs, teacher_of(right).log_probs, atol=1e-5)
        results = [each.train_step(one, RATE) for each in (policy, apart)]
        assert results[0].metrics["loss"] == pytest.approx(results[1].metrics["loss"], rel=1e-5)
    assert np.abs(policy.score(asking())[0] - policy_of().score(asking())[0]).max() > 1e-2, "the policy moved"
    first, second = (each.snapshot() for each in (policy, apart))
    assert first is not None
    assert second is not None
    assert_same_weights(first.weights, second.weights)


def copy_of(directory: Path) -> Path:
    copy = directory.with_name(directory.name + "-copy")
    if not copy.exists():
        copy.mkdir()
        for file in directory.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("vocab_size", 140, "140 token ids, the policy 131"),
        ("max_position_embeddings", 64, "its context is 64 tokens, the policy's 256"),
        ("tokenizer", 0, "other tokens"),
    ],
)
def test_a_model_that_cannot_teach_this_policy_is_refused_at_the_start(
    field: str,
    change: int,
    message: str,
    layout: ParallelLayout,
    model_directory: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_directory("qwen3"))
    if field == "vocab_size":
        model.resize_token_embeddings(change, mean_resizing=False)
    elif field == "max_position_embeddings":
        model.config.max_position_embeddings = change
    model.save_pretrained(tmp_path)
    other = '{"model": {"vocab": {"a": 1}}}'
    (tmp_path / "tokenizer.json").write_text(other if field == "tokenizer" else "{}")
    policy = PolicyTrainer(layout, Opd(), teacher=OwnTeacherOptions(tmp_path))
    with pytest.raises(SettingsError, match=message):
        policy.load(model_directory("qwen3"))


def test_questions_travel_to_other_ranks(policy_of: MakePolicy) -> None:
    travelled = [question_from_document(question_as_document(sample)) for sample in asking()]
    policy = policy_of()
    for here, there in zip(policy.taught(asking()), policy.taught(travelled), strict=True):
        np.testing.assert_array_equal(teacher_of(here).log_probs, teacher_of(there).log_probs)
    assert [sample.has_signal for sample in travelled] == [True] * 3
    assert not any(sample.rl_mask.any() for sample in travelled)
