"""Estimates of KL(policy || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html), token by token.

    d = l - l_ref        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d
    low_var = k3 with d cut to +-20 and the result to +-10 (verl, slime)

As a loss, k2 has the gradient of the KL divergence on fresh samples; k1's is zero on average; k3's is that of the
reverse. They are offered because people compare with them.
"""

import torch

from services.trainer.algorithms.options import KlEstimator

_LARGEST_DIFFERENCE = 20.0
_LARGEST_ESTIMATE = 10.0


def kl_estimates(
    log_probs: torch.Tensor,  # [tokens], differentiable
    reference_log_probs: torch.Tensor,  # [tokens], constant
    estimator: KlEstimator,
) -> torch.Tensor:
    """[tokens] in nats; see the module's formulas."""
    difference = log_probs - reference_log_probs.detach()
    match estimator:
        case KlEstimator.K1:
            return difference
        case KlEstimator.K2:
            return difference.square() / 2
        case KlEstimator.K3:
            return torch.expm1(-difference) + difference
        case KlEstimator.LOW_VAR:
            difference = difference.clamp(-_LARGEST_DIFFERENCE, _LARGEST_DIFFERENCE)
            estimate = torch.expm1(-difference) + difference
            return estimate.clamp(-_LARGEST_ESTIMATE, _LARGEST_ESTIMATE)
