"""What a step trains on, and what it answers: plain data, no Kafka and no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


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

    def __post_init__(self) -> None:
        lengths = {"behaviour_log_probs": self.behaviour_log_probs.shape, "rl_mask": self.rl_mask.shape}
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
    def is_finite(self) -> bool:
        """Whether every number that the loss would use is finite."""
        if not self.rl_mask.any():
            return True
        return bool(np.isfinite(self.reward) and np.isfinite(self.behaviour_log_probs[self.rl_mask]).all())


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
