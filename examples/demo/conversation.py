"""The scripted user at work: asks, reads, reacts, all through the gateway's OpenAI endpoint."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from clawstream.evaluation.questions import Question
from examples.demo.personas import Persona, Reaction

REPLY_MAX_TOKENS = 4
"""The user does not read what is said after the reaction: a few tokens are enough."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, its answer and the reaction."""

    question: Question
    response_id: str
    """The OpenAI response id of the answer."""
    answer: str
    answer_tokens: int
    reaction: Reaction


@dataclass(frozen=True, slots=True)
class _Answer:
    response_id: str
    text: str
    finished: bool
    """False when the token cap ended it."""
    tokens: int


class ScriptedUser:
    """Talks to the policy as any user of an OpenAI endpoint would. Retries when the gateway is away, as agents do."""

    def __init__(
        self, client: AsyncOpenAI, *, model: str, persona: Persona, questions: Sequence[Question], random: Random
    ) -> None:
        self._client = client
        self._model = model
        self._persona = persona
        self._questions = questions
        self._random = random

    async def talk(
        self,
        *,
        concurrent: int,
        pause_seconds: float,
        over: asyncio.Event,
        on_exchange: Callable[[Exchange], None],
    ) -> None:
        """Holds conversations, `concurrent` of them at a time, until they are `over`. Reports every judged exchange.

        Between two conversations lies a pause of `pause_seconds` on average, of half as much or half as much again.
        """

        async def one_after_another() -> None:
            while not over.is_set():
                on_exchange(await self._converse(self._random.choice(self._questions)))
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), pause_seconds * self._random.uniform(0.5, 1.5))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrent):
                group.create_task(one_after_another())

    async def _converse(self, question: Question) -> Exchange:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question.text}]
        answered = await self._ask(messages, self._persona.max_answer_tokens, done=False)
        answer = answered.text
        reaction = self._persona.react(question, answer, answered.finished, self._random)
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": reaction.reply})
        await self._ask(messages, REPLY_MAX_TOKENS, done=True)
        return Exchange(question, answered.response_id, answer, answered.tokens, reaction)

    async def _ask(self, messages: list[ChatCompletionMessageParam], max_tokens: int, *, done: bool) -> _Answer:
        """Streams one answer."""
        while True:
            try:
                stream = await self._client.chat.completions.create(
                    model=self._model,
                    messages=messages,
                    max_completion_tokens=max_tokens,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers={"X-Session-Done": "true"} if done else None,
                )
                parts: list[str] = []
                response_id, finish_reason, tokens = "", None, 0
                async for chunk in stream:
                    response_id = chunk.id
                    if chunk.usage is not None:
                        tokens = chunk.usage.completion_tokens
                    for choice in chunk.choices:
                        parts.append(choice.delta.content or "")
                        finish_reason = choice.finish_reason or finish_reason
                return _Answer(response_id, "".join(parts), finish_reason == "stop", tokens)
            except APIConnectionError:
                await asyncio.sleep(1.0)
            except APIStatusError as error:
                if error.status_code < 500:
                    raise
                await asyncio.sleep(float(error.response.headers.get("retry-after", "1")))
