"""On-policy distillation: a teacher who has read the hint says, token by token, what it would have answered.

    A_t   = l_T - l1_prox                                         optionally bounded: |A_t| <= advantage_clip
    L     = 1/N * sum over samples of (mean over the sample's unmasked tokens of clip(A_t, rho1_t, w1_t))
    rho1  = exp(l1 - l1_prox),   w1 = min(exp(l1_prox - mu), 2)

l1 is the policy and l_T the teacher, both at temperature 1; mu is of the distribution that was sampled, at T_s. N
counts the samples of the whole batch that have a teacher's signal. On samples of mu, without clip and cap,

    E[gradient of L] = -E_{a ~ p1}[(l_T - l1) gradient of l1] = gradient of KL(p1 || p_T):

what is descended is the divergence at temperature 1, although the data was sampled at T_s. OpenClaw-RL
(arXiv 2603.10165) takes A_t = l_T at temperature 1 minus l_old at T_s, so that even an identical teacher teaches.
With ratio `behaviour` rho1 = exp(l1 - mu) holds the change of temperature too, and the clip cuts that as well.
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
from services.trainer.algorithms.options import AggregationOptions, DistillationOptions
from services.trainer.algorithms.policy_gradient import at_unit_temperature, policy_gradient_component
from services.trainer.algorithms.regularisation import regularisation, regularisation_weights

OPD = "opd"
"""Name of the component."""


def opd_weights(batch: TokenBatch, options: AggregationOptions) -> torch.Tensor:
    """[samples]: weights of the distillation component."""
    return sample_weights(batch.opd_mask, batch.sample_of_token, batch.rollout_of_sample, options)


def opd_signal(batch: TokenBatch) -> torch.Tensor:
    """[samples] bool: a token with a teacher's signal."""
    return samples_with_tokens(batch.opd_mask, batch.sample_of_token, batch.num_samples)


def bounded(advantages: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Advantages cut to [-limit, limit]; any shape."""
    return advantages if limit is None else advantages.clamp(-limit, limit)


def opd_component(batch: TokenBatch, weights: torch.Tensor, options: DistillationOptions) -> ComponentLoss:
    """The module's L, split by sample; `weights` is [samples]."""
    advantages = bounded((batch.teacher_log_probs - batch.unit_proximal_log_probs).detach(), options.advantage_clip)
    return policy_gradient_component(advantages, at_unit_temperature(batch), batch.opd_mask, batch, weights, options)


class Opd:
    """See the module's docstring."""

    components = (OPD,)

    def __init__(self, **options: object) -> None:
        """Options are `DistillationOptions`. Raises ValueError for others."""
        self._options = DistillationOptions.model_validate(options)

    @property
    def needs(self) -> Needs:
        """Temperature 1."""
        return needs_of(self._options, unit_temperature=True)

    def sample_weights(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """One component, `opd`: samples with a teacher's signal."""
        weights = {OPD: opd_weights(batch, self._options)}
        return weights | regularisation_weights(batch, batch.opd_mask, self._options)

    def has_signal(self, batch: TokenBatch) -> torch.Tensor:
        """[samples] bool: a token with a teacher's signal."""
        return opd_signal(batch)

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        """The module's L, split by sample."""
        component = opd_component(batch, weights[OPD], self._options)
        return AlgorithmLoss({OPD: component}, regularisation(batch, batch.opd_mask, weights, self._options))
