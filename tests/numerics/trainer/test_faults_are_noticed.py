"""Deliberate faults in losses, advantages and log-probs: the comparison with the reference must fail for each.

A fault is a change of one place in the source (`faults.toml`). What it must fail are the tests of `test_losses` and
`test_advantages` themselves, on fixed inputs.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.trainer import test_advantages, test_losses
from tests.numerics.trainer.faults import fault

pytestmark = pytest.mark.slow

LOSS_SEEDS = range(16)
GRADIENT_SEEDS = range(3)
ADVANTAGES = "services.trainer.advantages"


def table() -> dict[str, list[dict[str, Any]]]:
    """Module to its faults."""
    document = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    return {module: entry["faults"] for module, entry in document.items()}


LOSS_FAULTS = [(module, each) for module, found in table().items() if module != ADVANTAGES for each in found]
ADVANTAGE_FAULTS = table()[ADVANTAGES]


class Fixed:
    """Draws what was chosen beforehand."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def draw(self, _: object) -> dict[str, Any]:
        return self._options


def inner(test: Any) -> Callable[..., None]:
    """A test without hypothesis around it."""
    return test.hypothesis.inner_test


def check_loss(loss: str, options: dict[str, Any]) -> None:
    """Runs the tests of this loss. Raises AssertionError where one fails."""
    for seed in LOSS_SEEDS:
        inner(test_losses.test_the_loss_equals_its_formula)(loss, seed=seed, data=Fixed(options))
    for seed in GRADIENT_SEEDS:
        inner(test_losses.test_the_gradient_equals_finite_differences_of_the_formula)(
            loss, seed=seed, data=Fixed(options)
        )


def check_rewards() -> None:
    check = inner(test_advantages.test_rewards_are_combined_by_the_formula)
    check(outcome=0.5, steps=[1.0, None, -0.25], discount=0.9, coefficients=(2.0, 3.0))
    check(outcome=None, steps=[None, 0.5], discount=0.9, coefficients=(2.0, 3.0))


def check_groups() -> None:
    check = inner(test_advantages.test_group_advantages_equal_numpy)
    check([(0.5, 0), (-0.5, 0), (1.0, 0), (0.25, 1), (0.3, 2), (0.3, 2)])


CHECKS = {
    "rewards": check_rewards,
    "groups": check_groups,
    "baselines": test_advantages.test_a_baseline_never_contains_the_reward_it_is_subtracted_from,
}


@pytest.mark.parametrize(("module", "entry"), LOSS_FAULTS, ids=[each["what"] for _, each in LOSS_FAULTS])
def test_a_fault_in_a_loss_fails_its_tests(module: str, entry: dict[str, Any]) -> None:
    with fault(module, entry["right"], entry["wrong"]), pytest.raises(AssertionError):
        check_loss(entry["loss"], entry["options"])


def test_the_same_checks_pass_without_a_fault() -> None:
    checked: list[tuple[str, dict[str, Any]]] = []
    for _, entry in LOSS_FAULTS:
        if (entry["loss"], entry["options"]) not in checked:
            checked.append((entry["loss"], entry["options"]))
            check_loss(entry["loss"], entry["options"])
    assert len(checked) > len({loss for loss, _ in checked})
    for check in CHECKS.values():
        check()


@pytest.mark.parametrize("entry", ADVANTAGE_FAULTS, ids=lambda each: each["what"])
def test_a_fault_in_an_advantage_fails_its_tests(entry: dict[str, Any]) -> None:
    with fault(ADVANTAGES, entry["right"], entry["wrong"]), pytest.raises(AssertionError):
        CHECKS[entry["check"]]()
