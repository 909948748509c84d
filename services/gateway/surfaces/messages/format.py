"""Answers as Anthropic's messages: the whole body, and the events of a stream. Pure.

Each run of reasoning or text, and each tool call, is one content block, in the order in which they were said.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from clawstream.errors import RequestRefused
from clawstream.rendering.interface import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from services.gateway.generation_events import Finished, Piece, Usage
from services.gateway.surfaces.messages.errors import error_body
from services.gateway.surfaces.server_sent_events import recorded_comment, sse_event
from services.gateway.surfaces.surface import AnswerContext


class MessagesFormat:
    """Implements `services.gateway.surfaces.surface.AnswerFormat`."""

    def __init__(self, context: AnswerContext, *, show_thinking: bool) -> None:
        """Without `show_thinking` reasoning is left out: clients that did not ask for it do not know the block."""
        self._context = context
        self._show_thinking = show_thinking
        self._index = -1
        """Of the block that was opened last."""
        self._open: type[AnswerPart] | None = None
        """What the open block holds; None when no block is open."""

    def body(self, finished: Finished) -> dict[str, Any]:
        return {
            **self._message(),
            "content": [_block(part) for part in finished.answer.parts if self._is_shown(part)],
            **_stop(finished),
            "usage": usage_object(finished.usage),
        }

    def first_chunks(self) -> list[bytes]:
        usage = usage_object(Usage(self._context.prompt_tokens, 0, 0))
        message: dict[str, Any] = {
            **self._message(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [_event("message_start", message=message)]

    def keep_alive(self) -> list[bytes]:
        return [_event("ping")]

    def piece_chunks(self, piece: Piece) -> list[bytes]:
        return [chunk for part in piece.delta.parts if self._is_shown(part) for chunk in self._part_chunks(part)]

    def last_chunks(self, finished: Finished) -> list[bytes]:
        return [
            *self._close(),
            _event("message_delta", delta=_stop(finished), usage=usage_object(finished.usage)),
            recorded_comment(finished.recorded),
            _event("message_stop"),
        ]

    def failure_chunks(self, refusal: RequestRefused) -> list[bytes]:
        return [sse_event(error_body(refusal), "error")]

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._context.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
        }

    def _is_shown(self, part: AnswerPart) -> bool:
        return self._show_thinking or not isinstance(part, ReasoningPart)

    def _part_chunks(self, part: AnswerPart) -> list[bytes]:
        chunks: list[bytes] = []
        if isinstance(part, ToolCallPart) or self._open is not type(part):
            chunks += self._close()
            self._index += 1
            self._open = type(part)
            chunks.append(_event("content_block_start", index=self._index, content_block=_empty_block(part)))
        match part:
            case ReasoningPart():
                delta = {"type": "thinking_delta", "thinking": part.text}
            case ContentPart():
                delta = {"type": "text_delta", "text": part.text}
            case ToolCallPart():
                delta = {"type": "input_json_delta", "partial_json": part.call["function"]["arguments"]}
        chunks.append(_event("content_block_delta", index=self._index, delta=delta))
        return chunks

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        chunks: list[bytes] = []
        if self._open is ReasoningPart:
            signature = {"type": "signature_delta", "signature": ""}
            chunks.append(_event("content_block_delta", index=self._index, delta=signature))
        self._open = None
        return [*chunks, _event("content_block_stop", index=self._index)]


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` object: tokens from the prefix cache are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(finished: Finished) -> dict[str, Any]:
    if finished.reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finished.reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finished.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _block(part: AnswerPart) -> dict[str, Any]:
    match part:
        case ReasoningPart():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case ContentPart():
            return {"type": "text", "text": part.text}
        case ToolCallPart():
            return {**_empty_block(part), "input": orjson.loads(part.call["function"]["arguments"])}


def _empty_block(part: AnswerPart) -> dict[str, Any]:
    match part:
        case ReasoningPart():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ContentPart():
            return {"type": "text", "text": ""}
        case ToolCallPart():
            return {"type": "tool_use", "id": part.call["id"], "name": part.call["function"]["name"], "input": {}}


def _event(kind: str, /, **fields: Mapping[str, Any] | int) -> bytes:
    return sse_event({"type": kind, **fields}, kind)
