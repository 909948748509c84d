"""The body of `/v1/responses`, read leniently and turned into the form of chat completions.

Unknown fields are ignored; what is known and cannot be honoured is refused. Nothing is kept on the server between two
requests, so every request brings its whole history, as agents do that send `store: false`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from schemas.events.base import Message
from services.gateway.surfaces.answer_request import AnswerRequest, ToolChoice
from services.gateway.surfaces.body_fields import (
    boolean,
    integer,
    mapping,
    number,
    objects,
    refused,
    session_hint,
    text,
)
from services.gateway.surfaces.responses.conversion import CUSTOM_TOOL_ARGUMENT, to_chat_messages
from services.gateway.surfaces.tool_choice import choice_by_word, required_tool

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "reasoning",
    "service_tier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
)
"""Fields of the request that the response repeats. None that names the user: clients put keys there."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """An answer, and what only clients of this API can ask for."""

    answer: AnswerRequest
    custom_tools: frozenset[str]
    """Tools that take free text instead of arguments."""
    echoed: Mapping[str, Any]
    """What the response repeats of the request."""


def read_responses_request(body: Mapping[str, Any]) -> ResponsesRequest:
    """Raises RequestRefused, status 400, naming the parameter."""
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise refused(
                f"{name}: this gateway keeps no conversations for clients; send the whole history in input",
                name,
                code="previous_response_not_found" if name == "previous_response_id" else "unsupported_parameter",
            )
    if body.get("background") is True:
        raise refused("background: answers are given on the request's own connection", "background")
    if integer(body, "top_logprobs", low=0):
        raise refused("top_logprobs: ask for logprobs on /v1/chat/completions", "top_logprobs")
    if body.get("prompt") is not None:
        raise refused("prompt: this gateway keeps no prompt templates; send instructions and input", "prompt")
    tools, custom_tools = _tools(objects(body, "tools"))
    tool_choice, named_tool = _tool_choice(body.get("tool_choice"), tools)
    answer = AnswerRequest(
        model=text(body, "model"),
        messages=to_chat_messages(text(body, "instructions"), body.get("input")),
        tools=tools,
        tool_choice=tool_choice,
        named_tool=named_tool,
        stream=bool(boolean(body, "stream")),
        max_tokens=integer(body, "max_output_tokens", low=1),
        temperature=number(body, "temperature", low=0.0, high=2.0),
        top_p=number(body, "top_p", low=0.0, high=1.0),
        response_format=_response_format(mapping(body, "text")),
        session_hint=session_hint(body),
        store=boolean(body, "store"),
    )
    echoed = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    return ResponsesRequest(answer, custom_tools, echoed)


def _tools(tools: list[dict[str, Any]]) -> tuple[list[Message], frozenset[str]]:
    """In the form of chat completions, and the names of the custom ones.

    Tools that a server would have to run are left out: the model never hears of them.
    """
    result: list[Message] = []
    custom: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.get("type") not in ("function", "custom"):
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise refused(f"tools[{index}] has no name", "tools")
        function: dict[str, Any] = {"name": name}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        if tool["type"] == "custom":
            custom.add(name)
            function["parameters"] = {
                "type": "object",
                "properties": {CUSTOM_TOOL_ARGUMENT: {"type": "string"}},
                "required": [CUSTOM_TOOL_ARGUMENT],
            }
        else:
            function["parameters"] = tool.get("parameters") or {"type": "object", "properties": {}}
        result.append({"type": "function", "function": function})
    return result, frozenset(custom)


def _tool_choice(choice: object, tools: list[Message]) -> tuple[ToolChoice, str | None]:
    given = cast("list[dict[str, Any]]", tools)
    if (chosen := choice_by_word(choice, given)) is not None:
        return chosen
    if isinstance(choice, dict):
        record = cast("dict[str, Any]", choice)
        if record.get("type") in ("function", "custom"):
            return required_tool(record.get("name") or "", given)
        if record.get("type") == "allowed_tools":
            return required_tool(None, given) if record.get("mode") == "required" else ("auto", None)
    raise refused("tool_choice must be auto, none, required, or name a function", "tool_choice")


def _response_format(settings: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """`text.format` as `response_format`."""
    chosen = mapping(settings or {}, "format")
    if chosen is None or chosen.get("type") != "json_schema":
        return chosen
    return {"type": "json_schema", "json_schema": {"name": chosen.get("name"), "schema": chosen.get("schema")}}
