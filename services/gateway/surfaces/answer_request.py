"""What a client asks for, whichever API it speaks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from schemas.events.base import Message

ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """One answer. None where the client leaves the choice to us."""

    model: str | None
    messages: list[Message]
    """At least one, in the form of chat completions: as sent there, converted elsewhere."""
    tools: list[Message]
    """In the form of chat completions."""
    stream: bool
    tool_choice: ToolChoice = "auto"
    named_tool: str | None = None
    """The one tool that must be called; `tool_choice` is `required` then."""
    max_tokens: int | None = None
    """Cap on sampled tokens."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[str, float] | None = None
    """By token id, in decimal."""
    min_tokens: int | None = None
    response_format: Mapping[str, Any] | None = None
    """In the form of chat completions."""
    top_logprobs: int = 0
    """How many of the likeliest tokens the client wants to see beside each of the answer's."""
    session_hint: str | None = None
    """A sign of the session in the body."""
    store: bool | None = None
    """False: the client wants nothing of this turn written down."""
