"""Answers as responses: the whole body, and the events of a stream. Pure.

Each run of reasoning or text, and each tool call, is one output item, in the order in which they were said.
"""

from collections.abc import Mapping
from typing import Any

from clawstream.errors import RequestRefused
from clawstream.rendering.interface import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from services.gateway.generation_events import Finished, Piece, Usage
from services.gateway.surfaces.responses.items import (
    call_text,
    empty_item,
    is_custom,
    item_id,
    output_item,
    text_part,
)
from services.gateway.surfaces.responses.request import ResponsesRequest
from services.gateway.surfaces.server_sent_events import recorded_comment, sse_event
from services.gateway.surfaces.surface import AnswerContext


class ResponsesFormat:
    """Implements `services.gateway.surfaces.surface.AnswerFormat`."""

    def __init__(self, context: AnswerContext, request: ResponsesRequest) -> None:
        self._context = context
        self._request = request
        self._sequence_number = 0
        self._done: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open: AnswerPart | None = None
        """What was said so far in the open item."""

    def body(self, finished: Finished) -> dict[str, Any]:
        items = [
            output_item(part, self._item_id(part, index), self._request.custom_tools)
            for index, part in enumerate(finished.answer.parts)
        ]
        return self._response(finished, items)

    def first_chunks(self) -> list[bytes]:
        response = self._unfinished("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def keep_alive(self) -> list[bytes]:
        """The API has no empty delta; this event may be repeated."""
        return [self._event("response.in_progress", response=self._unfinished("in_progress"))]

    def piece_chunks(self, piece: Piece) -> list[bytes]:
        return [chunk for part in piece.delta.parts for chunk in self._part_chunks(part)]

    def last_chunks(self, finished: Finished) -> list[bytes]:
        chunks = self._close()
        kind = "response.incomplete" if finished.reason == "length" else "response.completed"
        return [
            *chunks,
            recorded_comment(finished.recorded),
            self._event(kind, response=self._response(finished, self._done)),
        ]

    def failure_chunks(self, refusal: RequestRefused) -> list[bytes]:
        """The event of the API and the response's own end: clients know either."""
        error = {"code": refusal.code or "server_error", "message": str(refusal)}
        failed = {**self._unfinished("failed"), "error": error}
        return [
            self._event("error", **error, param=refusal.parameter),
            self._event("response.failed", response=failed),
        ]

    # ---- items

    def _part_chunks(self, part: AnswerPart) -> list[bytes]:
        chunks: list[bytes] = []
        if isinstance(part, ToolCallPart) or type(self._open) is not type(part):
            chunks += [*self._close(), *self._announce(part)]
        match part:
            case ToolCallPart():
                kind = "custom_tool_call_input" if self._is_custom(part) else "function_call_arguments"
                said = call_text(part, self._request.custom_tools)
                chunks.append(self._item_event(f"response.{kind}.delta", part, delta=said))
                self._open = part
            case ReasoningPart():
                chunks.append(self._item_event("response.reasoning_text.delta", part, content_index=0, delta=part.text))
                before = self._open.text if isinstance(self._open, ReasoningPart) else ""
                self._open = ReasoningPart(before + part.text)
            case ContentPart():
                fields: dict[str, Any] = {"content_index": 0, "delta": part.text, "logprobs": []}
                chunks.append(self._item_event("response.output_text.delta", part, **fields))
                before = self._open.text if isinstance(self._open, ContentPart) else ""
                self._open = ContentPart(before + part.text)
        return chunks

    def _announce(self, part: AnswerPart) -> list[bytes]:
        index = len(self._done)
        item = empty_item(part, self._item_id(part, index), self._request.custom_tools)
        chunks = [self._event("response.output_item.added", output_index=index, item=item)]
        if isinstance(part, ContentPart):
            chunks.append(self._item_event("response.content_part.added", part, content_index=0, part=text_part("")))
        return chunks

    def _close(self) -> list[bytes]:
        """The end of the open item, if there is one."""
        part, self._open = self._open, None
        if part is None:
            return []
        index = len(self._done)
        chunks: list[bytes] = []
        match part:
            case ToolCallPart():
                said = call_text(part, self._request.custom_tools)
                if self._is_custom(part):
                    chunks.append(self._item_event("response.custom_tool_call_input.done", part, input=said))
                else:
                    name = part.call["function"]["name"]
                    chunks.append(
                        self._item_event("response.function_call_arguments.done", part, name=name, arguments=said)
                    )
            case ReasoningPart():
                chunks.append(self._item_event("response.reasoning_text.done", part, content_index=0, text=part.text))
            case ContentPart():
                fields: dict[str, Any] = {"content_index": 0, "text": part.text, "logprobs": []}
                chunks.append(self._item_event("response.output_text.done", part, **fields))
                whole = text_part(part.text)
                chunks.append(self._item_event("response.content_part.done", part, content_index=0, part=whole))
        item = output_item(part, self._item_id(part, index), self._request.custom_tools)
        chunks.append(self._event("response.output_item.done", output_index=index, item=item))
        self._done.append(item)
        return chunks

    def _is_custom(self, part: ToolCallPart) -> bool:
        return is_custom(part, self._request.custom_tools)

    def _item_id(self, part: AnswerPart, index: int) -> str:
        return item_id(part, self._context.response_id, index, self._request.custom_tools)

    # ---- the response

    def _response(self, finished: Finished, items: list[dict[str, Any]]) -> dict[str, Any]:
        is_cut = finished.reason == "length"
        return {
            **self._unfinished("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": items,
            "usage": usage_object(finished.usage),
        }

    def _unfinished(self, status: str) -> dict[str, Any]:
        return {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "instructions": None,
            "metadata": {},
            "temperature": None,
            "top_p": None,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "max_output_tokens": None,
            **self._request.echoed,
            "id": self._context.response_id,
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._context.model,
            "output": list(self._done),
            "previous_response_id": None,
            "store": False,
            "usage": None,
        }

    def _item_event(self, kind: str, about: AnswerPart, /, **fields: Any) -> bytes:
        index = len(self._done)
        return self._event(kind, item_id=self._item_id(about, index), output_index=index, **fields)

    def _event(self, kind: str, /, **fields: Mapping[str, Any] | str | int | None) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return sse_event(event, kind)


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
