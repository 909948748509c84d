"""Anthropic's messages in the form of chat completions: pure.

A user message that carries tool results and text becomes tool messages and a user message, in the order given.
"""

from typing import Any, cast

import orjson

from schemas.events.base import Message
from services.gateway.surfaces.body_fields import refused

_IGNORED_ASSISTANT_BLOCKS = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "fallback")
"""Nothing that a chat template could render."""


def to_chat_messages(system: object, messages: object) -> list[Message]:
    """Raises RequestRefused, naming the place, for what is not text, tool use or tool result."""
    if not isinstance(messages, list) or not messages:
        raise refused("messages must be a list of at least one message", "messages")
    result: list[Message] = []
    if (instructions := _system_text(system)) is not None:
        result.append({"role": "system", "content": instructions})
    for index, message in enumerate(cast("list[Any]", messages)):
        where = f"messages[{index}]"
        record = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        blocks = _blocks(record.get("content"), f"{where}.content")
        match record.get("role"):
            case "user":
                result += _user_messages(blocks, f"{where}.content")
            case "assistant":
                result.append(_assistant_message(blocks, f"{where}.content"))
            case "system":
                result.append({"role": "system", "content": _joined_text(blocks, f"{where}.content")})
            case _:
                raise refused(f"{where}.role must be user or assistant", "messages")
    return result


def _system_text(system: object) -> str | None:
    if system is None:
        return None
    return _joined_text(_blocks(system, "system"), "system") or None


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in cast("list[Any]", content)):
        raise refused(f"{where} must be a text or a list of content blocks", "messages")
    return cast("list[dict[str, Any]]", content)


def _text(block: dict[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind == "search_result":
        parts = _blocks(block.get("content"), where)
        return "\n".join([str(block.get("title", "")), str(block.get("source", "")), _joined_text(parts, where)])
    if kind == "document":
        source = cast("dict[str, Any]", block.get("source")) if isinstance(block.get("source"), dict) else {}
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return source["data"]
    if kind != "text" or not isinstance(block.get("text"), str):
        raise refused(
            f"{where} has type {str(kind)[:40]!r}: this policy reads text only", "messages", code="invalid_messages"
        )
    return block["text"]


def _joined_text(blocks: list[dict[str, Any]], where: str) -> str:
    return "".join(_text(block, f"{where}[{number}]") for number, block in enumerate(blocks))


def _user_messages(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    result: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            result.append({"role": "user", "content": "".join(texts)})
            texts.clear()

    for number, block in enumerate(blocks):
        here = f"{where}[{number}]"
        if block.get("type") != "tool_result":
            texts.append(_text(block, here))
            continue
        flush()
        answer: Message = {
            "role": "tool",
            "tool_call_id": str(block.get("tool_use_id", "")),
            "content": _joined_text(_blocks(block.get("content"), f"{here}.content"), f"{here}.content"),
        }
        if block.get("is_error") is True:
            answer["is_error"] = True
        result.append(answer)
    flush()
    return result or [{"role": "user", "content": ""}]


def _assistant_message(blocks: list[dict[str, Any]], where: str) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for number, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                reasoning.append(str(block.get("thinking") or ""))
            case "tool_use":
                arguments = block.get("input")
                function = {
                    "name": str(block.get("name") or ""),
                    "arguments": orjson.dumps({} if arguments is None else arguments).decode(),
                }
                calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
            case kind if kind in _IGNORED_ASSISTANT_BLOCKS:
                continue
            case _:
                texts.append(_text(block, f"{where}[{number}]"))
    message: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message
