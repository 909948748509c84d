"""Both: the verdict as a reward, the hint as a target; each clipped and averaged by itself.

    L = rl_coefficient * L_rl + opd_coefficient * L_opd           L_rl of `binary`, L_opd of `opd`

Each component divides by its own global number of samples: a turn that has only a hint does not dilute the mean of
the rewards, nor the reverse. A sample without a teacher has no token in L_opd, and one without a reward none in L_rl.

Option `summed`, the original's (OpenClaw-RL, arXiv 2603.10165, `combine_loss`), for comparison:

    A_t = rl_coefficient * r + opd_coefficient * (l_T - l_prox)   over the samples that have either
    L   = 1/N * sum over samples of (mean over unmasked tokens of clip(A_t, rho_t, w_t))     all at T_s, except l_T

It differs from the original in one thing: a sample without a teacher has no distillation term, where the original's
has the noise mu - l_old. Its teacher and its policy are at different temperatures, so it is biased at T_s other than 1.
"""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.aggregation import sample_weights
from services.trainer.algorithms.base import AlgorithmLoss, ComponentLoss, Needs, TokenBatch, needs_of
from services.trainer.algorithms.binary import RL, rl_component, rl_signal, rl_weights
from services.trainer.algorithms.opd import OPD, bounded, opd_component, opd_signal, opd_weights
from services.trainer.algorithms.options import CombineOptions
from services.trainer.algorithms.policy_gradient import at_sampling_temperature, policy_gradient_component
from services.trainer.algorithms.regularisation import regularisation, regularisation_weights

SUMMED = "summed"
"""Name of the one component of the summed form."""


class Combine:
    """See the module's docstring."""

    def __init__(self, **options: object) -> None:
        """Options are `CombineOptions`. Raises ValueError for others."""
        self._options = CombineOptions.model_validate(options)

    @property
    def components(self) -> tuple[str, ...]:
        """`rl` and `opd`, or `summed`."""
        return (SUMMED,) if self._options.summed else (RL, OPD)

    @property
    def needs(self) -> Needs:
        """Temperature 1, except for the summed form."""
        return needs_of(self._options, unit_temperature=not self._options.summed)

    def sample_weights(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """`rl`: samples with a reward. `opd`: samples with a teacher's signal. `summed`: samples with either."""
        options = self._options
        either = batch.rl_mask | batch.opd_mask
        if options.summed:
            weights = {SUMMED: sample_weights(either, batch.sample_of_token, batch.rollout_of_sample, options)}
        else:
            weights = {RL: rl_weights(batch, options), OPD: opd_weights(batch, options)}
        return weights | regularisation_weights(batch, either, options)

    def has_signal(self, batch: TokenBatch) -> torch.Tensor:
        """[samples] bool: an advantage that is not 0, or a teacher's signal."""
        return rl_signal(batch) | opd_signal(batch)

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        """The module's L, split by sample."""
        options = self._options
        if options.summed:
            components = {SUMMED: self._summed(batch, weights[SUMMED])}
        else:
            components = {
                RL: rl_component(batch, weights[RL], options).times(options.rl_coefficient),
                OPD: opd_component(batch, weights[OPD], options).times(options.opd_coefficient),
            }
        either = batch.rl_mask | batch.opd_mask
        return AlgorithmLoss(components, regularisation(batch, either, weights, options))

    def _summed(self, batch: TokenBatch, weights: torch.Tensor) -> ComponentLoss:
        options = self._options
        rewards = torch.where(batch.rl_mask, batch.advantages[batch.sample_of_token], 0.0)
        distance = (batch.teacher_log_probs - batch.proximal_log_probs).detach()
        distance = torch.where(batch.opd_mask, bounded(distance, options.advantage_clip), 0.0)
        return policy_gradient_component(
            options.rl_coefficient * rewards + options.opd_coefficient * distance,
            at_sampling_temperature(batch),
            batch.rl_mask | batch.opd_mask,
            batch,
            weights,
            options,
        )
