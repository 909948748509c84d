"""What a step trains on, and what it answers: plain data, no Kafka and no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from services.trainer.guards.bounds import Breach


@dataclass(frozen=True, slots=True)
class IdTargets:
    """A teacher's log-probs at several ids for every token."""

    ids: NDArray[np.int32]
    """[response_tokens, k]; -1 where a token has fewer than k."""
    log_probs: NDArray[np.float32]
    """[response_tokens, k] in nats, at temperature 1."""


@dataclass(frozen=True, slots=True)
class TeacherTargets:
    """What a teacher who has read the hint thinks of an answer. All at temperature 1."""

    mask: NDArray[np.bool_]
    """[response_tokens]: tokens of the distillation component."""
    log_probs: NDArray[np.float32]
    """[response_tokens] in nats, of the response's own ids."""
    top: IdTargets | None = None
    """At the teacher's likeliest ids."""
    support: IdTargets | None = None
    """At the likeliest ids of the policy that sampled; of the trainer's own teacher, of the policy before the step."""
    asked_prompt_ids: NDArray[np.int32] | None = None
    """[hinted_prompt_tokens] The prompt under which the trainer's own teacher has still to score the answer. Until it
    has, `log_probs` are not numbers, so that nothing can be learned from them."""

    @classmethod
    def asked(cls, prompt_ids: NDArray[np.int32], response_tokens: int) -> "TeacherTargets":
        """What is known before the trainer's own teacher was asked."""
        nothing = np.full(response_tokens, np.nan, np.float32)
        return cls(np.ones(response_tokens, np.bool_), nothing, asked_prompt_ids=prompt_ids)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One answer with its evidence."""

    sample_id: str
    """Names the sample in metrics and errors."""
    prompt_ids: NDArray[np.int32]
    """[prompt_tokens], at least one."""
    response_ids: NDArray[np.int32]
    """[response_tokens], at least one."""
    behaviour_log_probs: NDArray[np.float32]
    """[response_tokens] in nats, of the distribution that was sampled, at `sampling_temperature`."""
    rl_mask: NDArray[np.bool_]
    """[response_tokens]: tokens of the RL component; all False for a sample without a reward."""
    reward: float = 0.0
    """Reward of the RL component; ignored where the mask is False."""
    sampling_temperature: float = 1.0
    """Temperature that the answer was sampled with; positive."""
    advantage: float | None = None
    """What the RL component makes of the reward (a group's, or beside a baseline); None: the reward itself."""
    teacher: TeacherTargets | None = None
    """Targets of the distillation component, if any."""
    rollout_id: str = ""
    """The rollout that this answer is a step of; empty for a conversation's turn, which counts as one by itself."""

    def __post_init__(self) -> None:
        lengths = {"behaviour_log_probs": self.behaviour_log_probs.shape, "rl_mask": self.rl_mask.shape}
        if self.teacher is not None:
            lengths |= {"teacher.mask": self.teacher.mask.shape, "teacher.log_probs": self.teacher.log_probs.shape}
            for name, targets in (("top", self.teacher.top), ("support", self.teacher.support)):
                if targets is not None:
                    lengths[f"teacher.{name}"] = targets.ids.shape[:1]
                    if targets.ids.ndim != 2 or targets.ids.shape != targets.log_probs.shape:
                        shapes = f"{targets.ids.shape} and {targets.log_probs.shape}"
                        raise ValueError(
                            f"sample {self.sample_id}: teacher.{name} has shapes {shapes}, not [tokens, k]"
                        )
        wrong = {name: shape for name, shape in lengths.items() if shape != (self.response_ids.size,)}
        if wrong or self.response_ids.ndim != 1 or self.prompt_ids.ndim != 1:
            raise ValueError(f"sample {self.sample_id}: {self.response_ids.size} response ids, but shapes {wrong}")
        if self.prompt_ids.size == 0 or self.response_ids.size == 0:
            raise ValueError(f"sample {self.sample_id}: prompt and response need at least one token each")
        if not self.sampling_temperature > 0:
            raise ValueError(f"sample {self.sample_id}: sampling_temperature={self.sampling_temperature} is not > 0")

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes for this sample."""
        return self.prompt_ids.size + self.response_ids.size - 1

    @property
    def rl_advantage(self) -> float:
        """Advantage of the RL component."""
        return self.reward if self.advantage is None else self.advantage

    @property
    def opd_mask(self) -> NDArray[np.bool_]:
        """[response_tokens]: tokens of the distillation component; all False without a teacher."""
        return np.zeros(self.response_ids.size, np.bool_) if self.teacher is None else self.teacher.mask

    @property
    def asked_prompt_ids(self) -> NDArray[np.int32] | None:
        """[hinted_prompt_tokens] What the trainer's own teacher has still to read for it; None when nothing."""
        return None if self.teacher is None else self.teacher.asked_prompt_ids

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[response_tokens]: tokens of either component."""
        return self.rl_mask | self.opd_mask

    @property
    def has_signal(self) -> bool:
        """Whether it can have a gradient: an unmasked token with an advantage that is not 0, or a teacher."""
        return bool((self.rl_mask.any() and self.rl_advantage != 0.0) or self.opd_mask.any())

    @property
    def is_finite(self) -> bool:
        """Whether every number that a loss would use is finite."""
        if self.rl_mask.any() and not np.isfinite([self.reward, self.rl_advantage]).all():
            return False
        if not np.isfinite(self.behaviour_log_probs[self.mask]).all():
            return False
        if self.teacher is None:
            return True
        chosen = self.teacher.mask
        targets = [targets for targets in (self.teacher.top, self.teacher.support) if targets is not None]
        return bool(np.isfinite(self.teacher.log_probs[chosen]).all()) and all(
            np.isfinite(each.log_probs[chosen][each.ids[chosen] >= 0]).all() for each in targets
        )

    def without_tokens(self, masked: NDArray[np.bool_]) -> "TrainingSample":
        """The same sample, with the tokens of `masked` [response_tokens] in no component."""
        teacher = None if self.teacher is None else replace(self.teacher, mask=self.teacher.mask & ~masked)
        return replace(self, rl_mask=self.rl_mask & ~masked, teacher=teacher)

    def masked(self) -> "TrainingSample":
        """The same sample, with every token in no component: it counts nowhere."""
        return self.without_tokens(np.ones(self.response_ids.size, np.bool_))


class UnchangedReason(StrEnum):
    """Why a step left every weight as it was, bit for bit."""

    ALL_MASKED = "all_masked"
    """No sample has a token to train on."""
    ZERO_ADVANTAGE = "zero_advantage"
    """Every advantage is 0."""
    ZERO_GRADIENT = "zero_gradient"
    """Advantages exist, but the gradient is exactly 0 (all of it clipped)."""
    NON_FINITE = "non_finite"
    """A number of a sample, the loss or the gradient is NaN or infinite."""
    HELD = "held"
    """A guard found a measurement of the step beyond its limit."""


@dataclass(frozen=True, slots=True)
class SampleStatistics:
    """What a step saw of one sample. All 0 for a sample that was not computed."""

    loss: float
    """Its share of the batch's loss."""
    active_tokens: int
    """Tokens in the loss."""
    mean_absolute_shift: float
    """Mean over active tokens of |l_prox - mu|."""
    mean_entropy: float
    """Mean over active tokens of the policy's entropy at the sampling temperature, in nats."""
    clipped_share: float
    """Share of active tokens whose gradient the clip removed."""

    @property
    def measurements(self) -> dict[str, float]:
        """Under the names that the whole batch's have; empty for a sample that was not computed."""
        if self.active_tokens == 0:
            return {}
        return {
            "shift_mean_abs": self.mean_absolute_shift,
            "entropy_mean": self.mean_entropy,
            "clipped_share": self.clipped_share,
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a training step did."""

    changed: bool
    """Whether the weights changed."""
    unchanged_reason: UnchangedReason | None
    """Why they did not; None when they did."""
    metrics: Mapping[str, float]
    """Named measurements; see `services.trainer.metrics`."""
    samples: Mapping[str, SampleStatistics]
    """By sample id."""
    non_finite_samples: tuple[str, ...] = field(default=())
    """Samples to blame for `non_finite`, where single ones are."""
    dropped: Mapping[str, Breach] = field(default_factory=dict[str, Breach])
    """Sample id to why a guard left it out."""
    held: tuple[Breach, ...] = ()
    """Why a guard allowed no update, or none of the later parts of the batch."""
