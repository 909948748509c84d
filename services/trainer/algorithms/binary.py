"""Binary RL: the judge's verdict is the advantage of every token of the answer.

    A_t  = r                                                     r in {-1, 0, +1}, or any reward in [-1, 1]
    L    = 1/N * sum over samples of (mean over the sample's unmasked tokens of clip(A_t, rho_t, w_t))
    rho  = exp(l - l_prox),   w = min(exp(l_prox - mu), 2)       all at the sampling temperature

N counts the samples of the whole batch, on all ranks, that have an unmasked token. A reward of 0 counts in N and
gives no gradient. Source: OpenClaw-RL (arXiv 2603.10165, binary RL), whose ratio is always 1 because it recomputes
l_old; w is the decoupled correction for stale data (see `clip`).
"""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.base import (
    AlgorithmLoss,
    TokenBatch,
    samples_with_tokens,
    token_mean_per_sample,
)
from services.trainer.algorithms.clip import ClipSettings, clipped_surrogate


class Binary:
    """See the module's docstring."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28, behaviour_weight_cap: float = 2.0) -> None:
        self._clip = ClipSettings(clip_low, clip_high, behaviour_weight_cap)

    def component_samples(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
        """One component, `rl`: samples with an unmasked token."""
        return {"rl": samples_with_tokens(tokens.rl_mask, tokens.sample_of_token, tokens.rewards.numel())}

    def has_signal(self, tokens: TokenBatch) -> torch.Tensor:
        """[samples] bool: an unmasked token and a reward that is not 0."""
        return self.component_samples(tokens)["rl"] & (tokens.rewards != 0)

    def loss(self, tokens: TokenBatch, num_samples: Mapping[str, int]) -> AlgorithmLoss:
        """The module's L, split by sample."""
        surrogate = clipped_surrogate(
            tokens.rewards[tokens.sample_of_token],
            tokens.log_probs,
            tokens.proximal_log_probs,
            tokens.behaviour_log_probs,
            self._clip,
        )
        means = token_mean_per_sample(surrogate.loss, tokens.rl_mask, tokens.sample_of_token, tokens.rewards.numel())
        return AlgorithmLoss(
            per_sample=means / max(1, num_samples["rl"]),
            active=tokens.rl_mask,
            clipped=surrogate.clipped & tokens.rl_mask,
            ratio=surrogate.ratio,
            capped=surrogate.capped,
        )
