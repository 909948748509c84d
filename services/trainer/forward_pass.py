# pyright: basic
# Reason: drives the Megatron engine, whose tensors are untyped.
"""What a model says about answers: one pass over samples that are packed into a row, and the log-probs read off it."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.algorithms.base import Needs
from services.trainer.algorithms.options import IdSource
from services.trainer.engine.log_probabilities import log_probabilities, log_probabilities_at
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.given_ids import given_ids
from services.trainer.packing import PackedRow, pack, plan_micro_batches
from services.trainer.sample import TrainingSample
from services.trainer.token_batches import PolicyOutputs

_SAMPLED_IDS_ONLY = Needs()


def forward_pass(
    model: PolicyModel, samples: Sequence[TrainingSample], layout: ParallelLayout, needs: Needs = _SAMPLED_IDS_ONLY
) -> tuple[PolicyOutputs, PackedRow]:
    """Log-probs at all temperatures and ids that are needed, and the row that the samples were packed into.

    Without `needs`: of the sampled ids at their sampling temperatures. A collective of the tensor-parallel group.
    """
    row = pack([(sample.prompt_ids, sample.response_ids) for sample in samples])
    logits = model.logits(row)  # [tokens, vocabulary / tensor_parallel_size]
    shard = model.shard(logits, layout)
    targets = torch.as_tensor(row.target_ids, device=logits.device)  # [tokens]
    temperatures = torch.as_tensor(  # [tokens]
        np.asarray([sample.sampling_temperature for sample in samples])[row.sequence_of_target],
        device=logits.device,
    )
    log_probs, entropies = log_probabilities(logits, targets, temperatures, shard)  # [tokens] each
    unit, given = log_probs.new_empty(0), log_probs.new_empty(0)
    if needs.unit_temperature or needs.ids is not IdSource.NONE:
        further = np.empty((targets.numel(), 0), np.int64)  # [tokens, k]
        if needs.ids is not IdSource.NONE:
            further = given_ids(samples, needs.ids, needs.ids_per_token).ids
        if needs.unit_temperature and further.shape[1] == 0 and bool((temperatures == 1).all()):
            unit = log_probs
        else:
            ids = torch.cat([targets[:, None], torch.as_tensor(further, device=logits.device)], dim=1)
            both, _ = log_probabilities_at(logits, ids, torch.ones_like(temperatures), shard)  # [tokens, 1 + k]
            unit, given = both[:, 0], both[:, 1:]
    return PolicyOutputs(log_probs, entropies, unit, given), row


@torch.no_grad()
def score(
    model: PolicyModel, samples: Sequence[TrainingSample], layout: ParallelLayout, tokens_per_micro_batch: int
) -> list[NDArray[np.float32]]:
    """Log-probs of every response, each [response_tokens] in nats, at its sampling temperature.

    A collective of the tensor-parallel group; every data-parallel rank computes all of them.
    """
    answers: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(samples)
    for micro_batch in plan_micro_batches([sample.num_tokens for sample in samples], tokens_per_micro_batch):
        chosen = [samples[index] for index in micro_batch]
        log_probs = forward_pass(model, chosen, layout)[0].log_probs
        ends = np.cumsum([sample.response_ids.size for sample in chosen])[:-1]
        for index, part in zip(micro_batch, np.split(log_probs.cpu().numpy(), ends), strict=True):
            answers[index] = part
    return answers
