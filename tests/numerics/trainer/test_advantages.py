"""Rewards and advantages against NumPy, and what a batch makes of rollouts, groups and users."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events.base import RecordReference, RolloutPosition, VersionSpan
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DropReason
from services.trainer.advantages import (
    AdvantageMode,
    RewardRules,
    StepReward,
    UserBaselines,
    combine_rewards,
    group_advantages,
)
from services.trainer.batcher import Batcher, BatchRules, ClosedBatch
from services.trainer.candidates import Candidate
from services.trainer.credit import CreditRules
from services.trainer.policy import PolicyTrainer
from services.trainer.rollouts import RolloutRules
from tests.fixtures.training_samples import random_samples
from tests.fixtures.turn_ledgers import empty_ledger

REWARDS = st.floats(-1, 1, allow_nan=False).map(lambda value: round(value, 3))


def candidate(
    turn: str,
    *,
    rollout: str | None = None,
    step: int = 0,
    group: str = "g",
    outcome: float | None = None,
    step_reward: float | None = None,
    num_steps: int | None = None,
    trainable_turns: int | None = None,
    principal: str = "alice",
    versions: tuple[int, ...] = (0,),
    seed: int = 0,
) -> Candidate:
    sample = random_samples([0.0], seed=seed)[0]
    tokens = sample.response_ids.size
    bounds = [tokens * index // len(versions) for index in range(len(versions) + 1)]
    position = None
    if rollout is not None:
        position = RolloutPosition(
            task_id="t",
            group_id=group,
            rollout_id=rollout,
            step_index=step,
            last_step_index=None if num_steps is None else num_steps - 1,
            trainable_turns=trainable_turns,
        )
    return Candidate(
        replace(sample, sample_id=turn, rollout_id=rollout or ""),
        turn,
        "session",
        SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=0),
        RecordReference(topic="samples", partition=0, offset=0),
        min(versions),
        outcome,
        newest_version=max(versions),
        version_spans=tuple(
            VersionSpan(weight_version=version, start=bounds[i], end=bounds[i + 1])
            for i, version in enumerate(versions)
        ),
        principal=principal,
        rollout=position,
        outcome=outcome,
        step_reward=step_reward,
    )


def batcher(
    mode: AdvantageMode = AdvantageMode.REWARD,
    rewards: RewardRules | None = None,
    *,
    group_size: int | None = None,
    batch_size: int = 100,
    max_age_versions: int | None = None,
    version: int = 0,
) -> Batcher:
    rules = BatchRules(
        batch_size=batch_size,
        max_batch_age_seconds=60.0,
        max_age_versions=max_age_versions,
        rollouts=RolloutRules(timeout_seconds=30.0, settle_seconds=2.0, group_size=group_size),
        credit=CreditRules(mode, rewards or RewardRules()),
    )
    baselines = UserBaselines(0.5) if mode is AdvantageMode.USER_BASELINE else None
    return Batcher(rules, empty_ledger(), current_version=version, baselines=baselines)


def advantages(batch: ClosedBatch) -> dict[str, float]:
    return {each.turn_id: each.sample.rl_advantage for each in batch.candidates}


@given(
    outcome=st.none() | REWARDS,
    steps=st.lists(st.none() | REWARDS, min_size=1, max_size=8),
    discount=st.floats(0.1, 1.0),
    coefficients=st.tuples(st.floats(0, 3), st.floats(0, 3)),
)
def test_rewards_are_combined_by_the_formula(
    outcome: float | None, steps: list[float | None], discount: float, coefficients: tuple[float, float]
) -> None:
    found = combine_rewards(
        outcome,
        [StepReward(index, reward) for index, reward in enumerate(steps)],
        len(steps),
        RewardRules(*coefficients, discount),
    )
    exponents = np.arange(len(steps))[::-1]
    expected = coefficients[0] * (outcome or 0.0) * np.power(discount, exponents, dtype=np.float64)
    expected = expected + coefficients[1] * np.array([reward or 0.0 for reward in steps])
    for value, reward, wanted in zip(found, steps, expected, strict=True):
        if outcome is None and reward is None:
            assert value is None
        else:
            assert value == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(REWARDS, st.integers(0, 3)), max_size=20))
def test_group_advantages_equal_numpy(entries: list[tuple[float, int]]) -> None:
    rewards = np.array([reward for reward, _ in entries])
    buckets = np.array([bucket for _, bucket in entries])
    found = group_advantages(rewards.tolist(), buckets.tolist())
    for index, value in enumerate(found):
        others = rewards[buckets == buckets[index]]
        if others.size == 1:
            assert value == rewards[index], "a lone reward stays as it is"
        elif others.var() <= 1e-12:
            assert value is None
        else:
            assert value == pytest.approx((rewards[index] - others.mean()) / (others.std() + 1e-6), rel=1e-6)


def test_a_baseline_never_contains_the_reward_it_is_subtracted_from() -> None:
    baselines = UserBaselines(0.5)
    found = [baselines.advantage(user, 1.0, 0.0) for user in ("a", "a", "b", "a")]
    assert found == [1.0, 0.5, 1.0, 0.25]
    baselines.advantage("a", -1.0, 9.0)
    baselines.forget_before(5.0)
    assert set(baselines.averages) == {"a"}


def test_a_rollout_waits_for_its_end_and_its_steps_share_the_outcome() -> None:
    batch = batcher(rewards=RewardRules(discount=0.5, step_coefficient=0.1), batch_size=1)
    batch.add(candidate("b", rollout="r", step=1, step_reward=1.0), 0.0)
    batch.add(candidate("a", rollout="r", step=0, step_reward=-1.0), 0.0)
    assert batch.closes(10.0) is None, "no outcome yet"
    batch.add(candidate("c", rollout="r", step=2, outcome=1.0), 10.0)
    assert batch.closes(11.0) is None, "a moment for samples that are overtaken"
    assert batch.closes(12.0) == "count"
    closed = batch.close("count", 12.0, 0.0)
    assert [each.turn_id for each in closed.candidates] == ["a", "b", "c"]
    assert advantages(closed) == pytest.approx({"a": 0.25 - 0.1, "b": 0.5 + 0.1, "c": 1.0})


def test_a_rollout_that_says_its_length_ends_when_all_of_it_is_there() -> None:
    batch = batcher(batch_size=1)
    batch.add(candidate("b", rollout="r", step=1, outcome=1.0, num_steps=2), 0.0)
    assert batch.closes(20.0) is None, "step 0 is on its way"
    batch.add(candidate("a", rollout="r", step=0, step_reward=0.5), 20.0)
    assert batch.closes(20.0) == "count"


def test_turns_that_may_not_be_trained_are_not_waited_for() -> None:
    batch = batcher(rewards=RewardRules(discount=0.5), batch_size=1)
    batch.add(candidate("a", rollout="r", step=0, step_reward=0.0), 0.0)
    assert batch.closes(20.0) is None
    batch.add(candidate("c", rollout="r", step=2, outcome=1.0, num_steps=4, trainable_turns=2), 20.0)
    assert batch.closes(21.0) is None, "the outcome of step 0 may be on its way"
    assert batch.closes(22.0) == "count"
    assert advantages(batch.close("count", 22.0, 0.0)) == {"a": 0.125, "c": 0.5}, "the last step lies after both"


def test_a_rollout_is_over_when_every_turn_has_its_outcome() -> None:
    batch = batcher(batch_size=1)
    for step in (2, 0):
        assert batch.closes(0.0) is None
        batch.add(candidate(str(step), rollout="r", step=step, outcome=1.0, num_steps=3, trainable_turns=2), 0.0)
    assert batch.closes(0.0) == "count"


def test_a_rollout_without_an_end_is_over_after_its_timeout() -> None:
    batch = batcher(batch_size=1)
    batch.add(candidate("a", rollout="r", step=0, step_reward=0.5), 0.0)
    batch.add(candidate("c", rollout="r", step=2, step_reward=0.0), 10.0)
    assert batch.closes(39.0) is None
    assert batch.closes(40.0) == "count"
    closed = batch.close("count", 40.0, 0.0)
    assert advantages(closed) == {"a": 0.5}
    assert [(d.turn_id, d.reason) for d in closed.drops] == [("c", DropReason.ZERO_ADVANTAGE)]
    batch.add(candidate("b", rollout="r", step=1, outcome=1.0), 50.0)
    assert batch.closes(79.0) is None
    assert advantages(batch.close("age", 80.0, 0.0)) == {"b": 1.0}, "what comes late is trained alone"


def test_a_batch_does_not_age_by_the_length_of_a_rollout() -> None:
    batch = batcher()
    for step in range(4):
        batch.add(candidate(str(step), rollout="r", step=step, step_reward=1.0), 25.0 * step)
    batch.add(candidate("4", rollout="r", step=4, outcome=1.0, num_steps=5), 100.0)
    assert batch.closes(100.0) is None, "the rollout took longer than a batch may wait, but it is over only now"
    assert batch.closes(159.0) is None
    assert batch.closes(160.0) == "age"


def test_a_rollout_is_never_torn_apart() -> None:
    batch = batcher(batch_size=3)
    batch.add(candidate("lone", outcome=1.0), 0.0)
    for step in range(4):
        batch.add(candidate(f"r{step}", rollout="r", step=step, outcome=-1.0, num_steps=4), 0.0)
    batch.add(candidate("after", outcome=1.0), 0.0)
    closed = batch.close("count", 0.0, 0.0)
    assert list(advantages(closed)) == ["lone", "r0", "r1", "r2", "r3"]
    assert [each.turn_id for each in batch.waiting()] == ["after"]


def test_a_group_waits_for_its_rollouts_and_compares_the_same_steps() -> None:
    batch = batcher(AdvantageMode.GROUP, group_size=3, batch_size=1)
    outcomes = {"x": 1.0, "y": -1.0, "z": 1.0}
    for name, outcome in outcomes.items():
        assert batch.closes(0.0) is None
        batch.add(candidate(f"{name}0", rollout=name, step=0, step_reward=0.5), 0.0)
        if name != "y":
            batch.add(candidate(f"{name}1", rollout=name, step=1, outcome=outcome, num_steps=2), 0.0)
        else:
            batch.add(candidate(f"{name}0b", rollout=name, step=2, outcome=outcome, num_steps=3), 0.0)
            batch.add(candidate(f"{name}1", rollout=name, step=1), 0.0)
    assert batch.closes(0.0) == "count"
    closed = batch.close("count", 0.0, 0.0)
    first, second = np.array([1.5, -0.5, 1.5]), np.array([1.0, -1.0, 1.0])
    expected = {f"{n}0": v for n, v in zip("xyz", (first - first.mean()) / (first.std() + 1e-6), strict=True)}
    expected |= {f"{n}1": v for n, v in zip("xyz", (second - second.mean()) / (second.std() + 1e-6), strict=True)}
    assert advantages(closed) == pytest.approx(expected | {"y0b": -1.0}), "a lone step keeps its reward"


def test_a_group_of_equals_teaches_nothing_and_one_that_is_short_is_over_after_its_timeout() -> None:
    batch = batcher(AdvantageMode.GROUP, group_size=3, batch_size=1)
    for name in "xy":
        batch.add(candidate(name, rollout=name, outcome=1.0, num_steps=1), 0.0)
    assert batch.closes(29.0) is None
    assert batch.closes(30.0) is None, "no effective sample"
    closed = batch.close("age", 60.0, 0.0)
    assert closed.candidates == []
    assert {(d.turn_id, d.reason, d.detail) for d in closed.drops} == {
        ("x", DropReason.ZERO_ADVANTAGE, "reward 1"),
        ("y", DropReason.ZERO_ADVANTAGE, "reward 1"),
    }


def test_beside_a_baseline_a_neutral_answer_teaches_too() -> None:
    batch = batcher(AdvantageMode.USER_BASELINE)
    for turn, principal, reward in (("a", "alice", 1.0), ("b", "alice", 0.0), ("c", "carol", -1.0)):
        batch.add(candidate(turn, principal=principal, outcome=reward), 0.0)
    assert batch.have == 3
    assert advantages(batch.close("age", 0.0, 7.0)) == {"a": 1.0, "b": -0.5, "c": -1.0}
    assert batch.baselines == {"alice": (0.25, 7.0), "carol": (-0.5, 7.0)}


def test_tokens_that_are_too_old_are_left_out_and_not_the_whole_answer() -> None:
    batch = batcher(max_age_versions=1, version=3)
    batch.add(candidate("cut", outcome=1.0, versions=(1, 2)), 0.0)
    batch.add(candidate("old", outcome=1.0, versions=(0, 1)), 0.0)
    closed = batch.close("age", 0.0, 0.0)
    (cut,) = closed.candidates
    tokens = cut.sample.response_ids.size
    assert cut.sample.rl_mask.tolist() == [False] * (tokens // 2) + [True] * (tokens - tokens // 2)
    assert cut.stale_tokens == tokens // 2
    assert [(d.turn_id, d.reason) for d in closed.drops] == [("old", DropReason.TOO_OLD)]


def test_the_step_coefficient_reaches_the_gradient(new_policy: Callable[..., PolicyTrainer]) -> None:
    norms = []
    for coefficient in (0.0, 0.5):
        batch = batcher(rewards=RewardRules(step_coefficient=coefficient))
        for step in range(3):
            outcome = 1.0 if step == 2 else None
            batch.add(
                candidate(str(step), rollout="r", step=step, step_reward=-1.0 + step, outcome=outcome, seed=step), 0.0
            )
        closed = batch.close("age", 2.0, 0.0)
        assert len(closed.candidates) == 3
        result = new_policy().train_step([each.sample for each in closed.candidates], 1e-3)
        norms.append(result.metrics["gradient_norm"])
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rollouts_leave_whole_and_every_sample_once(data: st.DataObject) -> None:
    """Whatever the order and the moments: a turn leaves exactly once, and the steps of a rollout in one batch."""
    steps = [(rollout, step) for rollout in "abc" for step in range(data.draw(st.integers(1, 3)))]
    order = data.draw(st.permutations(steps))
    lengths = {rollout: sum(name == rollout for name, _ in steps) for rollout in "abc"}
    batch = batcher(batch_size=2)
    now, out, batches = 0.0, [], []
    for rollout, step in order:
        last = step == lengths[rollout] - 1
        batch.add(
            candidate(
                f"{rollout}{step}",
                rollout=rollout,
                step=step,
                outcome=1.0 if last else None,
                num_steps=lengths[rollout] if last else None,
            ),
            now,
        )
        now += data.draw(st.sampled_from([0.0, 1.0, 5.0]))
        closed_by = batch.closes(now)
        if closed_by is not None:
            batches.append(batch.close(closed_by, now, 0.0))
    while batch.num_waiting:
        now += 30.0
        batches.append(batch.close("age", now, 0.0))
    for closed in batches:
        names = [each.turn_id for each in closed.candidates]
        out += names + [dropped.turn_id for dropped in closed.drops]
        for rollout in {name[0] for name in names}:
            assert sum(name[0] == rollout for name in names) == lengths[rollout]
    assert sorted(out) == sorted(f"{rollout}{step}" for rollout, step in steps)
