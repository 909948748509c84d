"""Binary RL: the judge's verdict is the advantage of every token of the answer.

    A_t  = r                                                     r in {-1, 0, +1}, any reward, or a group's advantage
    L    = 1/N * sum over samples of (mean over the sample's unmasked tokens of clip(A_t, rho_t, w_t))
    rho  = exp(l - l_prox),   w = min(exp(l_prox - mu), 2)       all at the sampling temperature

N counts the samples of the whole batch, on all ranks, that have an unmasked token. A reward of 0 counts in N and
gives no gradient. Source: OpenClaw-RL (arXiv 2603.10165, binary RL), whose ratio is always 1 because it recomputes
l_old; w is the decoupled correction for stale data. Other ratios, masks and means by option: `ratio`, `rejection`,
`aggregation`.
"""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.aggregation import sample_weights
from services.trainer.algorithms.base import (
    AlgorithmLoss,
    ComponentLoss,
    Needs,
    TokenBatch,
    needs_of,
    samples_with_tokens,
)
from services.trainer.algorithms.options import BinaryOptions, RatioOptions
from services.trainer.algorithms.policy_gradient import at_sampling_temperature, policy_gradient_component
from services.trainer.algorithms.regularisation import regularisation, regularisation_weights

RL = "rl"
"""Name of the component."""


def rl_weights(batch: TokenBatch, options: RatioOptions) -> torch.Tensor:
    """[samples]: weights of the RL component."""
    return sample_weights(batch.rl_mask, batch.sample_of_token, batch.rollout_of_sample, options)


def rl_signal(batch: TokenBatch) -> torch.Tensor:
    """[samples] bool: an unmasked token and an advantage that is not 0."""
    members = samples_with_tokens(batch.rl_mask, batch.sample_of_token, batch.num_samples)
    return members & (batch.advantages != 0)


def rl_component(batch: TokenBatch, weights: torch.Tensor, options: RatioOptions) -> ComponentLoss:
    """The module's L, split by sample; `weights` is [samples]."""
    return policy_gradient_component(
        batch.advantages[batch.sample_of_token],
        at_sampling_temperature(batch),
        batch.rl_mask,
        batch,
        weights,
        options,
    )


class Binary:
    """See the module's docstring."""

    components = (RL,)

    def __init__(self, **options: object) -> None:
        """Options are `BinaryOptions`. Raises ValueError for others."""
        self._options = BinaryOptions.model_validate(options)

    @property
    def needs(self) -> Needs:
        """Nothing beside the base; see `Needs`."""
        return needs_of(self._options)

    def sample_weights(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """One component, `rl`: samples with an unmasked token."""
        weights = {RL: rl_weights(batch, self._options)}
        return weights | regularisation_weights(batch, batch.rl_mask, self._options)

    def has_signal(self, batch: TokenBatch) -> torch.Tensor:
        """[samples] bool: an unmasked token and an advantage that is not 0."""
        return rl_signal(batch)

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        """The module's L, split by sample."""
        component = rl_component(batch, weights[RL], self._options)
        return AlgorithmLoss({RL: component}, regularisation(batch, batch.rl_mask, weights, self._options))
