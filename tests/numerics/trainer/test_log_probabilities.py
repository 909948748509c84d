"""Log-probs, entropies and their gradient against NumPy in float64."""

import numpy as np
import torch

from services.trainer.engine.log_probabilities import VocabularyShard, log_probabilities, log_probabilities_at

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(0, 3, (5, 7))
IDS = np.array([0, 6, 3, 3, 1])
TEMPERATURES = np.array([1.0, 0.6, 0.25, 2.0, 1.0])
WHOLE = VocabularyShard(0, 7, None)


def reference(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = logits / TEMPERATURES[:, None]
    log_probs = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    return log_probs[np.arange(5), IDS], -(np.exp(log_probs) * log_probs).sum(1)


def compute(logits: torch.Tensor, shard: VocabularyShard = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
    return log_probabilities(logits, torch.as_tensor(IDS), torch.as_tensor(TEMPERATURES), shard)


def test_values_equal_the_formulas() -> None:
    log_probs, entropies = compute(torch.as_tensor(LOGITS))
    expected_log_probs, expected_entropies = reference(LOGITS)
    np.testing.assert_allclose(log_probs.numpy(), expected_log_probs, rtol=1e-12)
    np.testing.assert_allclose(entropies.numpy(), expected_entropies, rtol=1e-10)


def test_large_logits_do_not_overflow() -> None:
    log_probs, entropies = compute(torch.as_tensor(LOGITS + 1e4, dtype=torch.float32))
    np.testing.assert_allclose(log_probs.numpy(), reference(LOGITS)[0], atol=2e-2)
    assert torch.isfinite(entropies).all()


def test_gradient_equals_finite_differences() -> None:
    weights = np.array([1.0, -2.0, 0.5, 3.0, 0.0])
    logits = torch.tensor(LOGITS, requires_grad=True)
    (compute(logits)[0] * torch.as_tensor(weights)).sum().backward()
    numeric = np.zeros_like(LOGITS)
    for place in np.ndindex(*LOGITS.shape):
        step = np.zeros_like(LOGITS)
        step[place] = 1e-6
        difference = reference(LOGITS + step)[0] - reference(LOGITS - step)[0]
        numeric[place] = (weights * difference).sum() / 2e-6
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), numeric, atol=1e-8)


def test_several_ids_and_the_entropy_share_a_pass_and_have_their_gradients() -> None:
    ids = np.array([[0, 3, 6], [6, 6, 1], [2, 0, 5], [1, 1, 1], [4, 2, 3]])
    weights, of_entropy = RANDOM.normal(0, 1, ids.shape), RANDOM.normal(0, 1, 5)

    def expected(logits: np.ndarray) -> float:
        scaled = logits / TEMPERATURES[:, None]
        log_probs = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
        entropies = -(np.exp(log_probs) * log_probs).sum(1)
        return float((weights * np.take_along_axis(log_probs, ids, 1)).sum() + of_entropy @ entropies)

    logits = torch.tensor(LOGITS, requires_grad=True)
    log_probs, entropies = log_probabilities_at(logits, torch.as_tensor(ids), torch.as_tensor(TEMPERATURES), WHOLE)
    total = (torch.as_tensor(weights) * log_probs).sum() + (torch.as_tensor(of_entropy) * entropies).sum()
    np.testing.assert_allclose(total.detach().numpy(), expected(LOGITS), rtol=1e-10)
    total.backward()
    numeric = np.zeros_like(LOGITS)
    for place in np.ndindex(*LOGITS.shape):
        step = np.zeros_like(LOGITS)
        step[place] = 1e-6
        numeric[place] = (expected(LOGITS + step) - expected(LOGITS - step)) / 2e-6
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), numeric, atol=1e-7)


def test_columns_that_pad_the_vocabulary_take_no_probability_and_no_gradient() -> None:
    padded = torch.tensor(np.concatenate([LOGITS, np.full((5, 3), 50.0)], axis=1), requires_grad=True)
    log_probs, entropies = compute(padded, VocabularyShard.of_rank(7, 10, rank=0, size=1, group=None))
    np.testing.assert_allclose(log_probs.detach().numpy(), reference(LOGITS)[0], rtol=1e-12)
    np.testing.assert_allclose(entropies.detach().numpy(), reference(LOGITS)[1], rtol=1e-10)
    (log_probs.sum() + entropies.sum()).backward()
    assert padded.grad is not None
    assert padded.grad[:, 7:].abs().max() == 0


def test_logits_are_left_as_they_were() -> None:
    logits = torch.as_tensor(LOGITS, dtype=torch.float32)
    before = logits.clone()
    compute(logits)
    assert torch.equal(logits, before)
