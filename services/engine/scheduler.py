# pyright: basic
# Reason: torch leaves Tensor.tolist untyped.
"""Continuous batching: requests enter and leave between any two steps, and so do new weights.

No threads and no network here. `Scheduler.step` does one forward pass for everything that has something to compute.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.answer import Answer, TopLogprobs
from services.engine.sampling import sample
from services.engine.slots import Slots
from services.engine.transformer import Chunk, Transformer
from services.engine.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """What one answer computes in a step."""

    answer: Answer
    chunk: Chunk
    scored_rows: range
    """Positions in the sequence whose logits are compared with the next prompt token"""
    samples: bool
    """Whether the last row's logits yield a token"""


class Scheduler:
    """The requests in flight and the weights in service."""

    def __init__(
        self,
        transformer: Transformer,
        weights: ModelWeights,
        *,
        weight_version: str,
        max_slots: int,
        max_prefill_tokens_per_step: int,
    ) -> None:
        self._transformer = transformer
        self._weights = weights
        self.weight_version = weight_version
        self._slots = Slots(max_slots)
        self._max_prefill_tokens_per_step = max_prefill_tokens_per_step
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    def add(self, answer: Answer) -> None:
        """Queue a request; it starts in order of arrival, as soon as a slot is free."""
        self._waiting.append(answer)

    def abort(self, rid: str, message: str) -> None:
        """End the request `rid` with what it has; unknown ones are ignored."""
        for answer in [*self._running, *self._waiting]:
            if answer.rid == rid:
                self._end_early(answer, {"type": "abort", "message": message, "status_code": None})

    def abort_all(self, message: str) -> None:
        """End every request with what it has."""
        for answer in [*self._running, *self._waiting]:
            self._end_early(answer, {"type": "abort", "message": message, "status_code": None})

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Running answers keep their own keys and values."""
        self._slots.forget()

    def swap_weights(self, weights: ModelWeights, weight_version: str, *, keep_running: bool) -> None:
        """Put new weights into service between two steps. The prefix cache is emptied.

        Running answers compute their keys and values anew under the new weights, so that everything after the swap is
        what the new version alone would say; with `keep_running` they go on from those of the old weights.
        """
        self._weights = weights
        self.weight_version = weight_version
        if not keep_running:
            for answer in self._running:
                answer.restart()
        self._slots.forget()

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, compute one forward pass, sample, score and report."""
        self._admit()
        planned = self._plan()
        if not planned:
            return
        sampling = [(index, plan) for index, plan in enumerate(planned) if plan.samples]
        scoring = [plan for plan in planned if plan.scored_rows]
        logits = self._transformer.step(self._weights, [plan.chunk for plan in planned], logit_rows(planned))
        for plan in planned:
            plan.answer.filled += len(plan.chunk.token_ids)
        finite = torch.isfinite(logits.sum(dim=-1))  # [logit_rows]
        if not bool(finite.all()):
            self._fail_non_finite(planned)
            return
        if sampling:
            self._sample([plan.answer for _, plan in sampling], logits[: len(sampling)])
        row = len(sampling)
        for plan in scoring:
            self._score(plan, logits[row : row + len(plan.scored_rows)])
            row += len(plan.scored_rows)
        for plan in planned:
            self._conclude(plan.answer, sampled=plan.samples)

    def _admit(self) -> None:
        while self._waiting and self._slots.has_free:
            answer = self._waiting.popleft()
            placement = self._slots.place(answer)
            if placement.copy_from is not None:
                self._transformer.cache.copy_prefix(placement.copy_from, placement.slot, placement.prefix_tokens)
            self._running.append(answer)
            if answer.filled >= answer.goal:  # nothing to compute: a scoring of one token, or of none
                self._conclude(answer, sampled=False)

    def _plan(self) -> list[PlannedChunk]:
        """What to compute: each running answer's next token, and prompts, oldest first, up to the step's budget."""
        budget = self._max_prefill_tokens_per_step
        decoding: list[PlannedChunk] = []
        filling: list[PlannedChunk] = []
        for answer in self._running:
            missing = answer.goal - answer.filled
            if missing == 1:
                decoding.append(plan_chunk(answer, 1))
            elif budget > 0:
                length = min(missing, budget)
                budget -= length
                (filling if length > 1 else decoding).append(plan_chunk(answer, length))
        return dealt(decoding, torch.get_num_threads()) + filling

    def _sample(self, answers: Sequence[Answer], logits: Tensor) -> None:
        """Sample one token for each answer from `logits` [answers, vocabulary]."""
        token_ids, logprobs = sample(logits, [answer.sampling_row() for answer in answers])
        chosen = logprobs.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1).tolist()  # [answers]
        for row, (answer, token_id, logprob) in enumerate(zip(answers, token_ids, chosen, strict=True)):
            top = top_logprobs(logprobs[row : row + 1], answer)
            answer.add_token(token_id, logprob, top[0] if top else None, self.weight_version)

    def _score(self, plan: PlannedChunk, logits: Tensor) -> None:
        """Log-probs at temperature 1 of the prompt tokens after the scored rows; `logits` [scored_rows, vocabulary]."""
        answer, rows = plan.answer, plan.scored_rows
        logprobs = torch.log_softmax(logits, dim=-1)
        following = torch.tensor(answer.prompt_ids[rows.start + 1 : rows.stop + 1]).unsqueeze(1)
        answer.input_logprobs.extend(logprobs.gather(1, following).squeeze(1).tolist())
        answer.input_top_logprobs.extend(top_logprobs(logprobs, answer))
        answer.input_given_logprobs.extend(given_logprobs(logprobs, answer))

    def _conclude(self, answer: Answer, *, sampled: bool) -> None:
        """Report what is new, and give the slot back when the answer has ended."""
        if answer.body.sampling_params.max_new_tokens == 0 and answer.filled >= answer.goal:
            answer.finish({"type": "length", "length": 0})
        if answer.finish_reason is not None:
            self._running.remove(answer)
            self._slots.release(answer)
            answer.report(self.weight_version)
        elif sampled and answer.body.stream:
            answer.report(self.weight_version)

    def _end_early(self, answer: Answer, reason: dict[str, Any], *, keep: bool = True) -> None:
        answer.finish(reason)
        if answer.slot is None:
            self._waiting.remove(answer)
        else:
            self._running.remove(answer)
            self._slots.release(answer, keep=keep)
        answer.report(self.weight_version)

    def _fail_non_finite(self, planned: Sequence[PlannedChunk]) -> None:
        """End all of a step that gave NaN or infinity: the weights are broken, and so is what is in their slots."""
        message = f"weights {self.weight_version} gave logits that are not finite"
        for plan in planned:
            self._end_early(plan.answer, {"type": "abort", "message": message, "status_code": 500}, keep=False)


