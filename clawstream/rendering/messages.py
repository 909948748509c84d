"""What clients send, made into what chat templates can render: pure, no tokenizer.

Messages come in OpenAI's form with all its variants; templates know strings, four roles and tool arguments as objects.
The client's own messages are never changed: they go on the log as sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from clawstream.errors import ContractError
from clawstream.rendering.text import replace_lone_surrogates_in
from schemas.events.base import Message

_TEXT_PARTS = ("text", "input_text", "output_text")
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions. Their signatures, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each call write a JSON object with the function's name and arguments within <tool_call></tool_call> tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)
"""Tells a model about tools when its template cannot. The form is that of Hermes and Qwen."""


@dataclass(frozen=True, slots=True)
class TemplateMessages:
    """Messages that a chat template can render."""

    messages: list[dict[str, Any]]
    repaired: str
    """What could not be kept as sent; empty when nothing was changed in meaning."""


def to_template_messages(messages: Sequence[Message]) -> TemplateMessages:
    """Normalises without changing what is said.

    `developer` becomes `system`, and leading system messages are joined into one; content arrays become their text;
    null becomes ""; tool arguments are parsed; halves of surrogate pairs are replaced. Tool arguments that are no JSON
    object are kept as `{"raw": text}` and reported in `repaired`. Raises ContractError for content that is not text.
    """
    if not messages:
        raise ContractError("messages is empty: there is nothing to answer")
    repairs: list[str] = []
    result: list[dict[str, Any]] = []
    for index, original in enumerate(messages):
        message = cast("dict[str, Any]", replace_lone_surrogates_in(original))
        role = {"developer": "system", "function": "tool"}.get(str(message.get("role")), message.get("role"))
        if not isinstance(role, str) or not role:
            raise ContractError(f"messages[{index}].role is missing")
        rendered: dict[str, Any] = {**message, "role": role, "content": _text_of(message.get("content"), index)}
        if role == "assistant" and message.get("tool_calls"):
            rendered["tool_calls"] = [
                _with_parsed_arguments(call, f"messages[{index}].tool_calls[{number}]", repairs)
                for number, call in enumerate(cast("Sequence[Any]", message["tool_calls"]))
            ]
        else:
            rendered.pop("tool_calls", None)
        if role == "system" and result and all(earlier["role"] == "system" for earlier in result):
            result[-1]["content"] = f"{result[-1]['content']}\n\n{rendered['content']}"
        else:
            result.append(rendered)
    return TemplateMessages(result, "; ".join(repairs))


def hoist_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All system messages joined in order at the front, for templates that allow only one there."""
    system = [str(message["content"]) for message in messages if message["role"] == "system"]
    others = [dict(message) for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(system)}, *others] if system else others


def spell_out_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Message], *, tool_definitions: bool, tool_calls: bool
) -> list[dict[str, Any]]:
    """Tools as text, for templates that do not know them.

    `tool_definitions` puts the definitions into the system message; `tool_calls` writes calls into the assistant's
    content and results as user messages.
    """
    result = [dict(message) for message in messages]
    if tool_calls:
        for message in result:
            if message["role"] == "tool":
                message |= {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            for call in message.pop("tool_calls", None) or ():
                body = orjson.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
                separator = "\n" if message["content"] else ""
                message["content"] += f"{separator}<tool_call>\n{body.decode()}\n</tool_call>"
    if tool_definitions and tools:
        header = TOOLS_HEADER.format(tools="\n".join(orjson.dumps(tool).decode() for tool in tools))
        if result[0]["role"] == "system":
            result[0]["content"] = f"{result[0]['content']}\n\n{header}"
        else:
            result.insert(0, {"role": "system", "content": header})
    return result


def _text_of(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ContractError(f"messages[{index}].content is neither text, null nor a list of parts")
    texts: list[str] = []
    for number, part in enumerate(cast("list[Any]", content)):
        if isinstance(part, str):
            texts.append(part)
            continue
        record = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind = record.get("type")
        text = record.get("refusal" if kind == "refusal" else "text")
        if (kind not in _TEXT_PARTS and kind != "refusal") or not isinstance(text, str):
            raise ContractError(f"messages[{index}].content[{number}] has type {kind!r}: this policy reads text only")
        texts.append(text)
    return "".join(texts)


def _with_parsed_arguments(call: Any, where: str, repairs: list[str]) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates need them."""
    record = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    function = cast("dict[str, Any]", record.get("function")) if isinstance(record.get("function"), dict) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        repairs.append(f"{where}.function.name is missing")
        name = ""
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = orjson.loads(text)
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"raw": text}
            repairs.append(f"{where}.function.arguments is no JSON object")
    elif not isinstance(arguments, dict):
        arguments = {"raw": orjson.dumps(arguments).decode()}
        repairs.append(f"{where}.function.arguments is no JSON object")
    return {**record, "type": "function", "function": {**function, "name": name, "arguments": arguments}}
