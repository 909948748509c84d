# pyright: basic
# Reason: torch.distributed is untyped.
"""The likeliest ids of every token, from logits whose vocabulary is split over tensor-parallel ranks.

Each rank names its own k likeliest; the k likeliest of all of them are the vocabulary's. Only [tokens, k] is sent.
"""

import torch
import torch.distributed as distributed

from services.trainer.engine.log_probabilities import VocabularyShard


def likeliest_ids(logits: torch.Tensor, k: int, shard: VocabularyShard) -> torch.Tensor:
    """int64 [tokens, k], the likeliest first; `logits` is [tokens, columns of this rank].

    `k` must not exceed the vocabulary. The same on every rank. A collective of the shard's group.
    """
    own = min(k, shard.num_real_columns)
    values = logits.new_full((len(logits), k), -torch.inf, dtype=torch.float32)
    ids = torch.full((len(logits), k), -1, dtype=torch.int64, device=logits.device)
    if own:
        found = logits[:, : shard.num_real_columns].float().topk(own, dim=1)
        values[:, :own], ids[:, :own] = found.values, found.indices + shard.start
    if shard.group is None:
        return ids
    size = distributed.get_world_size(shard.group)
    all_values = [torch.empty_like(values) for _ in range(size)]
    all_ids = [torch.empty_like(ids) for _ in range(size)]
    distributed.all_gather(all_values, values, group=shard.group)
    distributed.all_gather(all_ids, ids, group=shard.group)
    chosen = torch.cat(all_values, dim=1).topk(k, dim=1).indices  # [tokens, k] of [tokens, ranks * k]
    return torch.cat(all_ids, dim=1).gather(1, chosen)
