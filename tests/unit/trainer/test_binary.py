"""The binary loss and its gradient against a NumPy float64 reference written from the formula."""

import numpy as np
import pytest
import torch

from clawstream.errors import SettingsError
from services.trainer.algorithms.base import TokenBatch, load_algorithm
from services.trainer.algorithms.binary import Binary

REWARDS = np.array([1.0, -1.0, 0.0, 0.5])
SAMPLE_OF_TOKEN = np.array([0, 0, 0, 1, 1, 2, 3, 3, 3, 3])
MASK = np.array([True, True, True, True, True, True, False, True, True, False])
RANDOM = np.random.default_rng(3)
PROXIMAL = RANDOM.normal(-2.0, 0.5, 10)
CURRENT = PROXIMAL + np.array([0.5, -0.5, 0.05, 0.5, -0.5, 0.0, 0.0, 0.3, -0.3, 9.0])  # both bounds, both signs
BEHAVIOUR = PROXIMAL - np.array([0.0, 0.2, -0.4, 1.5, 0.1, 0.3, 0.0, -0.7, 2.0, 0.0])  # two of them above the cap


def reference_loss(current: np.ndarray) -> float:
    """1/N sum_i mean_t min(exp(prox - mu), 2) * max(-rho A, -clip(rho, 0.8, 1.28) A), in scalar Python."""
    members = [sample for sample in range(4) if MASK[sample == SAMPLE_OF_TOKEN].any()]
    total = 0.0
    for sample in members:
        terms = []
        for token in np.flatnonzero((sample == SAMPLE_OF_TOKEN) & MASK):
            ratio = float(np.exp(current[token] - PROXIMAL[token]))
            weight = min(float(np.exp(PROXIMAL[token] - BEHAVIOUR[token])), 2.0)
            advantage = float(REWARDS[sample])
            terms.append(weight * max(-ratio * advantage, -min(max(ratio, 0.8), 1.28) * advantage))
        total += sum(terms) / len(terms)
    return total / len(members)


def batch(current: torch.Tensor, tokens: slice = slice(None), rewards: np.ndarray = REWARDS) -> TokenBatch:
    return TokenBatch(
        log_probs=current,
        proximal_log_probs=torch.as_tensor(PROXIMAL[tokens]),
        behaviour_log_probs=torch.as_tensor(BEHAVIOUR[tokens]),
        sample_of_token=torch.as_tensor(SAMPLE_OF_TOKEN[tokens] - SAMPLE_OF_TOKEN[tokens][0]),
        rewards=torch.as_tensor(rewards),
        rl_mask=torch.as_tensor(MASK[tokens]),
    )


def test_loss_equals_the_formula() -> None:
    loss = Binary().loss(batch(torch.as_tensor(CURRENT)), {"rl": 4})
    assert float(loss.per_sample.sum()) == pytest.approx(reference_loss(CURRENT), rel=1e-12)


def test_gradient_equals_finite_differences_and_is_zero_where_clipped() -> None:
    current = torch.tensor(CURRENT, requires_grad=True)
    loss = Binary().loss(batch(current), {"rl": 4})
    loss.per_sample.sum().backward()
    numeric = np.zeros_like(CURRENT)
    for token in range(CURRENT.size):
        step = np.zeros_like(CURRENT)
        step[token] = 1e-6
        numeric[token] = (reference_loss(CURRENT + step) - reference_loss(CURRENT - step)) / 2e-6
    assert current.grad is not None
    np.testing.assert_allclose(current.grad.numpy(), numeric, atol=1e-8)
    assert loss.clipped.sum() == 3
    assert current.grad[loss.clipped].abs().max() == 0
    assert current.grad[~torch.as_tensor(MASK)].abs().max() == 0


def test_cut_into_micro_batches_the_losses_add_up() -> None:
    parts = [(slice(0, 5), REWARDS[:2]), (slice(5, 10), REWARDS[2:])]
    losses = [
        float(Binary().loss(batch(torch.as_tensor(CURRENT[cut]), cut, rewards), {"rl": 4}).per_sample.sum())
        for cut, rewards in parts
    ]
    assert sum(losses) == pytest.approx(reference_loss(CURRENT), rel=1e-12)


def test_the_cap_bounds_the_weight_of_stale_tokens() -> None:
    loss = Binary().loss(batch(torch.as_tensor(CURRENT)), {"rl": 4})
    assert loss.capped.tolist() == (np.log(2.0) < PROXIMAL - BEHAVIOUR).tolist()
    assert loss.capped.sum() == 2


def test_stale_data_changes_the_gradient() -> None:
    """With one update per batch a ratio against recomputed log-probs is always 1; the weight is what notices age."""
    gradients = []
    for behaviour in (PROXIMAL, BEHAVIOUR):
        current = torch.tensor(PROXIMAL, requires_grad=True)
        tokens = batch(current)
        stale = TokenBatch(
            current,
            tokens.proximal_log_probs,
            torch.as_tensor(behaviour),
            tokens.sample_of_token,
            tokens.rewards,
            tokens.rl_mask,
        )
        Binary().loss(stale, {"rl": 4}).per_sample.sum().backward()
        gradients.append(current.grad)
    assert not torch.allclose(gradients[0], gradients[1])


def test_a_sample_belongs_to_the_component_by_its_mask_and_has_signal_by_its_reward() -> None:
    tokens = batch(torch.empty(0))
    assert Binary().component_samples(tokens)["rl"].tolist() == [True, True, True, True]
    assert Binary().has_signal(tokens).tolist() == [True, True, False, True]


def test_an_algorithm_is_loaded_by_its_import_path() -> None:
    algorithm = load_algorithm("services.trainer.algorithms.binary:Binary", {"clip_high": 0.2})
    loss = algorithm.loss(batch(torch.as_tensor(CURRENT)), {"rl": 4})
    assert float(loss.per_sample.sum()) != pytest.approx(reference_loss(CURRENT))


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("services.trainer.algorithms.binary", {}, "import path of the form"),
        ("services.trainer.algorithms.binary:Nothing", {}, "cannot be imported"),
        ("no_such_package.module:Name", {}, "cannot be imported"),
        ("services.trainer.algorithms.binary:Binary", {"clip": 1}, "does not take the options"),
        ("builtins:dict", {}, "lacks"),
    ],
)
def test_a_bad_import_path_says_what_is_wrong(path: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_algorithm(path, options)
