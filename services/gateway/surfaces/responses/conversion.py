"""Input items of the responses API in the form of chat completions: pure.

What the assistant said in one go (reasoning, text, calls) are several items there, and one message here.
"""

from typing import Any, cast

import orjson

from schemas.events.base import Message
from services.gateway.surfaces.body_fields import refused

CUSTOM_TOOL_ARGUMENT = "input"
"""A custom tool takes one text: for the model it is a function with this one argument."""
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_IGNORED_ITEMS = ("web_search_call", "file_search_call", "image_generation_call", "compaction_trigger")
"""What other servers' own tools did: no chat template could render it."""


def to_chat_messages(instructions: str | None, given: object) -> list[Message]:
    """Raises RequestRefused, naming the item, for what this policy cannot read."""
    result: list[Message] = []
    if instructions:
        result.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*result, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise refused("input must be a text or a list of at least one item", "input")
    assistant = _Assistant()
    for index, item in enumerate(cast("list[Any]", given)):
        if not isinstance(item, dict):
            raise refused(f"input[{index}] must be an object", "input")
        record = cast("dict[str, Any]", item)
        if not assistant.takes(record):
            result += assistant.message()
            assistant = _Assistant()
        if not assistant.add(record, f"input[{index}]"):
            result += _other_item(record, f"input[{index}]")
    return result + assistant.message()


class _Assistant:
    """One message of the assistant, put together from its items."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Any] = []
        self._last = ""
        self._has_text = False

    def takes(self, item: dict[str, Any]) -> bool:
        """Whether `item` belongs to the same message. Two messages in a row are two."""
        kind = _kind(item)
        if kind == "message" and item.get("role") == "assistant":
            return self._last != "message"
        return kind in ("reasoning", "function_call", "custom_tool_call")

    def add(self, item: dict[str, Any], where: str) -> bool:
        """False when the item is not the assistant's."""
        kind = _kind(item)
        if kind == "message" and item.get("role") == "assistant":
            self._texts.append(_text_of(item.get("content"), f"{where}.content"))
            self._has_text = True
        elif kind == "reasoning":
            self._reasoning.append(_text_of(item.get("content") or item.get("summary"), where))
        elif kind in ("function_call", "custom_tool_call"):
            self._calls.append(_call(item, kind))
        else:
            return False
        self._last = kind
        return True

    def message(self) -> list[Message]:
        """The message, or nothing."""
        if not self._last:
            return []
        content = "".join(self._texts) if self._has_text or not self._calls else None
        message: Message = {"role": "assistant", "content": content}
        if any(self._reasoning):
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return [message]


def _other_item(item: dict[str, Any], where: str) -> list[Message]:
    kind = _kind(item)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise refused(f"{where}.role must be user, assistant, system or developer", "input")
        return [{"role": role, "content": _text_of(item.get("content"), f"{where}.content")}]
    if kind in _OUTPUTS:
        content = _text_of(item.get("output"), f"{where}.output")
        return [{"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content}]
    if kind == "item_reference":
        raise refused(f"{where} refers to an item, but this gateway keeps none: send the item itself", "input")
    if kind in _IGNORED_ITEMS:
        return []
    raise refused(f"{where} has type {str(kind)[:40]!r}, which this policy cannot read", "input")


def _kind(item: dict[str, Any]) -> object:
    return item.get("type") or ("message" if "role" in item else None)


def _call(item: dict[str, Any], kind: str) -> dict[str, Any]:
    arguments = item.get("arguments")
    if kind == "custom_tool_call":
        arguments = orjson.dumps({CUSTOM_TOOL_ARGUMENT: str(item.get("input") or "")}).decode()
    elif not isinstance(arguments, str):
        arguments = orjson.dumps({} if arguments is None else arguments).decode()
    function = {"name": str(item.get("name") or ""), "arguments": arguments}
    return {"id": str(item.get("call_id") or item.get("id") or ""), "type": "function", "function": function}


def _text_of(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(f"{where} must be a text or a list of parts", "input")
    texts: list[str] = []
    for number, part in enumerate(cast("list[Any]", content)):
        record = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind = record.get("type")
        said = record.get("refusal") if kind == "refusal" else record.get("text")
        if (kind not in _TEXT_PARTS and kind != "refusal") or not isinstance(said, str):
            raise refused(
                f"{where}[{number}] has type {str(kind)[:40]!r}: this policy reads text only",
                "input",
                code="invalid_messages",
            )
        texts.append(said)
    return "".join(texts)
