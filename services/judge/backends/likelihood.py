"""Judges by likelihood: which verdict word would the model write next?

For small models that cannot reason: a 135M model gives a boxed verdict in 1 of 60 votes, while after a few-shot prompt
the log-probs of two words tell replies apart. One call per word, no sampling, so one vote says all.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from pydantic import JsonValue

from clawstream.engine.pool import EnginePool
from clawstream.rendering.interface import ChatRenderer
from schemas.events import NextStateEvent
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import Abstention, ModelAnswer, Opinion
from services.judge.evidence import gather, on_one_line
from services.judge.prompts import LikelihoodPrompt, filled


class LikelihoodBackend:
    """Compares the log-probs of the prompt's verdict words."""

    def __init__(self, spec: JudgeSpec, prompt: LikelihoodPrompt, engine: EnginePool, renderer: ChatRenderer) -> None:
        self._spec = spec
        self._prompt = prompt
        self._engine = engine
        self._renderer = renderer

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        """The filled prompt and the words."""
        evidence = gather(next_state, max_characters=self._spec.max_prompt_characters)
        # A few-shot prompt is made of lines: text of several would bring examples of its own.
        evidence = replace(
            evidence,
            request=on_one_line(evidence.request),
            answer=on_one_line(evidence.answer),
            following=on_one_line(evidence.following),
        )
        return {
            "model": self._spec.model,
            "text": filled(self._prompt.text, evidence).rstrip(),
            "words": cast("list[JsonValue]", list(self._prompt.words)),
        }

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """Word to log-prob in nats, at temperature 1, summed over the word's tokens. One answer says it all."""
        prompt_ids = self._renderer.encode(str(request["text"]))
        words = cast("list[str]", request["words"])
        scored = await asyncio.gather(*(self._engine.score(prompt_ids, self._renderer.encode(word)) for word in words))
        response = {word: sum(tokens.logprobs) for word, tokens in zip(words, scored, strict=True)}
        return [ModelAnswer(cast("JsonValue", response), prompt_tokens=len(prompt_ids))]

    def interpret(self, response: JsonValue) -> Opinion:
        """The verdict of the likeliest word, or 0 when it leads another verdict's by less than the neutral margin."""
        if not isinstance(response, dict) or not self._prompt.words.keys() <= response.keys():
            return Opinion(abstention=Abstention.ERROR)
        best: dict[int, float] = {}
        for word, verdict in self._prompt.words.items():
            value = cast("float", response[word]) + self._prompt.offsets_nats.get(word, 0.0)
            best[verdict] = max(value, best.get(verdict, value))
        (first, first_value), (_, second_value) = sorted(best.items(), key=lambda item: -item[1])[:2]
        return Opinion(verdict=first if first_value - second_value >= self._prompt.neutral_within_nats else 0)

    async def close(self) -> None:
        """Closes the engine clients."""
        await self._engine.close()
