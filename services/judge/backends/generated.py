"""What judges that write text have in common: the prompts and the reading of the answers."""

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import JsonValue

from clawstream.errors import SettingsError
from schemas.events import NextStateEvent
from schemas.events.base import Message
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import Abstention, HintOpinion, ModelAnswer, Opinion, TextModel
from services.judge.evidence import gather
from services.judge.parsing import boxed_hint, boxed_verdict
from services.judge.prompts import PromptFile, filled, load_prompt

_CUT_OFF: Final = "length"


def judge_messages(template: str, next_state: NextStateEvent, max_characters: int) -> list[Message]:
    """The conversation with the judge model: one user message, since not every template knows a system role."""
    return [{"role": "user", "content": filled(template, gather(next_state, max_characters=max_characters))}]


def interpret_generation(response: JsonValue) -> Opinion:
    """The verdict in `{"text": ..., "finish_reason": ...}`. A text that was cut off has none, whatever it says."""
    text, abstention = _text(response)
    return Opinion(abstention=abstention) if abstention is not None else boxed_verdict(text)


def interpret_hint(response: JsonValue) -> HintOpinion:
    """The hint in it, by the same rules."""
    text, abstention = _text(response)
    return HintOpinion(abstention=abstention) if abstention is not None else boxed_hint(text)


class GeneratedHints:
    """Hint votes of a model that writes text."""

    def __init__(self, model: TextModel, prompt: PromptFile, *, max_prompt_characters: int) -> None:
        self._model = model
        self._prompt = prompt
        self._max_prompt_characters = max_prompt_characters

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        """The model's request with the hint prompt."""
        return self._model.request(judge_messages(self._prompt.text, next_state, self._max_prompt_characters))

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        """Asks the model once."""
        return await self._model.call(request, answers)

    def interpret(self, response: JsonValue) -> HintOpinion:
        """The hint after the reasoning."""
        return interpret_hint(response)


def hint_backend(spec: JudgeSpec, backend: object) -> GeneratedHints | None:
    """Where the hint votes of a completed spec come from; None when it has none. Raises SettingsError."""
    if not spec.judge_gives_hints or not spec.hint_prompt:
        return None
    if not isinstance(backend, TextModel):
        raise SettingsError(f"judge backend {spec.backend!r} writes no text, so it has no hint votes")
    return GeneratedHints(backend, load_prompt(spec.hint_prompt), max_prompt_characters=spec.max_prompt_characters)


def _text(response: JsonValue) -> tuple[str, Abstention | None]:
    if not isinstance(response, dict) or not isinstance(text := response.get("text"), str):
        return "", Abstention.ERROR
    return text, Abstention.TRUNCATED if response.get("finish_reason") == _CUT_OFF else None
