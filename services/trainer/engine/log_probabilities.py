# pyright: basic
# Reason: torch's autograd functions and torch.distributed are untyped.
"""Log-probs of given ids, and entropies, from logits whose vocabulary is split over tensor-parallel ranks.

With z = logits / T over the true vocabulary:  log p(id) = z[id] - log(sum(exp(z))),
entropy H = log(sum(exp(z))) - sum(p * z).  Gradients: d log p(id) / d logits = (onehot(id) - p) / T,
d H / d logits = -p (log p + H) / T.  Any number of ids per token share one normaliser.

Megatron has a vocabulary-parallel cross entropy, but it overwrites fp32 logits in place (no second temperature
from the same logits), knows no temperature, and counts the columns that pad the vocabulary to a multiple of the
ranks, whose logits of 0 would take probability. This one keeps the logits and log-sum-exp for backward and
computes the softmax again there, so it holds one tensor of [tokens, vocabulary], not two.
Arithmetic is in float32, or float64 for float64 logits.
"""

from dataclasses import dataclass

import torch
import torch.distributed as distributed


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The columns of the vocabulary that this rank's logits hold."""

    start: int
    """First id."""
    num_real_columns: int
    """Columns that stand for ids; later ones only pad."""
    group: distributed.ProcessGroup | None
    """The ranks that hold the other columns; None when there are none."""

    @classmethod
    def of_rank(
        cls, vocabulary_size: int, num_columns: int, rank: int, size: int, group: distributed.ProcessGroup | None
    ) -> "VocabularyShard":
        """The shard of tensor-parallel `rank` of `size`, each with `num_columns` columns."""
        start = rank * num_columns
        return cls(start, max(0, min(num_columns, vocabulary_size - start)), group if size > 1 else None)

    def all_reduce(self, values: torch.Tensor, operation: distributed.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            distributed.all_reduce(values, op=operation, group=self.group)
        return values


def _scaled(logits: torch.Tensor, temperatures: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Real columns divided by each row's temperature, in at least float32; a fresh tensor."""
    real = logits[:, : shard.num_real_columns]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return real.to(dtype, copy=True).div_(temperatures.to(dtype)[:, None])  # [tokens, real columns]


def _own_ids(ids: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each id or 0, whether this rank holds it); shapes as `ids`."""
    columns = ids - shard.start
    mine = (columns >= 0) & (columns < shard.num_real_columns)
    return torch.where(mine, columns, 0), mine


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, temperatures, shard):
        ctx.set_materialize_grads(False)
        scaled = _scaled(logits, temperatures, shard)
        largest = shard.all_reduce(
            scaled.amax(1) if shard.num_real_columns else scaled.new_full((len(ids),), -torch.inf),
            distributed.ReduceOp.MAX,
        )  # [tokens]
        columns, mine = _own_ids(ids, shard)
        chosen = scaled.new_zeros(ids.shape)  # [tokens, k]
        if shard.num_real_columns:
            chosen = torch.where(mine, scaled.gather(1, columns), chosen)
        shard.all_reduce(chosen, distributed.ReduceOp.SUM)
        weighted = scaled.sub_(largest[:, None])
        exponentials = weighted.exp()
        sums = torch.stack([exponentials.sum(1), exponentials.mul_(weighted).sum(1)])  # in this order: in place
        shard.all_reduce(sums, distributed.ReduceOp.SUM)  # [2, tokens]
        log_normaliser = sums[0].log() + largest
        entropies = sums[0].log() - sums[1] / sums[0]
        ctx.shard = shard
        ctx.save_for_backward(logits, ids, temperatures, log_normaliser, entropies)
        return chosen - log_normaliser[:, None], entropies

    @staticmethod
    def backward(ctx, *gradients):
        logits, ids, temperatures, log_normaliser, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = gradients
        shard = ctx.shard
        result = torch.zeros_like(logits)
        if shard.num_real_columns == 0 or (of_log_probs is None and of_entropies is None):
            return result, None, None, None
        inverse = 1 / temperatures.to(log_normaliser.dtype)[:, None]  # [tokens, 1]
        log_softmax = _scaled(logits, temperatures, shard).sub_(log_normaliser[:, None])
        if of_entropies is None:
            assert of_log_probs is not None
            gradient = log_softmax.exp_().mul_(-of_log_probs.sum(1, keepdim=True) * inverse)
        else:
            factor = (log_softmax + entropies[:, None]).mul_(-of_entropies[:, None])
            if of_log_probs is not None:
                factor -= of_log_probs.sum(1, keepdim=True)
            gradient = log_softmax.exp_().mul_(factor).mul_(inverse)
        if of_log_probs is not None:
            columns, mine = _own_ids(ids, shard)
            gradient.scatter_add_(1, columns, torch.where(mine, of_log_probs * inverse, 0.0))
        result[:, : shard.num_real_columns] = gradient
        return result, None, None, None


def log_probabilities_at(
    logits: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs of `ids` [tokens, k], entropies [tokens]) in nats, of softmax(logits / temperature).

    `logits` is [tokens, columns of this rank], `ids` int64 [tokens, k], `temperatures` [tokens] and positive. An id
    outside the vocabulary (-1 where a token has fewer than k) gets a number without meaning: mask it. Gradients flow
    through both. A collective of the shard's group.
    """
    return _LogProbabilities.apply(logits, ids, temperatures, shard)


def log_probabilities(
    logits: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for one id per token: `ids` and both results are [tokens]."""
    log_probs, entropies = log_probabilities_at(logits, ids[:, None], temperatures, shard)
    return log_probs.squeeze(1), entropies
