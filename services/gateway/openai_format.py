"""Answers in OpenAI's form: the whole body, the chunks of a stream, server-sent events. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from clawstream.rendering.interface import AnswerDelta, ParsedAnswer
from schemas.events.base import Message

DONE_EVENT = b"data: [DONE]\n\n"
_LOGPROB_OF_NULL = -9999.0
"""What OpenAI reports for a log-prob too small to be stated; here: for one that the engine did not give."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, equal to the lengths of what was captured."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def assistant_message(answer: ParsedAnswer) -> Message:
    """The message that the client receives, and that the turn records."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = list(answer.tool_calls)
    return message


def finish_reason(engine_reason: str, answer: ParsedAnswer) -> str:
    """`stop`, `length` or `tool_calls`. An answer that was cut is `length` even when a call in it is complete."""
    if engine_reason == "length":
        return "length"
    return "tool_calls" if answer.tool_calls else "stop"


def logprob_entries(
    token_ids: Sequence[int], logprobs: Sequence[float | None], decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """The `logprobs` object for these tokens. Where the engine gave too few, what is there is matched from the left."""
    padded = [*logprobs[: len(token_ids)], *([None] * (len(token_ids) - len(logprobs)))]
    content: list[dict[str, Any]] = []
    for token_id, value in zip(token_ids, padded, strict=True):
        token = decode([token_id])
        content.append(
            {
                "token": token,
                "logprob": _LOGPROB_OF_NULL if value is None else value,
                "bytes": list(token.encode()),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


def sse_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def sse_comment(text: str) -> bytes:
    """A line that clients skip."""
    return f": {text}\n\n".encode()


class CompletionFormat:
    """Forms one answer's body or chunks."""

    def __init__(self, *, response_id: str, model: str, created: int, include_usage: bool) -> None:
        """`created` in seconds since 1970."""
        self._common: dict[str, Any] = {"id": response_id, "created": created, "model": model}
        self._include_usage = include_usage
        self._tool_calls_sent = 0

    def body(
        self, answer: ParsedAnswer, reason: str, usage: Usage, logprobs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        choice = {
            "index": 0,
            "message": assistant_message(answer),
            "finish_reason": reason,
            "logprobs": logprobs,
        }
        return {**self._common, "object": "chat.completion", "choices": [choice], "usage": usage.as_json()}

    def first_chunk(self) -> bytes:
        """Says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> bytes:
        """An empty delta. Clients' time-outs are reset by chunks only, not by comments."""
        return self._chunk({})

    def delta_chunks(self, delta: AnswerDelta, logprobs: Mapping[str, Any] | None) -> list[bytes]:
        """What was added, reasoning first, each tool call whole. Log-probs ride on the first of them.

        With log-probs there is a chunk even when the tokens added no text: none of them may be lost.
        """
        deltas: list[dict[str, Any]] = []
        if delta.reasoning:
            deltas.append({"reasoning_content": delta.reasoning})
        if delta.content:
            deltas.append({"content": delta.content})
        for call in delta.tool_calls:
            deltas.append({"tool_calls": [{"index": self._tool_calls_sent, **call}]})
            self._tool_calls_sent += 1
        if not deltas and logprobs and logprobs["content"]:
            deltas.append({"content": ""})
        return [self._chunk(content, logprobs=logprobs if index == 0 else None) for index, content in enumerate(deltas)]

    def last_chunks(self, reason: str, usage: Usage, *, recorded: bool) -> list[bytes]:
        """Finish reason; usage, if it was asked for; whether the turn was recorded, as a comment; the end."""
        chunks = [self._chunk({}, reason=reason)]
        if self._include_usage:
            chunks.append(
                sse_event({**self._common, "object": "chat.completion.chunk", "choices": [], "usage": usage.as_json()})
            )
        return [*chunks, sse_comment(f"x-clawstream-recorded: {str(recorded).lower()}"), DONE_EVENT]

    def _chunk(
        self, delta: Mapping[str, Any], *, reason: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        chunk: dict[str, Any] = {**self._common, "object": "chat.completion.chunk", "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return sse_event(chunk)
