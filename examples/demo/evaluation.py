"""Asks the held-out questions of an engine and measures the answers.

Evaluation goes to the engine directly, beside the gateway: what is only measured is neither logged nor trained.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from clawstream.engine.interface import EngineClient, GenerationRequest
from clawstream.rendering.interface import ChatRenderer
from examples.demo.personas import Persona
from examples.demo.questions import Question


@dataclass(frozen=True, slots=True)
class Measurement:
    """Means over all answers of one evaluation."""

    answers: int
    """How many answers were measured."""
    reward: float
    """Mean of +1 for a satisfied user and -1 otherwise."""
    reward_standard_error: float
    """Of that mean."""
    satisfied: float
    """Share of answers that are as the user wants them."""
    correct: float
    """Share of answers that hold the fact."""
    length_tokens: float
    """Mean number of tokens."""
    entropy_nats: float
    """Mean negative log-prob of the sampled tokens: an estimate of the entropy per token."""
    empty: float
    """Share of answers of fewer than three words."""


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One held-out answer, kept for the report."""

    question: str
    answer: str
    satisfied: bool
    correct: bool


async def evaluate(
    engine: EngineClient,
    renderer: ChatRenderer,
    persona: Persona,
    questions: Sequence[Question],
    *,
    samples_per_question: int,
    temperature: float,
    seed: int,
    advance: Callable[[], None],
) -> tuple[Measurement, list[MeasuredAnswer]]:
    """Samples `samples_per_question` answers to each question at `temperature` and measures them.

    `advance` is called after every answer. The same seed asks the engine for the same random numbers.
    """

    async def ask(question: Question, sample: int) -> tuple[MeasuredAnswer, int, float]:
        prompt = renderer.render([{"role": "user", "content": question.text}])
        ids: list[int] = []
        logprobs: list[float] = []
        finish_reason = None
        parameters = {
            "temperature": temperature,
            "max_new_tokens": persona.max_answer_tokens,
            "stop_token_ids": renderer.stop_token_ids,
            "sampling_seed": seed * 1_000_003 + sample,
        }
        request = GenerationRequest(f"eval-{seed}-{sample}-{question.text}", prompt.token_ids, parameters)
        async for chunk in engine.generate(request):
            ids += chunk.token_ids
            logprobs += [logprob for logprob in chunk.logprobs if logprob is not None]
            finish_reason = chunk.finish_reason or finish_reason
        answer = renderer.parse(ids).content or ""
        reaction = persona.react(question, answer, finish_reason == "stop", Random(0))
        advance()
        measured = MeasuredAnswer(question.text, answer, reaction.satisfied, reaction.correct)
        return measured, len(ids), -sum(logprobs) / max(len(logprobs), 1)

    results = await asyncio.gather(*(ask(q, s) for s in range(samples_per_question) for q in questions))
    answers = [answer for answer, _, _ in results]
    rewards = [1.0 if answer.satisfied else -1.0 for answer in answers]
    measurement = Measurement(
        answers=len(answers),
        reward=statistics.fmean(rewards),
        reward_standard_error=statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0,
        satisfied=statistics.fmean(answer.satisfied for answer in answers),
        correct=statistics.fmean(answer.correct for answer in answers),
        length_tokens=statistics.fmean(tokens for _, tokens, _ in results),
        entropy_nats=statistics.fmean(entropy for _, _, entropy in results),
        empty=statistics.fmean(len(answer.answer.split()) < 3 for answer in answers),
    )
    return measurement, answers
