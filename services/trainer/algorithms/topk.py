"""Top-K distillation: the whole distribution of every token, as far as the teacher tells it.

    bins of a token  = the teacher's K likeliest ids, and one tail bin for all others
    log p(tail)      = log(1 - exp(min(logsumexp over the K of log p, -1e-7)))           on both sides
    loss_t           = sum over bins of p(bin) (log p(bin) - log p_T(bin))               reverse KL
    L                = 1/N * sum over samples of (mean over the sample's unmasked tokens of loss_t)

p is the policy at temperature 1, differentiable as a whole; N counts the samples of the whole batch that have a
teacher's signal. No ratio and no clip: the sum over bins is the expectation itself, not an estimate from the sampled
id, so only the prefixes are stale. By the log-sum inequality loss_t never exceeds the divergence over the whole
vocabulary. Source: OpenClaw-RL (arXiv 2603.10165, `topk_distillation_loss`, K = 50).
"""

from collections.abc import Mapping

import torch

from services.trainer.algorithms.aggregation import sum_per_sample
from services.trainer.algorithms.base import AlgorithmLoss, ComponentLoss, GivenIds, Needs, TokenBatch, needs_of
from services.trainer.algorithms.opd import OPD, opd_signal, opd_weights
from services.trainer.algorithms.options import IdSource, TopKOptions
from services.trainer.algorithms.regularisation import regularisation, regularisation_weights

_LARGEST_LOG_SUM = -1e-7
"""Keeps the tail's probability above 0 where rounding brings the K ids' to 1."""


def tail_log_prob(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[tokens]: log-prob of all ids but those of `log_probs` [tokens, k], of which `mask` [tokens, k] exist."""
    inside = torch.where(mask, log_probs, -torch.inf).logsumexp(1)
    inside = torch.where(inside > _LARGEST_LOG_SUM, torch.full_like(inside, _LARGEST_LOG_SUM), inside)
    return torch.log(-torch.expm1(inside))


def reverse_kl(given: GivenIds) -> torch.Tensor:
    """[tokens]: the module's loss_t in nats; differentiable. Tokens need at least one id."""
    bins = torch.cat([given.log_probs, tail_log_prob(given.log_probs, given.mask)[:, None]], dim=1)  # [tokens, k + 1]
    teacher = given.teacher_log_probs.detach()
    teacher = torch.cat([teacher, tail_log_prob(teacher, given.mask)[:, None]], dim=1)
    exists = torch.cat([given.mask, torch.ones_like(given.mask[:, :1])], dim=1)
    bins, teacher = torch.where(exists, bins, 0.0), torch.where(exists, teacher, 0.0)
    return torch.where(exists, bins.exp() * (bins - teacher), 0.0).sum(1)


class TopK:
    """See the module's docstring."""

    components = (OPD,)

    def __init__(self, **options: object) -> None:
        """Options are `TopKOptions`. Raises ValueError for others."""
        self._options = TopKOptions.model_validate(options)

    @property
    def needs(self) -> Needs:
        """The policy at the teacher's ids."""
        return needs_of(self._options, ids=IdSource.TEACHER_TOP)

    def sample_weights(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """One component, `opd`: samples with a teacher's signal."""
        weights = {OPD: opd_weights(batch, self._options)}
        return weights | regularisation_weights(batch, batch.opd_mask, self._options)

    def has_signal(self, batch: TokenBatch) -> torch.Tensor:
        """[samples] bool: a token with a teacher's signal."""
        return opd_signal(batch)

    def loss(self, batch: TokenBatch, weights: Mapping[str, torch.Tensor]) -> AlgorithmLoss:
        """The module's L, split by sample."""
        assert batch.given is not None  # `needs` asked for it
        given, mask = batch.given, batch.opd_mask
        # A masked token may have no id at all, and its loss no meaning: it is computed on harmless numbers.
        exists = given.mask | ~mask[:, None]
        divergence = reverse_kl(
            GivenIds(
                torch.where(given.mask, given.log_probs, -1.0),
                given.proximal_log_probs,
                torch.where(given.mask, given.teacher_log_probs, -1.0),
                exists,
            )
        )
        sums = sum_per_sample(divergence, mask, batch.sample_of_token, batch.num_samples)
        nothing = torch.zeros_like(mask)
        component = ComponentLoss(
            per_sample=sums * weights[OPD].to(sums.dtype),
            active=mask,
            rejected=nothing,
            clipped=nothing,
            capped=nothing,
            ratio=torch.ones_like(divergence).detach(),
            advantages=-divergence.detach(),
        )
        return AlgorithmLoss({OPD: component}, regularisation(batch, mask, weights, self._options))
