"""Which advantage each candidate of a batch gets: `advantages` applied to candidates. Pure but for the baselines."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.trainer.advantages import (
    AdvantageMode,
    RewardRules,
    StepReward,
    UserBaselines,
    combine_rewards,
    group_advantages,
)
from services.trainer.candidates import Candidate


@dataclass(frozen=True, slots=True)
class CreditRules:
    """How candidates get their advantage."""

    mode: AdvantageMode = AdvantageMode.REWARD
    rewards: RewardRules = field(default_factory=RewardRules)


def credited(unit: Sequence[Candidate], rules: CreditRules) -> list[Candidate]:
    """A whole turn, rollout or group with rewards, and with advantages where they follow from the unit alone.

    A candidate whose advantage is exactly 0 loses its RL component: it would only dilute the mean of the others.
    """
    rewarded = [candidate for rollout in _rollouts(unit) for candidate in _rewarded(rollout, rules.rewards)]
    if rules.mode is AdvantageMode.USER_BASELINE:
        return rewarded
    if rules.mode is AdvantageMode.REWARD:
        return [_without_zero(candidate) for candidate in rewarded]
    compared = [c for c in rewarded if c.sample.rl_mask.any() and c.rollout is not None]
    buckets = [(c.rollout.group_id, c.rollout.step_index) for c in compared if c.rollout is not None]
    found = group_advantages([c.sample.reward for c in compared], buckets)
    by_turn = {c.turn_id: advantage for c, advantage in zip(compared, found, strict=True)}
    return [_without_zero(_with_advantage(c, by_turn[c.turn_id]) if c.turn_id in by_turn else c) for c in rewarded]


def beside_baselines(candidates: Sequence[Candidate], baselines: UserBaselines, wall_seconds: float) -> list[Candidate]:
    """The candidates of a closed batch, in its order, with advantages beside their users' averages, which move on."""
    return [
        _without_zero(
            _with_advantage(c, baselines.advantage(c.principal, c.sample.reward, wall_seconds))
            if c.sample.rl_mask.any()
            else c
        )
        for c in candidates
    ]


def may_have_signal(candidate: Candidate, rules: CreditRules) -> bool:
    """Whether a credited candidate may have a gradient. Beside a baseline, any reward may."""
    if rules.mode is AdvantageMode.USER_BASELINE:
        return bool(candidate.sample.mask.any())
    return candidate.sample.has_signal


def _rollouts(unit: Sequence[Candidate]) -> list[list[Candidate]]:
    """The unit's candidates by rollout; a conversation's turn stands for one."""
    found: dict[str, list[Candidate]] = {}
    for candidate in unit:
        name = candidate.turn_id if candidate.rollout is None else candidate.rollout.rollout_id
        found.setdefault(name, []).append(candidate)
    return list(found.values())


def _rewarded(rollout: Sequence[Candidate], rules: RewardRules) -> list[Candidate]:
    """A rollout's outcome is that of its last step that has one."""
    indices = [0 if c.rollout is None else c.rollout.step_index for c in rollout]
    positions = [candidate.rollout for candidate in rollout if candidate.rollout is not None]
    lasts = [position.last_step_index for position in positions if position.last_step_index is not None]
    outcomes = [(index, c.outcome) for index, c in zip(indices, rollout, strict=True) if c.outcome is not None]
    rewards = combine_rewards(
        max(outcomes)[1] if outcomes else None,
        [StepReward(index, c.step_reward) for index, c in zip(indices, rollout, strict=True)],
        max([*indices, *lasts]) + 1,
        rules,
    )
    return [_with_reward(candidate, reward) for candidate, reward in zip(rollout, rewards, strict=True)]


def _with_reward(candidate: Candidate, reward: float | None) -> Candidate:
    if reward is None:
        return _without_rl(candidate)
    mask = np.ones_like(candidate.sample.rl_mask)
    return replace(candidate, reward=reward, sample=replace(candidate.sample, reward=reward, rl_mask=mask))


def _with_advantage(candidate: Candidate, advantage: float | None) -> Candidate:
    if advantage is None:
        return _without_rl(candidate)
    return replace(candidate, sample=replace(candidate.sample, advantage=advantage))


def _without_zero(candidate: Candidate) -> Candidate:
    return candidate if candidate.sample.rl_advantage != 0.0 else _without_rl(candidate)


def _without_rl(candidate: Candidate) -> Candidate:
    if not candidate.sample.rl_mask.any():
        return candidate
    return replace(candidate, sample=replace(candidate.sample, rl_mask=np.zeros_like(candidate.sample.rl_mask)))
