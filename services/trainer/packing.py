"""Padding-free micro-batches: whole sequences packed into rows of at most so many tokens.

Pure functions on lengths and numpy arrays. Every computed token is a real one; attention keeps the sequences
of a row apart (`services.trainer.engine.packed_attention`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def plan_micro_batches(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Packs sequences into as few micro-batches as first-fit-decreasing finds.

    Returns indices into `lengths`: each exactly once, ascending inside a micro-batch, the micro-batches in the
    order of their first index. A sequence longer than the budget gets a micro-batch of its own: the budget bounds
    memory, it does not decide what is trained. The same input always gives the same plan.
    Raises ValueError for a length or a budget below 1.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch must be at least 1, not {tokens_per_micro_batch}")
    if any(length < 1 for length in lengths):
        raise ValueError(f"every sequence needs at least one token, but lengths are {list(lengths)}")
    plan: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for micro_batch, room in enumerate(free):
            if lengths[index] <= room:
                plan[micro_batch].append(index)
                free[micro_batch] -= lengths[index]
                break
        else:
            plan.append([index])
            free.append(tokens_per_micro_batch - lengths[index])
    return sorted(sorted(micro_batch) for micro_batch in plan)


def share_among_ranks(plan: Sequence[Sequence[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Gives each data-parallel rank its micro-batches: the heaviest left goes to the rank with the fewest tokens.

    A rank may get none (a batch of one sample on two ranks). Each keeps the order of `plan`.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, not {num_ranks}")
    weights = [sum(lengths[index] for index in micro_batch) for micro_batch in plan]
    loads = [0] * num_ranks
    chosen: list[list[int]] = [[] for _ in range(num_ranks)]
    for micro_batch in sorted(range(len(plan)), key=lambda i: (-weights[i], i)):
        rank = loads.index(min(loads))
        loads[rank] += weights[micro_batch]
        chosen[rank].append(micro_batch)
    return [[list(plan[micro_batch]) for micro_batch in sorted(indices)] for indices in chosen]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Several prompts with their responses, end to end in one row.

    The last response token of each sequence is a target only: nothing is predicted from it, so it is not computed.
    """

    token_ids: NDArray[np.int64]
    """[tokens]: prompt and response of each sequence, less its last token."""
    sequence_bounds: NDArray[np.int32]
    """[sequences + 1]: where each sequence starts, and the end."""
    logit_positions: NDArray[np.int64]
    """[response_tokens]: the token after which each response token is predicted."""
    target_ids: NDArray[np.int64]
    """[response_tokens]: the response tokens."""
    sequence_of_target: NDArray[np.int64]
    """[response_tokens]: which sequence of the row each target belongs to."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[sequences]: number of computed tokens of each."""
        return np.diff(self.sequence_bounds)


def pack(sequences: Sequence[tuple[NDArray[np.integer], NDArray[np.integer]]]) -> PackedRow:
    """Packs (prompt_ids, response_ids) pairs. Raises ValueError when one of them is empty."""
    tokens: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    bounds = [0]
    for index, (prompt_ids, response_ids) in enumerate(sequences):
        if prompt_ids.size == 0 or response_ids.size == 0:
            raise ValueError(f"sequence {index} of the row: prompt and response need at least one token each")
        start = bounds[-1]
        tokens.append(np.concatenate([prompt_ids, response_ids[:-1]]).astype(np.int64))
        positions.append(start + prompt_ids.size - 1 + np.arange(response_ids.size, dtype=np.int64))
        bounds.append(start + tokens[-1].size)
    return PackedRow(
        token_ids=np.concatenate(tokens),
        sequence_bounds=np.asarray(bounds, dtype=np.int32),
        logit_positions=np.concatenate(positions),
        target_ids=np.concatenate([response_ids for _, response_ids in sequences]).astype(np.int64),
        sequence_of_target=np.repeat(
            np.arange(len(sequences), dtype=np.int64), [response_ids.size for _, response_ids in sequences]
        ),
    )
