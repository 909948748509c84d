"""How token losses become a batch's loss: each token's loss times a weight that depends on masks alone.

With T_i the unmasked tokens of sample i, N samples that have any, and R rollouts that do, a token of sample i weighs

    sample_mean       1 / (N |T_i|)                             (original, slime; verl seq-mean-token-mean)
    token_mean        1 / sum_j |T_j|                           (DAPO, arXiv 2503.14476; verl token-mean)
    sample_sum        1 / N                                     (verl seq-mean-token-sum)
    sample_sum_norm   1 / (N C), C a constant                   (Dr. GRPO, arXiv 2503.20783)
    rollout_mean      1 / (R sum of |T_j| over i's rollout)     (agent-lightning: a rollout of many turns weighs as one)

Tokens that off-policy control leaves out stay in the counts, so that a batch of much stale data makes a small step.
"""

import torch

from services.trainer.algorithms.options import AggregationMode, AggregationOptions


def sample_weights(
    mask: torch.Tensor,  # [tokens] bool
    sample_of_token: torch.Tensor,  # [tokens] int64
    rollout_of_sample: torch.Tensor,  # [samples] int64
    options: AggregationOptions,
) -> torch.Tensor:
    """[samples] float64: the weight of a token of each sample of the whole batch; 0 for samples without tokens."""
    zeros = torch.zeros(rollout_of_sample.numel(), dtype=torch.float64, device=mask.device)
    tokens = zeros.index_add(0, sample_of_token, mask.double())  # [samples]
    members = tokens > 0
    num_samples = members.sum().clamp(min=1)
    match options.aggregation:
        case AggregationMode.SAMPLE_MEAN:
            weights = 1 / (num_samples * tokens.clamp(min=1))
        case AggregationMode.TOKEN_MEAN:
            weights = torch.ones_like(tokens) / tokens.sum().clamp(min=1)
        case AggregationMode.SAMPLE_SUM:
            weights = torch.ones_like(tokens) / num_samples
        case AggregationMode.SAMPLE_SUM_NORM:
            assert options.aggregation_norm_tokens is not None  # the options see to it
            weights = torch.ones_like(tokens) / (num_samples * options.aggregation_norm_tokens)
        case AggregationMode.ROLLOUT_MEAN:
            of_rollout = tokens.new_zeros(int(rollout_of_sample.max()) + 1)  # [rollouts]
            of_rollout = of_rollout.index_add(0, rollout_of_sample, tokens)
            weights = 1 / ((of_rollout > 0).sum().clamp(min=1) * of_rollout[rollout_of_sample].clamp(min=1))
    return torch.where(members, weights, 0.0)


def sum_per_sample(
    values: torch.Tensor,  # [tokens]
    mask: torch.Tensor,  # [tokens] bool
    sample_of_token: torch.Tensor,  # [tokens] int64
    num_samples: int,
) -> torch.Tensor:
    """[samples]: sum of `values` over each sample's tokens in `mask`. What is masked cannot reach it, NaN included."""
    return values.new_zeros(num_samples).index_add(0, sample_of_token, torch.where(mask, values, 0.0))


def mean_per_sample(
    values: torch.Tensor, mask: torch.Tensor, sample_of_token: torch.Tensor, num_samples: int
) -> torch.Tensor:
    """[samples]: mean of `values` over each sample's tokens in `mask`; 0 where it has none. Shapes as above."""
    counts = sum_per_sample(torch.ones_like(values), mask, sample_of_token, num_samples)
    return sum_per_sample(values, mask, sample_of_token, num_samples) / counts.clamp(min=1)
