"""What holds the policy back, on every unmasked token whatever its component.

    R = sum over tokens of weight(sample) * (kl_coefficient * k(l, l_ref) - entropy_coefficient * H)

k is an estimate of `kl` and H the entropy, both at the sampling temperature; `weight` is that of a component of all
unmasked tokens. l_ref is the base model's, or l_prox.
"""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.aggregation import sample_weights, sum_per_sample
from services.trainer.algorithms.base import TokenBatch
from services.trainer.algorithms.kl import kl_estimates
from services.trainer.algorithms.options import AggregationOptions

_NAME = "regularisation"
"""Of its weights among those of the components."""


def regularisation_weights(
    batch: TokenBatch,
    mask: torch.Tensor,  # [tokens] bool
    options: AggregationOptions,
) -> dict[str, torch.Tensor]:
    """To be added to a loss's `sample_weights`; empty when it is off."""
    if not options.is_regularised:
        return {}
    return {_NAME: sample_weights(mask, batch.sample_of_token, batch.rollout_of_sample, options)}


def regularisation(
    batch: TokenBatch,
    mask: torch.Tensor,  # [tokens] bool
    weights: Mapping[str, torch.Tensor],
    options: AggregationOptions,
) -> torch.Tensor:
    """[samples]: the module's R, split by sample; zeros when it is off."""
    values = torch.zeros_like(batch.log_probs)
    if options.kl_coefficient > 0:
        base = options.kl_reference == "base"
        reference = batch.reference_log_probs if base else batch.proximal_log_probs
        if reference is None:
            raise ValueError("the KL divergence from the base model needs its log-probs (`Needs.reference`)")
        values = values + options.kl_coefficient * kl_estimates(batch.log_probs, reference, options.kl_estimator)
    if options.entropy_coefficient > 0:
        values = values - options.entropy_coefficient * batch.entropies
    sums = sum_per_sample(values, mask, batch.sample_of_token, batch.num_samples)
    return sums * weights[_NAME].to(sums.dtype) if options.is_regularised else sums
