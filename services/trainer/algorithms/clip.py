"""The clipped surrogate that every component uses, and the truncated weight of stale data.

    clip(A, rho, w) = w * max(-rho * A, -clip(rho, 1 - clip_low, 1 + clip_high) * A)

PPO (arXiv 1707.06347) with DAPO's separate upper bound (arXiv 2503.14476, 0.2 and 0.28), times the weight of the
decoupled objective (arXiv 2110.00641; AReaL, arXiv 2505.24298): w = min(exp(l_prox - mu), cap), which corrects for
behaviour log-probs mu of older weights while rho, against l_prox, bounds the size of the step.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """Bounds of the surrogate."""

    clip_low: float = 0.2
    """rho is cut below 1 - clip_low where that lowers the gain."""
    clip_high: float = 0.28
    """rho is cut above 1 + clip_high where that lowers the gain."""
    behaviour_weight_cap: float = 2.0
    """Largest weight of a token against the policy that sampled it."""


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """The surrogate per token, with what the metrics need. All [tokens]."""

    loss: torch.Tensor
    """Differentiable through rho."""
    clipped: torch.Tensor
    """Where the cut bound is the active one: the token gives no gradient."""
    ratio: torch.Tensor
    """rho, detached."""
    capped: torch.Tensor
    """Where w was cut to its cap."""


def clipped_surrogate(
    advantages: torch.Tensor,  # [tokens]
    log_probs: torch.Tensor,  # [tokens], differentiable
    proximal_log_probs: torch.Tensor,  # [tokens], the policy at the start of the batch
    behaviour_log_probs: torch.Tensor,  # [tokens], the policy that sampled
    settings: ClipSettings,
) -> ClippedSurrogate:
    """clip(A, rho, w) for every token; see the module's formula."""
    proximal = proximal_log_probs.detach()
    weight = torch.exp(proximal - behaviour_log_probs)
    ratio = torch.exp(log_probs - proximal)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    return ClippedSurrogate(
        loss=weight.clamp(max=settings.behaviour_weight_cap) * torch.maximum(free, bounded),
        clipped=(bounded > free).detach(),
        ratio=ratio.detach(),
        capped=weight > settings.behaviour_weight_cap,
    )
