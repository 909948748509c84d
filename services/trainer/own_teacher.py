# pyright: basic
# Reason: drives the Megatron engine, whose tensors are untyped.
"""The trainer's own teacher: a frozen model beside the policy, which reads the hint and scores the unchanged answer.

Policy and teacher run through the same code on the same packed rows, so an identical teacher without a hint has the
policy's log-probs, whatever engine sampled. Log-probs are at temperature 1. Source of the idea: OpenClaw-RL after its
first release, where the teacher is a Megatron role of its own.

At which further ids the teacher is asked follows from the loss:

    teacher    its k likeliest under the hinted prompt
    student    the policy's k likeliest before the step, under the answer's own prompt
    overlap    both

The answers of a batch are divided among the copies of the model (data parallelism), and everyone gets all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from services.trainer.algorithms.options import IdSource
from services.trainer.engine import cpu_platform
from services.trainer.engine.likeliest_ids import likeliest_ids
from services.trainer.engine.log_probabilities import log_probabilities_at
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.interruption import Interruption
from services.trainer.packing import pack, plan_micro_batches, share_among_ranks
from services.trainer.sample import IdTargets, TrainingSample


@dataclass(frozen=True, slots=True)
class OwnTeacherOptions:
    """Which model, and how much it says."""

    directory: Path | None = None
    """Its weights in Hugging Face's form; None: the base model."""
    top_k: int = 50
    """At so many ids a token where the loss does not say how many it needs."""


@dataclass(frozen=True, slots=True)
class _Said:
    """Of the response tokens of some answers, end to end."""

    log_probs: torch.Tensor
    """float32 [tokens, 1 + k]: of the response's own ids, then of `ids`."""
    ids: torch.Tensor
    """int64 [tokens, k]."""


Sequences = Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]]
"""Prompts and responses."""


class OwnTeacher:
    """See the module's docstring. Its methods are collectives of all ranks, with the same samples on each."""

    def __init__(
        self,
        model: PolicyModel,
        policy: PolicyModel,
        layout: ParallelLayout,
        *,
        tokens_per_micro_batch: int,
        source: IdSource,
        ids_per_token: int,
        interruption: Interruption,
    ) -> None:
        """`model` may be the policy itself where only adapters are trained: it is used without them."""
        self._model = model
        self._policy = policy
        self._layout = layout
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._source = source
        self._interruption = interruption
        self._k = min(ids_per_token, model.vocabulary_size)

    @torch.no_grad()
    def taught(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The samples in their order; those that ask this teacher with its log-probs, the others as they are.

        Raises StepInterrupted.
        """
        asking = [index for index, sample in enumerate(samples) if sample.asked_prompt_ids is not None]
        if not asking:
            return list(samples)
        hinted = [
            (sample.asked_prompt_ids, sample.response_ids) for sample in samples if sample.asked_prompt_ids is not None
        ]
        support: torch.Tensor | None = None
        if self._source in (IdSource.STUDENT_TOP, IdSource.OVERLAP):
            plain = [(samples[index].prompt_ids, samples[index].response_ids) for index in asking]
            support = self._pass(self._policy, plain, None, self._k).ids  # [tokens, k]
        own_ids = self._k if self._source in (IdSource.TEACHER_TOP, IdSource.OVERLAP) else 0
        with self._model.without_adapters():
            said = self._pass(self._model, hinted, support, own_ids)
        given = 0 if support is None else support.size(1)
        log_probs, ids = said.log_probs.cpu().numpy(), said.ids.cpu().numpy().astype(np.int32)
        taught = list(samples)
        start = 0
        for index in asking:
            place = slice(start, start + samples[index].response_ids.size)
            start = place.stop
            question = samples[index].teacher
            assert question is not None  # it asks
            teacher = replace(
                question,
                log_probs=log_probs[place, 0],
                support=_targets(ids[place, :given], log_probs[place, 1 : 1 + given]),
                top=_targets(ids[place, given:], log_probs[place, 1 + given :]),
                asked_prompt_ids=None,
            )
            taught[index] = replace(samples[index], teacher=teacher)
        return taught

    def _pass(self, model: PolicyModel, sequences: Sequences, given: torch.Tensor | None, top_k: int) -> _Said:
        """One forward pass over all sequences: log-probs of the responses' own ids, of `given` [tokens, k] and of the
        model's `top_k` likeliest ids, and all these ids but the first."""
        lengths = [prompt.size + response.size - 1 for prompt, response in sequences]
        sizes = [response.size for _, response in sequences]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        columns = top_k + (0 if given is None else given.size(1))
        device = cpu_platform.device()
        log_probs = torch.zeros(int(starts[-1]), 1 + columns, dtype=torch.float32, device=device)
        all_ids = torch.zeros(int(starts[-1]), columns, dtype=torch.int64, device=device)
        plan = plan_micro_batches(lengths, self._tokens_per_micro_batch)
        mine = share_among_ranks(plan, lengths, self._layout.data_size)[self._layout.data_rank]

        def fill(micro_batch: list[int]) -> None:
            row = pack([sequences[index] for index in micro_batch])
            logits = model.logits(row)
            shard = model.shard(logits, self._layout)
            places = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in micro_batch])
            place = torch.as_tensor(places, device=device)
            ids = torch.as_tensor(row.target_ids, device=device)[:, None]  # [tokens of the row, 1 + k]
            if given is not None:
                ids = torch.cat([ids, given[place]], dim=1)
            if top_k:
                ids = torch.cat([ids, likeliest_ids(logits, top_k, shard)], dim=1)
            units = torch.ones(len(ids), device=device)
            log_probs[place], _ = log_probabilities_at(logits, ids, units, shard)
            all_ids[place] = ids[:, 1:]

        self._interruption.each(mine, fill)
        # Every row was computed by one copy of the model, and is 0 on the others: the sums are exact.
        return _Said(self._layout.sum_over_data_ranks(log_probs), self._layout.sum_over_data_ranks(all_ids))


def _targets(ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> IdTargets | None:
    """[tokens, k] each; None where nobody asked."""
    return IdTargets(ids, log_probs) if ids.shape[1] else None
