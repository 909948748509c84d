# pyright: basic
# Reason: torch's stubs are partial.
"""What a step computes: which samples, with which weights, in which micro-batches, on which rank. Decided before any
forward pass and alike on every rank."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.trainer.algorithms.base import Algorithm
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.packing import plan_micro_batches, share_among_ranks
from services.trainer.sample import TrainingSample, UnchangedReason
from services.trainer.token_batches import mask_batch

MicroBatch = tuple[int, ...]
"""Places of its samples in the batch."""


@dataclass(frozen=True, slots=True)
class PartPlan:
    """What is to be computed of a part of the batch, for one update."""

    reason: UnchangedReason | None
    """Why nothing is, when nothing is."""
    culprits: list[str] = field(default_factory=list)
    """Samples to blame for it."""
    first: int = 0
    """Place of the part's first sample in the batch."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """[samples of the part] by component."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    """Those of this rank."""


def consecutive_parts(num_samples: int, updates: int) -> list[range]:
    """Parts of nearly equal size; fewer than `updates` where there are fewer samples."""
    count = min(updates, num_samples)
    bounds = [num_samples * index // count for index in range(count + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def plan_part(
    batch: Sequence[TrainingSample],
    part: range,
    algorithm: Algorithm,
    tokens_per_micro_batch: int,
    layout: ParallelLayout,
) -> PartPlan:
    """The plan of the samples in `part`."""
    culprits = [batch[index].sample_id for index in part if not batch[index].is_finite]
    if culprits:
        return PartPlan(UnchangedReason.NON_FINITE, culprits)
    whole = mask_batch([batch[index] for index in part])
    weights = algorithm.sample_weights(whole)
    belongs = torch.stack(list(weights.values())).sum(0) > 0  # [samples]
    if not bool(belongs.any()):
        return PartPlan(UnchangedReason.ALL_MASKED)
    has_signal = algorithm.has_signal(whole)
    if not bool(has_signal.any()):
        return PartPlan(UnchangedReason.ZERO_ADVANTAGE)
    # A sample without signal adds exactly 0 to the gradient: it counts in the denominators, and costs nothing.
    is_computed = belongs if algorithm.needs.every_sample else has_signal
    computed = [part[place] for place in is_computed.nonzero().flatten().tolist()]
    lengths = [batch[index].num_tokens for index in computed]
    plan = plan_micro_batches(lengths, tokens_per_micro_batch)
    mine = share_among_ranks(plan, lengths, layout.data_size)[layout.data_rank]
    micro_batches = [tuple(computed[place] for place in each) for each in mine]
    return PartPlan(None, [], part.start, weights, micro_batches)
