"""From rewards to advantages: pure functions on numbers.

A rollout is one attempt of a task, T turns (steps) long; a conversation's turn is a rollout of one step.

    reward of step t       x_t = c_outcome * o * gamma^(T - 1 - t) + c_step * p_t
    among rollouts         z = (x - mean) / (sigma + 1e-6)        over all x of the same (group, step)
    beside a baseline      A = x - b_user,   b_user <- decay * b_user + (1 - decay) * x

o is the outcome of the rollout and p_t a judge's reward of the step. sigma is the population's. A lone x of its (group,
step) stays as it is; where all are equal (variance at most 1e-12) there is nothing to compare and no RL component.
Source of z: OpenClaw-RL's `_post_process_step_wise_rewards`. There c_step never reached what was trained, only what was
reported; and one sample of nothing but constant buckets stayed in, with z = 0, so that its batch was not empty.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

LARGEST_CONSTANT_VARIANCE = 1e-12
SMALLEST_DEVIATION = 1e-6


class AdvantageMode(StrEnum):
    """What the RL component makes of a reward."""

    REWARD = "reward"
    """The reward itself."""
    GROUP = "group"
    """Its distance from those of the same step of the group's other rollouts, in standard deviations."""
    USER_BASELINE = "user_baseline"
    """Its distance from the moving average of the user's rewards."""


@dataclass(frozen=True, slots=True)
class RewardRules:
    """How outcome and step rewards become the reward of a step."""

    outcome_coefficient: float = 1.0
    step_coefficient: float = 1.0
    discount: float = 1.0
    """gamma: what a step is worth that lies one turn further from the outcome."""


@dataclass(frozen=True, slots=True)
class StepReward:
    """One step that was taken."""

    step_index: int
    reward: float | None
    """p_t; None when nobody judged the step."""


def combine_rewards(
    outcome: float | None, steps: Sequence[StepReward], num_steps: int, rules: RewardRules
) -> list[float | None]:
    """x_t of each of `steps`, of a rollout of `num_steps`; None for a step without any reward."""
    combined: list[float | None] = []
    for step in steps:
        if outcome is None and step.reward is None:
            combined.append(None)
            continue
        distance = num_steps - 1 - step.step_index
        from_outcome = rules.outcome_coefficient * (outcome or 0.0) * rules.discount**distance
        combined.append(from_outcome + rules.step_coefficient * (step.reward or 0.0))
    return combined


def group_advantages(rewards: Sequence[float], buckets: Sequence[Hashable]) -> list[float | None]:
    """z of each reward in its bucket; None where all of the bucket are equal."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, bucket in enumerate(buckets):
        members[bucket].append(index)
    advantages: list[float | None] = list(rewards)
    for indices in members.values():
        if len(indices) == 1:
            continue
        values = [rewards[index] for index in indices]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        for index in indices:
            constant = variance <= LARGEST_CONSTANT_VARIANCE
            advantages[index] = (
                None if constant else (rewards[index] - mean) / (math.sqrt(variance) + SMALLEST_DEVIATION)
            )
    return advantages


@dataclass(slots=True)
class UserBaselines:
    """A moving average of each user's rewards: praise means more from somebody who rarely praises."""

    decay: float
    averages: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """User to (average, when it last changed in seconds since 1970). Part of the checkpoint."""

    def advantage(self, user: str, reward: float, wall_seconds: float) -> float:
        """A of the next reward of `user`; then the average takes it in. An unknown user's average is 0."""
        average = self.averages.get(user, (0.0, 0.0))[0]
        self.averages[user] = (self.decay * average + (1 - self.decay) * reward, wall_seconds)
        return reward - average

    def forget_before(self, seconds: float) -> None:
        """Forgets users who were not heard of since."""
        self.averages = {user: entry for user, entry in self.averages.items() if entry[1] >= seconds}

    @classmethod
    def restored(cls, decay: float, averages: Mapping[str, tuple[float, float]]) -> "UserBaselines":
        """From a checkpoint."""
        return cls(decay, dict(averages))
