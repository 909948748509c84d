"""Which tokens are left out because the policy has moved too far from the one that sampled them.

All of it compares log-probs at the sampling temperature, for both components: the distance is about age and about
differences between engines, not about temperature. Tokens that are left out stay in the denominators.

    IcePop (arXiv 2510.18855)   keep a token where low <= exp(l_prox - mu) <= high
    OPSM (DeepSeek-V3.2)        leave out tokens with A < 0 of answers with mean_t(mu - l) > delta
    geometric                   keep an answer where low <= exp(mean_t(l_prox - mu)) <= high
    sum                         keep an answer where low <= exp(sum_t(l_prox - mu)) <= high

OPSM measures against mu as its authors do; against log-probs recomputed at the start of the batch, as slime does by
default, it could never see stale data.
"""

import math

import torch

from services.trainer.algorithms.aggregation import mean_per_sample, sum_per_sample
from services.trainer.algorithms.options import RatioOptions, SequenceBound
from services.trainer.algorithms.ratio import LogProbs


def kept_tokens(
    advantages: torch.Tensor,  # [tokens]
    log_probs: LogProbs,  # at the sampling temperature
    mask: torch.Tensor,  # [tokens] bool
    sample_of_token: torch.Tensor,  # [tokens] int64
    num_samples: int,
    options: RatioOptions,
) -> torch.Tensor:
    """[tokens] bool: tokens of `mask` that no rule leaves out."""
    stale = (log_probs.proximal - log_probs.behaviour).detach()  # [tokens]
    kept = mask & _within(stale, options.icepop_low, options.icepop_high)
    if options.opsm_delta is not None:
        lost = mean_per_sample(
            (log_probs.behaviour - log_probs.current).detach(), mask, sample_of_token, num_samples
        )  # [samples]
        kept = kept & ~((advantages < 0) & (lost > options.opsm_delta)[sample_of_token])
    if options.sequence_rejection is not None:
        summed = options.sequence_rejection is SequenceBound.SUM
        distance = (sum_per_sample if summed else mean_per_sample)(stale, mask, sample_of_token, num_samples)
        within = _within(distance, options.sequence_rejection_low, options.sequence_rejection_high)
        kept = kept & within[sample_of_token]
    return kept


def _within(log_ratio: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Bool: low <= exp(log_ratio) <= high; compared as logarithms, which cannot overflow."""
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    if low is not None and low > 0:
        kept = kept & (log_ratio >= math.log(low))
    if high is not None:
        kept = kept & (log_ratio <= math.log(high))
    return kept
