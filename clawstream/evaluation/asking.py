"""Asks all questions of one respondent, several seeds and samples each."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from clawstream.evaluation.questions import Question
from clawstream.evaluation.respondents import Respondent, Response, Sampling

_SEED_STRIDE: Final = 1_000_003
_SEED_MODULUS: Final = 2**31
_EMPTY_BELOW_WORDS: Final = 3


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One held-out answer and what the checks say of it."""

    question: str
    seed: int
    sample: int
    answer: str
    satisfied: bool
    """It is as the user wants it."""
    correct: bool
    """It holds the fact."""
    finished: bool
    length_tokens: int
    entropy_nats: float | None

    @property
    def reward(self) -> float:
        """+1 for a satisfied user and -1 otherwise."""
        return 1.0 if self.satisfied else -1.0

    @property
    def is_empty(self) -> bool:
        """Whether it has fewer than three words."""
        return len(self.answer.split()) < _EMPTY_BELOW_WORDS


IsSatisfied = Callable[[Question, str, bool], bool]
"""(question, answer, finished)."""


async def ask_all(
    respondent: Respondent,
    questions: Sequence[Question],
    is_satisfied: IsSatisfied,
    sampling: Sampling,
    *,
    seeds: Sequence[int],
    samples_per_question: int,
    concurrent: int | None = None,
    advance: Callable[[], None],
) -> list[MeasuredAnswer]:
    """Every question `samples_per_question` times under every seed, in that order: seed, sample, question.

    At most `concurrent` at a time (None: all, the respondent queues); `advance` is called after every answer.
    """
    slots = asyncio.Semaphore(concurrent or len(questions) * len(seeds) * samples_per_question or 1)

    async def ask(question: Question, seed: int, sample: int) -> MeasuredAnswer:
        async with slots:
            response = await respondent.answer(question.text, sampling, (seed * _SEED_STRIDE + sample) % _SEED_MODULUS)
        advance()
        return measure(question, response, is_satisfied, seed=seed, sample=sample)

    asked = [(q, seed, sample) for seed in seeds for sample in range(samples_per_question) for q in questions]
    return list(await asyncio.gather(*(ask(*one) for one in asked)))


def measure(
    question: Question, response: Response, is_satisfied: IsSatisfied, *, seed: int, sample: int
) -> MeasuredAnswer:
    """What the checks say of a response."""
    return MeasuredAnswer(
        question=question.text,
        seed=seed,
        sample=sample,
        answer=response.text,
        satisfied=is_satisfied(question, response.text, response.finished),
        correct=question.is_answered_by(response.text),
        finished=response.finished,
        length_tokens=response.tokens,
        entropy_nats=response.entropy_nats,
    )
