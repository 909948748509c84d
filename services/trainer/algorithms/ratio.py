"""The ratio rho that a step is bounded by, and the weight w of data that other weights sampled.

    decoupled    rho = exp(l - l_prox)    w = min(exp(l_prox - mu), cap)    (arXiv 2110.00641; AReaL, arXiv 2505.24298)
    behaviour    rho = exp(l - mu)        w = 1                             (PPO, arXiv 1707.06347)
    recomputed   rho = exp(l - l_prox)    w = 1                             (OpenClaw-RL: with one update always 1)

l_prox and mu are constants. With level `sequence` each difference is first replaced by its mean over the answer's
tokens (GSPO, arXiv 2507.18071): one ratio for all of them.
"""

from dataclasses import dataclass

import torch

from services.trainer.algorithms.aggregation import mean_per_sample
from services.trainer.algorithms.options import Level, RatioMode, RatioOptions

LARGEST_LOG_RATIO = 20.0
"""exp of more would overflow the loss; as in verl."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Of the sampled ids under three policies, at one temperature for the first two. All [tokens]."""

    current: torch.Tensor
    """Differentiable."""
    proximal: torch.Tensor
    """At the start of the batch; constant."""
    behaviour: torch.Tensor
    """Of the distribution that was sampled; constant."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """All [tokens]."""

    rho: torch.Tensor
    """Differentiable."""
    weight: torch.Tensor
    """w; constant."""
    capped: torch.Tensor
    """Bool: where w was cut to its cap."""


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, with arguments cut at LARGEST_LOG_RATIO."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def ratios(
    log_probs: LogProbs,
    mask: torch.Tensor,  # [tokens] bool
    sample_of_token: torch.Tensor,  # [tokens] int64
    num_samples: int,
    options: RatioOptions,
) -> Ratio:
    """rho and w of every token; see the module's formulas."""
    proximal = log_probs.proximal.detach()
    behaviour = log_probs.behaviour.detach()

    def leveled(difference: torch.Tensor) -> torch.Tensor:
        if options.ratio_level is Level.TOKEN:
            return difference
        return mean_per_sample(difference, mask, sample_of_token, num_samples)[sample_of_token]

    against = behaviour if options.ratio is RatioMode.BEHAVIOUR else proximal
    rho = bounded_exp(leveled(log_probs.current - against))
    if options.ratio is not RatioMode.DECOUPLED:
        return Ratio(rho, torch.ones_like(proximal), torch.zeros_like(mask))
    weight = bounded_exp(leveled(proximal - behaviour))
    return Ratio(rho, weight.clamp(max=options.behaviour_weight_cap), weight > options.behaviour_weight_cap)
