"""What a running generation tells whoever puts it on the wire."""

from dataclasses import dataclass

from clawstream.engine.interface import TopLogprobs
from clawstream.errors import RequestRefused
from clawstream.rendering.interface import AnswerDelta, ParsedAnswer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, equal to the lengths of what was captured."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in the engine's prefix cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens and what they added."""

    delta: AnswerDelta
    token_ids: list[int]
    """[new_tokens]"""
    logprobs: list[float | None]
    """[new_tokens] in nats, if the engine is right."""
    top_logprobs: list[TopLogprobs]
    """[new_tokens], or empty where the client wants none."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete and safe."""

    answer: ParsedAnswer
    reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_string: str | None
    """Which of the client's stop strings ended it, if one did."""
    usage: Usage
    token_ids: list[int]
    """[response_tokens]"""
    logprobs: list[float | None]
    """[response_tokens] if the engine is right."""
    top_logprobs: list[TopLogprobs]
    """[response_tokens], or empty where the client wants none."""
    recorded: bool
    """False: the outbox was full, or the client opted out."""


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no (further) answer."""

    refusal: RequestRefused


GenerationEvent = Piece | Finished | Failed
