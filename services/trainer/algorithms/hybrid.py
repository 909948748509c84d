"""Hybrid: the reward on the sampled token, and the teacher on the few ids that the policy itself thinks of.

    S_t  = the K likeliest ids of the policy that sampled (option `support`: the teacher's, or the overlap)
    w_v  = softmax over S_t of l1_prox(v),   d_v = l_T(v) - l1_prox(v) cut to +-c,   A_v = w_v d_v
    L_opd,t = sum over v in S_t of max(-A_v rho_v, -A_v clip(rho_v, 0.8, 1.28)),   rho_v = exp(l1(v) - l1_prox(v))
    L    = rl_coefficient * L_rl + opd_coefficient * (1/N * sum over samples of (mean over unmasked tokens of L_opd,t))

All at temperature 1; K = 4, c = 1. L_rl is that of `binary`; each component has its own N. There is no weight against
the behaviour policy in L_opd: the sum over S_t is an expectation under the policy itself, so only prefixes are stale.
What masks by age or distance leave out of an answer (`rejection`) is left out here too, by the sampled ids.

Source: OpenClaw-RL after its first release (`openclaw_topk_select_loss`). There S_t is taken from l_old over the whole
vocabulary, with policy and teacher in one place; here the ids come with the sample: the engine's likeliest ids when it
sampled, at which the teacher then gave its log-probs.
"""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.aggregation import sum_per_sample
from services.trainer.algorithms.base import AlgorithmLoss, ComponentLoss, Needs, TokenBatch, needs_of
from services.trainer.algorithms.binary import RL, rl_component, rl_signal, rl_weights
from services.trainer.algorithms.clip import clipped_surrogate
from services.trainer.algorithms.opd import OPD, bounded, opd_signal, opd_weights
from services.trainer.algorithms.options import HybridOptions
from services.trainer.algorithms.policy_gradient import at_sampling_temperature
from services.trainer.algorithms.ratio import bounded_exp
from services.trainer.algorithms.regularisation import regularisation, regularisation_weights
from services.trainer.algorithms.rejection import kept_tokens


class Hybrid:
    """See the module's docstring."""

    components = (RL, OPD)

    def __init__(self, **options: object) -> None:
        """Options are `HybridOptions`. Raises ValueError for others."""
        self._options = HybridOptions.model_validate(options)

    @property
    def needs(self) -> Needs:
        """The policy at the support's ids."""
        return needs_of(self._options, ids=self._options.support, ids_per_token=self._options.support_size)

    def sample_weights(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """`rl`: samples with a reward. `opd`: samples with a teacher's signal."""
        either = batch.rl_mask | batch.opd_mask
        weights = {RL: rl_weights(batch, self._options), OPD: opd_weights(batch, self._options)}
        return weights | regularisation_weights(batch, either, self._options)

    def has_signal(self, batch: TokenBatch) -> torch.Tensor:
        """[samples] bool: an advantage that is not 0, or a teacher's signal."""
        return rl_signal(batch) | opd_signal(batch)

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        """The module's L, split by sample."""
        options = self._options
        components = {
            RL: rl_component(batch, weights[RL], options).times(options.rl_coefficient),
            OPD: self._distillation(batch, weights[OPD]).times(options.opd_coefficient),
        }
        either = batch.rl_mask | batch.opd_mask
        return AlgorithmLoss(components, regularisation(batch, either, weights, options))

    def _distillation(self, batch: TokenBatch, weights: torch.Tensor) -> ComponentLoss:
        assert batch.given is not None  # `needs` asked for it
        given, options = batch.given, self._options
        exists = given.mask  # [tokens, k]
        proximal = torch.where(exists, given.proximal_log_probs.detach(), 0.0)
        current = torch.where(exists, given.log_probs, 0.0)
        teacher = torch.where(exists, given.teacher_log_probs.detach(), 0.0)
        share = torch.where(exists, proximal, -torch.inf).softmax(1).nan_to_num(0.0)  # a token may have no id at all
        advantages = share * bounded(teacher - proximal, options.advantage_clip)  # [tokens, k]
        rho = bounded_exp(current - proximal)
        surrogate = clipped_surrogate(advantages, rho, torch.ones_like(rho), options)
        total = advantages.sum(1)  # [tokens]
        kept = kept_tokens(
            total,
            at_sampling_temperature(batch),
            batch.opd_mask,
            batch.sample_of_token,
            batch.num_samples,
            options,
        )
        sums = sum_per_sample(
            torch.where(exists, surrogate.loss, 0.0).sum(1), kept, batch.sample_of_token, batch.num_samples
        )
        return ComponentLoss(
            per_sample=sums * weights.to(sums.dtype),
            active=kept,
            rejected=batch.opd_mask & ~kept,
            clipped=(surrogate.clipped | ~exists).all(1) & exists.any(1) & kept,
            capped=torch.zeros_like(kept),
            ratio=(rho.detach() * share).sum(1),
            advantages=total,
        )
