# pyright: basic
# Reason: torch's stubs are partial.
"""From samples and what the policy says about them to the tensors that a loss sees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.trainer.algorithms.base import GivenIds, Needs, TokenBatch
from services.trainer.algorithms.options import IdSource
from services.trainer.given_ids import given_ids
from services.trainer.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class PolicyOutputs:
    """What a forward pass says about the response tokens of a row, end to end."""

    log_probs: torch.Tensor
    """[tokens] of the sampled ids, at each sample's temperature."""
    entropies: torch.Tensor
    """[tokens] in nats, at each sample's temperature."""
    unit_log_probs: torch.Tensor
    """[tokens] of the sampled ids at temperature 1; empty where the algorithm needs none."""
    given_log_probs: torch.Tensor
    """[tokens, k] of further ids at temperature 1; empty where the algorithm needs none."""

    def constant(self) -> "PolicyOutputs":
        """The same numbers without a gradient."""
        return PolicyOutputs(
            self.log_probs.detach(),
            self.entropies.detach(),
            self.unit_log_probs.detach(),
            self.given_log_probs.detach(),
        )


def mask_batch(
    samples: Sequence[TrainingSample], *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> TokenBatch:
    """The samples' tokens end to end, with masks and advantages only: every log-prob is empty."""
    numbers: dict[str, int] = {}
    rollouts = [
        numbers.setdefault(sample.rollout_id or f"/{place}", len(numbers)) for place, sample in enumerate(samples)
    ]
    lengths = [sample.response_ids.size for sample in samples]
    empty = torch.empty(0, dtype=dtype, device=device)
    return TokenBatch(
        log_probs=empty,
        proximal_log_probs=empty,
        behaviour_log_probs=empty,
        sample_of_token=torch.as_tensor(np.repeat(np.arange(len(samples)), lengths), device=device),
        advantages=torch.as_tensor([sample.rl_advantage for sample in samples], device=device, dtype=dtype),
        rl_mask=torch.as_tensor(np.concatenate([sample.rl_mask for sample in samples]), device=device),
        opd_mask=torch.as_tensor(np.concatenate([sample.opd_mask for sample in samples]), device=device),
        rollout_of_sample=torch.as_tensor(rollouts, device=device),
        teacher_log_probs=empty,
        unit_log_probs=empty,
        unit_proximal_log_probs=empty,
        entropies=empty,
    )


def token_batch(
    samples: Sequence[TrainingSample], outputs: PolicyOutputs, proximal: PolicyOutputs, needs: Needs
) -> TokenBatch:
    """The tokens of a row: `outputs` of the current policy, `proximal` of the one at the start of the batch."""
    device, dtype = outputs.log_probs.device, outputs.log_probs.dtype
    masks = np.concatenate([sample.mask for sample in samples])
    behaviour = np.concatenate([sample.behaviour_log_probs for sample in samples])
    teacher = np.concatenate(
        [
            np.zeros(sample.response_ids.size)
            if sample.teacher is None
            else np.where(sample.teacher.mask, sample.teacher.log_probs, 0.0)
            for sample in samples
        ]
    )
    given = None
    if needs.ids is not IdSource.NONE:
        wanted = given_ids(samples, needs.ids, needs.ids_per_token)
        given = GivenIds(
            log_probs=outputs.given_log_probs,
            proximal_log_probs=proximal.given_log_probs,
            teacher_log_probs=torch.as_tensor(wanted.teacher_log_probs, device=device, dtype=dtype),
            mask=torch.as_tensor(wanted.ids >= 0, device=device),
        )
    return replace(
        mask_batch(samples, device=device, dtype=dtype),
        log_probs=outputs.log_probs,
        proximal_log_probs=proximal.log_probs,
        # A masked token's number is never used; 0 keeps a NaN in it from reaching the gradient as 0 * NaN.
        behaviour_log_probs=torch.as_tensor(np.where(masks, behaviour, 0.0), device=device, dtype=dtype),
        teacher_log_probs=torch.as_tensor(teacher, device=device, dtype=dtype),
        unit_log_probs=outputs.unit_log_probs,
        unit_proximal_log_probs=proximal.unit_log_probs,
        entropies=outputs.entropies,
        given=given,
    )