def dealt(decoding: Sequence[PlannedChunk], threads: int) -> list[PlannedChunk]:
    """The same chunks, ordered so that the `threads` runs of rows that attention splits into have as many keys each.

    As cards are dealt: by length, one to each in turn.
    """
    by_length = sorted(decoding, key=lambda plan: plan.chunk.start)
    return [plan for first in range(threads) for plan in by_length[first::threads]]


def plan_chunk(answer: Answer, length: int) -> PlannedChunk:
    """The next `length` tokens of an answer, and which of their rows matter."""
    assert answer.slot is not None
    start, end = answer.filled, answer.filled + length
    scored_end = min(end, len(answer.prompt_ids) - 1)
    scored_rows = range(max(start, answer.next_scored_row), scored_end)
    samples = end == answer.goal and answer.body.sampling_params.max_new_tokens > 0
    chunk = Chunk(answer.slot, start, answer.token_ids(start, end))
    return PlannedChunk(answer, chunk, scored_rows if answer.body.return_logprob else range(0), samples)


def logit_rows(planned: Sequence[PlannedChunk]) -> list[int]:
    """Rows of the step whose logits are wanted: first one for each sampling answer, then the scored ones, in order."""
    sampled: list[int] = []
    scored: list[int] = []
    first = 0
    for plan in planned:
        length = len(plan.chunk.token_ids)
        if plan.samples:
            sampled.append(first + length - 1)
        scored.extend(first + position - plan.chunk.start for position in plan.scored_rows)
        first += length
    return sampled + scored


def top_logprobs(logprobs: Tensor, answer: Answer) -> list[TopLogprobs]:
    """The most likely tokens of each row of `logprobs` [rows, vocabulary], as many as asked for; [] for none."""
    if not answer.body.return_logprob or answer.body.top_logprobs_num == 0:
        return []
    values, token_ids = logprobs.topk(min(answer.body.top_logprobs_num, logprobs.shape[-1]), dim=-1)
    return [
        list(zip(row_values, row_ids, strict=True))
        for row_values, row_ids in zip(values.tolist(), token_ids.tolist(), strict=True)
    ]


def given_logprobs(logprobs: Tensor, answer: Answer) -> list[TopLogprobs]:
    """Those of the ids that were given, for each row of `logprobs` [rows, vocabulary]; [] when none were."""
    given = answer.body.token_ids_logprob
    if not given:
        return []
    return [list(zip(row, given, strict=True)) for row in logprobs[:, given].tolist()]
