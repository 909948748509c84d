"""The body of `/v1/messages`, read leniently and turned into the form of chat completions.

Unknown fields are ignored; what is known and cannot be honoured is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

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
    stop_strings,
    text,
)
from services.gateway.surfaces.messages.conversion import to_chat_messages
from services.gateway.surfaces.tool_choice import required_tool

_SESSION_IN_USER_ID = re.compile(r"session_([0-9A-Za-z-]{8,})")
"""Claude Code puts its session into `metadata.user_id`."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """An answer, and what only clients of this API can ask for."""

    answer: AnswerRequest
    show_thinking: bool
    """The client wants to see the reasoning."""


def read_messages_request(body: Mapping[str, Any]) -> MessagesRequest:
    """Raises RequestRefused, status 400, naming the parameter."""
    if body.get("mcp_servers"):
        raise refused("mcp_servers: this gateway calls no servers; give the tools themselves", "mcp_servers")
    if body.get("container"):
        raise refused("container: this gateway runs no code", "container")
    tools = _tools(objects(body, "tools"))
    tool_choice, named_tool = _tool_choice(mapping(body, "tool_choice"), tools)
    thinking = mapping(body, "thinking") or {}
    answer = AnswerRequest(
        model=text(body, "model"),
        messages=to_chat_messages(body.get("system"), body.get("messages")),
        tools=tools,
        tool_choice=tool_choice,
        named_tool=named_tool,
        stream=bool(boolean(body, "stream")),
        max_tokens=integer(body, "max_tokens", low=1),
        temperature=number(body, "temperature", low=0.0, high=2.0),
        top_p=number(body, "top_p", low=0.0, high=1.0),
        top_k=integer(body, "top_k", low=-1),
        stop=stop_strings(body, "stop_sequences"),
        response_format=_response_format(body),
        session_hint=session_hint(body) or _session_in_metadata(body),
        store=boolean(body, "store"),
    )
    return MessagesRequest(answer, show_thinking=thinking.get("type") in ("enabled", "adaptive"))


def _tools(tools: list[dict[str, Any]]) -> list[Message]:
    """In the form of chat completions. Tools that Anthropic itself runs are left out: the model never hears of them."""
    result: list[Message] = []
    for index, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise refused(f"tools[{index}] has no name", "tools")
        function: dict[str, Any] = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        result.append({"type": "function", "function": function})
    return result


def _tool_choice(choice: Mapping[str, Any] | None, tools: list[Message]) -> tuple[ToolChoice, str | None]:
    kind = "auto" if choice is None else choice.get("type")
    given = cast("list[dict[str, Any]]", tools)
    if choice is None or kind == "auto":
        return "auto", None
    if kind == "none":
        return "none", None
    if kind == "any":
        return required_tool(None, given)
    if kind == "tool":
        return required_tool(choice.get("name") or "", given)
    raise refused("tool_choice.type must be auto, any, tool or none", "tool_choice")


def _response_format(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`output_config.format`, or the older `output_format`."""
    config = mapping(body, "output_config") or {}
    chosen = mapping(config, "format") or mapping(body, "output_format")
    if chosen is None:
        return None
    if chosen.get("type") != "json_schema" or not isinstance(chosen.get("schema"), dict):
        raise refused("output_config.format must be of type json_schema with a schema", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": chosen["schema"]}}


def _session_in_metadata(body: Mapping[str, Any]) -> str | None:
    user_id = (mapping(body, "metadata") or {}).get("user_id")
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            record: Any = orjson.loads(user_id)
        except orjson.JSONDecodeError:
            return None
        session = cast("dict[str, Any]", record).get("session_id") if isinstance(record, dict) else None
        return session if isinstance(session, str) else None
    match = _SESSION_IN_USER_ID.search(user_id)
    return match[1] if match else None
