"""What losses must do and must not do: stale data, masks, components, one-hot teachers, bad paths and options."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from clawstream.errors import SettingsError
from services.trainer.algorithms.base import load_algorithm
from services.trainer.algorithms.binary import Binary
from services.trainer.algorithms.combine import Combine
from services.trainer.algorithms.hybrid import Hybrid
from services.trainer.algorithms.kl import kl_estimates
from services.trainer.algorithms.opd import Opd
from services.trainer.algorithms.options import KlEstimator
from services.trainer.algorithms.topk import TopK
from tests.numerics.trainer.loss_cases import (
    Answer,
    current_logits,
    log_softmax,
    loss_and_gradient,
    random_answers,
    token_batch,
)


def fresh(answers: list[Answer]) -> list[Answer]:
    """Sampled just now: no staleness, ratio 1."""
    return [
        replace(
            answer,
            current=answer.proximal.copy(),
            behaviour=log_softmax(answer.proximal, answer.temperature)[np.arange(len(answer.ids)), answer.ids],
        )
        for answer in answers
    ]


def full(answer: Answer, *, rl: bool, opd: bool, advantage: float = 1.0) -> Answer:
    everywhere = np.ones(len(answer.ids), bool)
    return replace(answer, rl_mask=everywhere & rl, opd_mask=everywhere & opd, advantage=advantage)


@pytest.mark.parametrize("ratio", ["decoupled", "behaviour"])
def test_stale_data_changes_the_gradient(ratio: str) -> None:
    answers = [full(answer, rl=True, opd=False) for answer in random_answers(1, moved=0.0)]
    algorithm = Binary(ratio=ratio, clip_low=0.9, clip_high=9.0)
    stale, now = (loss_and_gradient(each, algorithm)[1] for each in (answers, fresh(answers)))
    assert np.abs(stale - now).max() > 1e-3


def test_the_original_ratio_is_blind_to_stale_data() -> None:
    """With one update a ratio against recomputed log-probs is always 1, which is why it is not the default."""
    answers = [full(answer, rl=True, opd=False) for answer in random_answers(1, moved=0.0)]
    stale, now = (loss_and_gradient(each, Binary(ratio="recomputed"))[1] for each in (answers, fresh(answers)))
    np.testing.assert_array_equal(stale, now)


def test_a_one_hot_teacher_moves_only_its_token() -> None:
    """The teacher agrees with the policy everywhere but at one token: nothing else has a gradient."""
    (answer, *_) = [each for each in random_answers(5, moved=0.0) if len(each.ids) >= 3]
    answer = full(answer, rl=False, opd=True)
    place = 1
    teacher = answer.proximal.copy()
    teacher[place] = 0.0
    teacher[place, answer.ids[place]] = 20.0
    answer = replace(
        answer,
        teacher=teacher,
        top_ids=np.argsort(-teacher, axis=1)[:, :3],
        support_ids=np.argsort(-answer.proximal, axis=1)[:, :3],
    )
    for algorithm in (Opd(), TopK(), Hybrid(), Combine()):
        _, gradient, _ = loss_and_gradient([answer], algorithm)
        others = np.delete(gradient, place, axis=0)
        assert np.abs(others).max() < 1e-12, type(algorithm)
        assert np.abs(gradient[place]).max() > 1e-2, type(algorithm)
        if not isinstance(algorithm, Hybrid):  # its support may not hold the id that the teacher wants
            assert np.argmin(gradient[place]) == answer.ids[place], "descending makes the teacher's id likelier"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_an_identical_teacher_teaches_nothing_at_any_temperature(temperature: float) -> None:
    answers = [
        replace(full(answer, rl=False, opd=True), teacher=answer.proximal, temperature=temperature)
        for answer in random_answers(2, moved=0.0)
    ]
    _, gradient, (loss,) = loss_and_gradient(answers, Opd())
    assert float(loss.components["opd"].advantages.abs().max()) < 1e-12
    assert np.abs(gradient).max() < 1e-12
    _, original, _ = loss_and_gradient(answers, Combine(summed=True))
    assert (np.abs(original).max() < 1e-12) == (temperature == 1.0), "the original compares two temperatures"


def test_components_have_denominators_of_their_own() -> None:
    both = random_answers(11, largest_batch=1)
    rewarded = full(both[0], rl=True, opd=False)
    hinted = [full(answer, rl=False, opd=True) for answer in random_answers(12)]
    alone = loss_and_gradient([rewarded], Combine())[1]
    together = loss_and_gradient([rewarded, *hinted], Combine())[1]
    np.testing.assert_allclose(together[: len(alone)], alone, rtol=1e-12)
    only_hints = loss_and_gradient(hinted, Combine())[1]
    np.testing.assert_allclose(together[len(alone) :], only_hints, rtol=1e-12)


def test_a_sample_with_a_reward_only_gives_no_distillation_gradient_and_the_reverse() -> None:
    answers = random_answers(7)
    rewarded = [full(answer, rl=True, opd=False) for answer in answers]
    for algorithm in (Combine(rl_coefficient=0.0), Hybrid(rl_coefficient=0.0), Opd(), TopK()):
        assert np.abs(loss_and_gradient(rewarded, algorithm)[1]).max() == 0.0
    hinted = [full(answer, rl=False, opd=True) for answer in answers]
    for algorithm in (Combine(opd_coefficient=0.0), Hybrid(opd_coefficient=0.0), Binary()):
        assert np.abs(loss_and_gradient(hinted, algorithm)[1]).max() == 0.0


def test_masked_tokens_have_no_gradient_whatever_stands_in_them() -> None:
    answers = [full(answer, rl=True, opd=True) for answer in random_answers(3)]
    answers[0].rl_mask[0] = answers[0].opd_mask[0] = False
    for algorithm in (Binary(), Opd(), Combine(), Combine(summed=True), TopK(), Hybrid(), Binary(kl_coefficient=0.1)):
        assert np.abs(loss_and_gradient(answers, algorithm)[1][0]).max() == 0.0, type(algorithm)


def test_signal_is_an_advantage_or_a_teacher() -> None:
    answers = random_answers(4, largest_batch=1) * 4
    kinds = [(True, False, 1.0), (True, False, 0.0), (False, True, 0.0), (False, False, 1.0)]
    chosen = [full(a, rl=rl, opd=opd, advantage=r) for a, (rl, opd, r) in zip(answers, kinds, strict=True)]
    batch = token_batch(chosen, current_logits(chosen), Combine())
    assert Combine().has_signal(batch).tolist() == [True, False, True, False]
    assert Binary().has_signal(batch).tolist() == [True, False, False, False]
    assert Opd().has_signal(batch).tolist() == [False, False, True, False]
    weights = Combine().sample_weights(batch)
    assert (weights["rl"] > 0).tolist() == [True, True, False, False], "a neutral sample is in the denominator"
    assert (weights["opd"] > 0).tolist() == [False, False, True, False]


def test_a_rejected_token_stays_in_the_denominator() -> None:
    answers = [full(answer, rl=True, opd=False) for answer in random_answers(8, stale=2.0)]
    limits = {"icepop_low": 0.5, "icepop_high": 2.0}
    loss, _, (part,) = loss_and_gradient(answers, Binary(**limits))
    component = part.components["rl"]
    assert component.rejected.any()
    assert (component.active | component.rejected).all()
    unlimited, _, (everything,) = loss_and_gradient(answers, Binary())
    kept_loss = unlimited - loss
    assert kept_loss != 0.0
    assert everything.components["rl"].active.all()


def test_the_cap_and_the_clip_are_reported_where_they_act() -> None:
    answers = [full(answer, rl=True, opd=False) for answer in random_answers(9, stale=1.5, moved=1.0)]
    logits = current_logits(answers)
    batch = token_batch(answers, logits, Binary())
    loss = Binary().loss(batch, Binary().sample_weights(batch))
    component = loss.components["rl"]
    weight = (batch.proximal_log_probs - batch.behaviour_log_probs).exp()
    assert component.capped.tolist() == (weight > 2.0).tolist()
    assert component.capped.any()
    loss.per_sample.sum().backward()
    assert logits.grad is not None
    assert component.clipped.any()
    assert float(logits.grad[component.clipped].abs().max()) == 0.0


def test_kl_estimates_agree_with_the_divergence_on_average() -> None:
    """E_p[k1] = E_p[k3] = KL(p || q) exactly over a vocabulary; k2 only nearly; low_var bounds k3."""
    random = np.random.default_rng(0)
    p, q = (torch.as_tensor(log_softmax(random.normal(0, 0.5, 50))) for _ in range(2))
    exact = float((p.exp() * (p - q)).sum())
    means = {kind: float((p.exp() * kl_estimates(p, q, kind)).sum()) for kind in KlEstimator}
    assert means[KlEstimator.K1] == pytest.approx(exact, rel=1e-9)
    assert means[KlEstimator.K3] == pytest.approx(exact, rel=1e-9)
    assert means[KlEstimator.LOW_VAR] == pytest.approx(exact, rel=1e-9)
    assert means[KlEstimator.K2] == pytest.approx(exact, rel=0.3)
    assert float(kl_estimates(torch.tensor(-30.0), torch.tensor(0.0), KlEstimator.LOW_VAR)) == 10.0


def test_an_algorithm_is_loaded_by_its_import_path_with_its_options() -> None:
    answers = [full(answer, rl=True, opd=False) for answer in random_answers(1, moved=1.0)]
    path = "services.trainer.algorithms.binary:Binary"
    narrow, usual = (
        loss_and_gradient(answers, load_algorithm(path, options))[0] for options in ({"clip_high": 0.01}, {})
    )
    assert narrow != usual


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("services.trainer.algorithms.binary", {}, "import path of the form"),
        ("services.trainer.algorithms.binary:Nothing", {}, "cannot be imported"),
        ("no_such_package.module:Name", {}, "cannot be imported"),
        ("services.trainer.algorithms.binary:Binary", {"clip": 1}, "does not take the options"),
        ("services.trainer.algorithms.binary:Binary", {"clip_low": 2.0}, "does not take the options"),
        ("builtins:dict", {}, "lacks"),
    ],
)
def test_a_bad_import_path_says_what_is_wrong(path: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_algorithm(path, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "behaviour", "behaviour_weight_cap": 2.0}, "behaviour_weight_cap has no effect"),
        ({"dual_clip": 1.2}, "must exceed 1 \\+ clip_high"),
        ({"icepop_low": 2.0, "icepop_high": 3.0}, "above 1, so fresh data would be left out"),
        ({"icepop_high": 0.5}, "below 1, so fresh data would be left out"),
        ({"sequence_rejection_high": 2.0}, "need sequence_rejection"),
        ({"sequence_rejection": "sum"}, "needs sequence_rejection_low"),
        ({"sequence_rejection": "sum", "sequence_rejection_low": 1.5}, "fresh data"),
        ({"aggregation": "sample_sum_norm"}, "aggregation_norm_tokens"),
        ({"aggregation_norm_tokens": 10}, "aggregation_norm_tokens"),
        ({"aggregation": "mean"}, "aggregation"),
    ],
)
def test_limits_that_contradict_one_another_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Binary(**options)
