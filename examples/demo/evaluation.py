"""Asks the held-out questions of an engine as the persona would, and sums the answers up.

Evaluation goes to the engine directly, beside the gateway: what is only measured is neither logged nor trained.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from clawstream.engine.interface import EngineClient
from clawstream.evaluation.asking import MeasuredAnswer, ask_all
from clawstream.evaluation.questions import Question
from clawstream.evaluation.respondents import EngineRespondent, Sampling
from clawstream.rendering.interface import ChatRenderer
from examples.demo.personas import Persona


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
    answers = await ask_all(
        EngineRespondent(engine, renderer),
        questions,
        lambda question, answer, finished: persona.react(question, answer, finished, Random(0)).satisfied,
        Sampling(temperature, persona.max_answer_tokens),
        seeds=[seed],
        samples_per_question=samples_per_question,
        advance=advance,
    )
    return summarise(answers), answers


def summarise(answers: Sequence[MeasuredAnswer]) -> Measurement:
    """The means."""
    rewards = [answer.reward for answer in answers]
    return Measurement(
        answers=len(answers),
        reward=statistics.fmean(rewards),
        reward_standard_error=statistics.stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else 0.0,
        satisfied=statistics.fmean(answer.satisfied for answer in answers),
        correct=statistics.fmean(answer.correct for answer in answers),
        length_tokens=statistics.fmean(answer.length_tokens for answer in answers),
        entropy_nats=statistics.fmean(answer.entropy_nats or 0.0 for answer in answers),
        empty=statistics.fmean(answer.is_empty for answer in answers),
    )
