"""Where distillation points: a toy softmax, sampled at T_s = 0.6, against the exact gradient of KL(p || p_T) at T = 1.

The policy is one softmax over 20 ids, so that the divergence and its gradient are known exactly. Expectations are
taken by enumeration, every id weighted by the probability that it was sampled with, and once by sampling.
"""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from services.trainer.algorithms.base import Algorithm
from services.trainer.algorithms.combine import Combine
from services.trainer.algorithms.opd import Opd
from services.trainer.algorithms.topk import TopK
from tests.numerics.trainer import loss_cases
from tests.numerics.trainer.loss_cases import Answer, log_softmax, loss_and_gradient

SAMPLED_AT = 0.6
IDS = 20
UNTRUNCATED: Mapping[str, object] = {"behaviour_weight_cap": 1e9}
SEEDS = range(12)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_cases, "VOCABULARY", IDS)


def toy(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(logits of the policy, logits of the teacher): a hint moves a few ids by some nats."""
    random = np.random.default_rng(seed)
    policy = random.normal(0, 1.0, IDS)
    return policy, policy + random.normal(0, 0.5, IDS) + 2.0 * (random.random(IDS) < 0.15)


def exact_gradient(policy: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """d KL(p || p_T) / d logits = p (log p - log p_T - KL), at temperature 1."""
    log_p, log_t = log_softmax(policy), log_softmax(teacher)
    divergence = (np.exp(log_p) * (log_p - log_t)).sum()
    return np.exp(log_p) * (log_p - log_t - divergence)


def answers(policy: np.ndarray, teacher: np.ndarray, ids: np.ndarray) -> list[Answer]:
    """One answer of one token for each of `ids`."""
    behaviour = log_softmax(policy, SAMPLED_AT)
    whole = np.arange(IDS)[None]
    return [
        Answer(
            ids=np.array([i]),
            proximal=policy[None],
            current=policy[None],
            reference=policy[None],
            behaviour=behaviour[[i]],
            temperature=SAMPLED_AT,
            advantage=0.0,
            rl_mask=np.array([False]),
            opd_mask=np.array([True]),
            teacher=teacher[None],
            rollout=0,
            top_ids=whole,
            support_ids=whole,
        )
        for i in ids
    ]


def expected_gradient(algorithm: Algorithm, policy: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """[ids]: the gradient of the loss, averaged over what would be sampled."""
    _, gradients, _ = loss_and_gradient(answers(policy, teacher, np.arange(IDS)), algorithm)
    return IDS * np.exp(log_softmax(policy, SAMPLED_AT)) @ gradients


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


@pytest.mark.parametrize("seed", SEEDS)
def test_distillation_descends_the_divergence_at_temperature_1(seed: int) -> None:
    policy, teacher = toy(seed)
    gradient = expected_gradient(Opd(**UNTRUNCATED), policy, teacher)
    np.testing.assert_allclose(gradient, exact_gradient(policy, teacher), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_of_the_distribution_gives_the_same_gradient_without_sampling(seed: int) -> None:
    policy, teacher = toy(seed)
    gradient = expected_gradient(TopK(), policy, teacher)
    assert cosine(gradient, exact_gradient(policy, teacher)) > 0.9999


def test_samples_point_there_too() -> None:
    policy, teacher = toy(0)
    random = np.random.default_rng(0)
    ids = random.choice(IDS, 20_000, p=np.exp(log_softmax(policy, SAMPLED_AT)))
    sampled = loss_and_gradient(answers(policy, teacher, ids), Opd(**UNTRUNCATED))[1].sum(0)
    assert cosine(sampled, exact_gradient(policy, teacher)) > 0.99


def test_the_cap_bends_it_a_little_and_the_summed_form_bends_it_much(record_property: object) -> None:
    """The summed form compares the teacher at temperature 1 with the policy at T_s, and follows that difference."""
    found: dict[str, list[float]] = {"capped": [], "summed": []}
    for seed in SEEDS:
        policy, teacher = toy(seed)
        exact = exact_gradient(policy, teacher)
        found["capped"].append(cosine(expected_gradient(Opd(), policy, teacher), exact))
        found["summed"].append(cosine(expected_gradient(Combine(summed=True, **UNTRUNCATED), policy, teacher), exact))
    for name, cosines in found.items():
        record_property(name, [round(value, 3) for value in cosines])  # type: ignore[operator] # pytest's fixture
    assert max(found["summed"]) < 0.99
    assert np.mean(found["capped"]) > np.mean(found["summed"])


def test_gradients_of_torch_agree_with_the_closed_form() -> None:
    policy, teacher = toy(3)
    logits = torch.tensor(policy, requires_grad=True)
    log_p = logits.log_softmax(-1)
    (log_p.exp() * (log_p - torch.as_tensor(log_softmax(teacher)))).sum().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), exact_gradient(policy, teacher), atol=1e-12)
