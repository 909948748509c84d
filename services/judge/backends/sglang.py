"""Judges by an SGLang engine: ids in, text out, a boxed verdict after the reasoning."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import JsonValue

from clawstream.engine.pool import EnginePool
from clawstream.rendering.interface import ChatRenderer
from schemas.events import NextStateEvent
from schemas.events.base import Message
from schemas.judge_spec import JudgeSpec
from services.judge.backends.generated import interpret_generation, judge_messages
from services.judge.backends.interface import ModelAnswer, Opinion
from services.judge.prompts import PromptFile


class SglangBackend:
    """Renders the prompt itself; one call samples all votes."""

    def __init__(self, spec: JudgeSpec, prompt: PromptFile, engine: EnginePool, renderer: ChatRenderer) -> None:
        self._spec = spec
        self._prompt = prompt
        self._engine = engine
        self._renderer = renderer

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        """The request with the verdict prompt."""
        return self.request(judge_messages(self._prompt.text, next_state, self._spec.max_prompt_characters))

    def request(self, messages: Sequence[Message]) -> Mapping[str, JsonValue]:
        """The rendered ids and the sampling parameters."""
        return {
            "model": self._spec.model,
            "input_ids": cast("list[JsonValue]", self._renderer.render(messages).token_ids),
            "sampling_params": {
                "temperature": self._spec.temperature,
                "max_new_tokens": self._spec.max_new_tokens,
                "stop_token_ids": cast("list[JsonValue]", self._renderer.stop_token_ids),
            },
        }

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """Text and finish reason of each. SGLang tells the tokens of each one."""
        texts = await self._engine.generate_texts(
            cast("list[int]", request["input_ids"]),
            cast("dict[str, Any]", request["sampling_params"]),
            answers=answers,
        )
        return [_answer(text, meta) for text, meta in texts]

    def interpret(self, response: JsonValue) -> Opinion:
        """The boxed verdict."""
        return interpret_generation(response)

    async def close(self) -> None:
        """Closes the engine clients."""
        await self._engine.close()


def _answer(text: str, meta: Mapping[str, Any]) -> ModelAnswer:
    finish: object = meta.get("finish_reason")
    reason = cast("dict[str, Any]", finish).get("type") if isinstance(finish, dict) else finish
    return ModelAnswer(
        response={"text": text, "finish_reason": str(reason)},
        prompt_tokens=_count(meta, "prompt_tokens"),
        completion_tokens=_count(meta, "completion_tokens"),
    )


def _count(meta: Mapping[str, Any], name: str) -> int:
    value = meta.get(name)
    return value if isinstance(value, int) and value >= 0 else 0
