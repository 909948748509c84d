"""The clipped surrogate that every component uses.

    clip(A, rho, w) = w * max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A)
    with dual clip c, where A < 0:  clip(A, rho, w) = w * min(-c A, the same)

PPO (arXiv 1707.06347) with DAPO's separate upper bound (arXiv 2503.14476, 0.2 and 0.28), dual clip (arXiv 1912.09729).
"""

from dataclasses import dataclass

import torch

from services.trainer.algorithms.options import RatioOptions


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """The surrogate; shapes as the advantages."""

    loss: torch.Tensor
    """Differentiable through rho."""
    clipped: torch.Tensor
    """Bool: where a bound is the active one, so that there is no gradient."""


def clipped_surrogate(
    advantages: torch.Tensor,  # any shape
    rho: torch.Tensor,  # the same, differentiable
    weight: torch.Tensor,  # the same, constant
    options: RatioOptions,
) -> ClippedSurrogate:
    """clip(A, rho, w) element by element; see the module's formula."""
    free = -rho * advantages
    bounded = -rho.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if options.dual_clip is not None:
        ceiling = -options.dual_clip * advantages
        cut = (advantages < 0) & (loss > ceiling)
        loss = torch.where(cut, ceiling, loss)
        clipped = clipped | cut
    return ClippedSurrogate(weight * loss, clipped.detach())
