"""One component of the policy-gradient kind: ratio, rejection, clip and weights, put together.

    L = sum over tokens of  weight(sample) * kept_t * clip(A_t, rho_t, w_t)

`weight` comes from `aggregation`, rho and w from `ratio`, kept from `rejection`, clip from `clip`.
"""

import torch

from services.trainer.algorithms.aggregation import sum_per_sample
from services.trainer.algorithms.base import ComponentLoss, TokenBatch
from services.trainer.algorithms.clip import clipped_surrogate
from services.trainer.algorithms.options import RatioOptions
from services.trainer.algorithms.ratio import LogProbs, ratios
from services.trainer.algorithms.rejection import kept_tokens


def at_sampling_temperature(batch: TokenBatch) -> LogProbs:
    """l, l_prox and mu."""
    return LogProbs(batch.log_probs, batch.proximal_log_probs, batch.behaviour_log_probs)


def at_unit_temperature(batch: TokenBatch) -> LogProbs:
    """l and l_prox at temperature 1 beside mu, which is of the distribution that was sampled: w moves from T_s to 1."""
    return LogProbs(batch.unit_log_probs, batch.unit_proximal_log_probs, batch.behaviour_log_probs)


def policy_gradient_component(
    advantages: torch.Tensor,  # [tokens]
    log_probs: LogProbs,
    mask: torch.Tensor,  # [tokens] bool
    batch: TokenBatch,
    weights: torch.Tensor,  # [samples]
    options: RatioOptions,
) -> ComponentLoss:
    """The module's L, split by sample."""
    ratio = ratios(log_probs, mask, batch.sample_of_token, batch.num_samples, options)
    kept = kept_tokens(
        advantages, at_sampling_temperature(batch), mask, batch.sample_of_token, batch.num_samples, options
    )
    surrogate = clipped_surrogate(advantages, ratio.rho, ratio.weight, options)
    sums = sum_per_sample(surrogate.loss, kept, batch.sample_of_token, batch.num_samples)
    return ComponentLoss(
        per_sample=sums * weights.to(sums.dtype),
        active=kept,
        rejected=mask & ~kept,
        clipped=surrogate.clipped & kept,
        capped=ratio.capped & kept,
        ratio=ratio.rho.detach(),
        advantages=advantages.detach(),
    )
