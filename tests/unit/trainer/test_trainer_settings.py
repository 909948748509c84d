"""Settings of the trainer: limits that contradict one another are refused when they are read, and named."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.trainer.algorithms.options import IdSource
from services.trainer.settings import TrainerSettings

ALGORITHMS = "services.trainer.algorithms."


def trainer(**values: Any) -> TrainerSettings:
    return TrainerSettings(name="trainer", model=Path("model"), **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_sample_tokens": 100, "tokens_per_micro_batch": 50}, "exceeds tokens_per_micro_batch"),
        ({"batch_size": 2, "updates_per_batch": 3}, "updates_per_batch=3 exceeds batch_size=2"),
        ({"checkpoint_every_steps": 101}, "less than or equal to 100"),
        ({"advantage": {"mode": "group"}}, "group_size must be given"),
        ({"advantage": {"group_size": 4}}, "group_size must be given"),
        ({"advantage": {"outcome_coefficient": 0, "step_coefficient": 0}}, "no reward would be left"),
        ({"advantage": {"rollout_settle_seconds": 9, "rollout_timeout_seconds": 9}}, "must be below"),
        ({"at_least_one": True, "advantage": {"mode": "user_baseline"}}, "at_least_one has no effect"),
        ({"algorithm": {"options": {"clip": 1}}}, "clip"),
        ({"own_teacher": {}}, "binary:Binary learns nothing from a teacher"),
        (
            {"own_teacher": {"model": "m", "version": 1}, "algorithm": {"factory": ALGORITHMS + "opd:Opd"}},
            "two teachers",
        ),
        (
            {"own_teacher": {"version": 1}, "lora": {}, "algorithm": {"factory": ALGORITHMS + "opd:Opd"}},
            "versions are adapters",
        ),
        ({"algorithm": {"options": {"dual_clip": 1.1}}}, "must exceed 1"),
        ({"algorithm": {"options": {"icepop_high": 0.9}}}, "fresh data would be left out"),
        (
            {"algorithm": {"options": {"kl_coefficient": 0.1, "kl_reference": "proximal"}}},
            "kl_reference=proximal with updates_per_batch=1",
        ),
        ({"algorithm": {"factory": ALGORITHMS + "topk:TopK", "options": {"clip_low": 0.1}}}, "clip_low"),
        (
            {
                "algorithm": {
                    "factory": ALGORITHMS + "combine:Combine",
                    "options": {"rl_coefficient": 0, "opd_coefficient": 0},
                }
            },
            "nothing would be learned",
        ),
        ({"algorithm": {"factory": ALGORITHMS + "hybrid:Hybrid", "options": {"summed": True}}}, "belongs to combine"),
        ({"batch_size": 4, "guards": {"effective_samples": {"min_samples": 5}}}, "min_samples=5 exceeds batch_size=4"),
        ({"max_age_versions": 3, "guards": {"shift": {"max_age_versions": 3}}}, "could never act"),
        ({"guards": {"shift": {"max_clipped_share": 0.1}}}, "nothing is clipped"),
        ({"updates_per_batch": 2, "guards": {"shift": {"policy": "drop"}}}, "policy=drop by entropy, shift"),
        (
            {"guards": {"exploration": {"policy": "adapt"}}, "algorithm": {"options": {"entropy_coefficient": 0.5}}},
            "entropy_coefficient: the configured 0.5 is outside",
        ),
        (
            {
                "guards": {"shift": {"policy": "adapt", "adapts": "kl_coefficient"}},
                "algorithm": {"options": {"kl_reference": "proximal"}},
            },
            "a guard adapts kl_coefficient, but",
        ),
    ],
)
def test_limits_that_contradict_one_another_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        trainer(**values)


@pytest.mark.parametrize(
    ("factory", "options", "expected"),
    [
        ("binary:Binary", {}, (True, False, IdSource.NONE)),
        ("opd:Opd", {}, (False, True, IdSource.NONE)),
        ("combine:Combine", {}, (True, True, IdSource.NONE)),
        ("combine:Combine", {"rl_coefficient": 0}, (False, True, IdSource.NONE)),
        ("topk:TopK", {}, (False, True, IdSource.TEACHER_TOP)),
        ("hybrid:Hybrid", {}, (True, True, IdSource.STUDENT_TOP)),
        ("hybrid:Hybrid", {"support": "overlap"}, (True, True, IdSource.OVERLAP)),
    ],
)
def test_a_loss_says_what_it_learns_from(
    factory: str, options: dict[str, Any], expected: tuple[bool, bool, IdSource]
) -> None:
    signal = trainer(algorithm={"factory": ALGORITHMS + factory, "options": options}).algorithm.learning_signal
    assert (signal.rl, signal.opd, signal.ids) == expected


def test_anyones_own_loss_gets_everything_and_its_options_unchecked() -> None:
    signal = trainer(algorithm={"factory": "mine.losses:Mine", "options": {"x": 1}}).algorithm.learning_signal
    assert (signal.rl, signal.opd) == (True, True)
