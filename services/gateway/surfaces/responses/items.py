"""Parts of an answer as output items of the responses API. Pure."""

from collections.abc import Collection
from typing import Any

import orjson

from clawstream.rendering.interface import AnswerPart, ContentPart, ReasoningPart, ToolCallPart
from services.gateway.surfaces.responses.conversion import CUSTOM_TOOL_ARGUMENT


def item_id(part: AnswerPart, response_id: str, index: int, custom_tools: Collection[str]) -> str:
    """The item's id: it follows from the response's, so that streamed and whole answers agree."""
    match part:
        case ReasoningPart():
            prefix = "rs"
        case ContentPart():
            prefix = "msg"
        case ToolCallPart():
            prefix = "ctc" if is_custom(part, custom_tools) else "fc"
    return f"{prefix}_{response_id.partition('_')[2]}_{index}"


def is_custom(part: ToolCallPart, custom_tools: Collection[str]) -> bool:
    """Whether the call is of a tool that takes free text."""
    return part.call["function"]["name"] in custom_tools


def call_text(part: ToolCallPart, custom_tools: Collection[str]) -> str:
    """What the tool is given: its arguments as JSON, or the free text."""
    arguments: str = part.call["function"]["arguments"]
    if not is_custom(part, custom_tools):
        return arguments
    given = orjson.loads(arguments).get(CUSTOM_TOOL_ARGUMENT)
    return given if isinstance(given, str) else arguments


def output_item(
    part: AnswerPart, identity: str, custom_tools: Collection[str], *, status: str = "completed"
) -> dict[str, Any]:
    """The item with all that is in it."""
    empty = empty_item(part, identity, custom_tools)
    match part:
        case ReasoningPart():
            return {**empty, "status": status, "content": [{"type": "reasoning_text", "text": part.text}]}
        case ContentPart():
            return {**empty, "status": status, "content": [text_part(part.text)]}
        case ToolCallPart():
            name = "input" if is_custom(part, custom_tools) else "arguments"
            return {**empty, "status": status, name: call_text(part, custom_tools)}


def empty_item(part: AnswerPart, identity: str, custom_tools: Collection[str]) -> dict[str, Any]:
    """The item as it is announced."""
    common: dict[str, Any] = {"id": identity, "status": "in_progress"}
    match part:
        case ReasoningPart():
            return {**common, "type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
        case ContentPart():
            return {**common, "type": "message", "role": "assistant", "content": []}
        case ToolCallPart():
            call = {**common, "call_id": part.call["id"], "name": part.call["function"]["name"]}
            if is_custom(part, custom_tools):
                return {**call, "type": "custom_tool_call", "input": ""}
            return {**call, "type": "function_call", "arguments": ""}


def text_part(text: str) -> dict[str, Any]:
    """A message's one content part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
