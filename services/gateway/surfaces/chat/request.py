"""The body of `/v1/chat/completions`, read leniently.

Unknown fields are ignored; what is known and cannot be honoured is refused.
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
    stop_strings,
    text,
)
from services.gateway.surfaces.tool_choice import choice_by_word, required_tool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """An answer, and what only clients of this API can ask for."""

    answer: AnswerRequest
    include_usage: bool
    """A last chunk with the usage is wanted."""
    logprobs: bool
    """The client wants the log-probs of its tokens."""


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Raises RequestRefused, status 400, naming the parameter."""
    if (choices := integer(body, "n", low=1)) not in (None, 1):
        raise refused(f"n is {choices}: one answer is given to a request", "n")
    if integer(body, "top_logprobs", low=0):
        raise refused("top_logprobs: only the log-prob of the sampled token is known; use 0", "top_logprobs")
    if body.get("functions"):
        raise refused("functions is the old form of tools; send tools", "functions")
    modalities = body.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise refused("modalities: this policy writes text only", "modalities")
    stream_options = mapping(body, "stream_options") or {}
    max_tokens = integer(body, "max_completion_tokens", low=1)
    if max_tokens is None:
        max_tokens = integer(body, "max_tokens", low=1)
    tools = objects(body, "tools")
    tool_choice, named_tool = read_tool_choice(body.get("tool_choice"), tools)
    answer = AnswerRequest(
        model=text(body, "model"),
        messages=_messages(body),
        tools=cast("list[Message]", tools),
        tool_choice=tool_choice,
        named_tool=named_tool,
        stream=bool(boolean(body, "stream")),
        max_tokens=max_tokens,
        temperature=number(body, "temperature", low=0.0, high=2.0),
        top_p=number(body, "top_p", low=0.0, high=1.0),
        top_k=integer(body, "top_k", low=-1),
        min_p=number(body, "min_p", low=0.0, high=1.0),
        frequency_penalty=number(body, "frequency_penalty", low=-2.0, high=2.0),
        presence_penalty=number(body, "presence_penalty", low=-2.0, high=2.0),
        repetition_penalty=number(body, "repetition_penalty", low=0.01, high=2.0),
        seed=integer(body, "seed", low=-(2**63)),
        stop=stop_strings(body, "stop"),
        logit_bias=mapping(body, "logit_bias") or None,
        min_tokens=integer(body, "min_tokens", low=0) or None,
        response_format=mapping(body, "response_format"),
        session_hint=session_hint(body),
        store=boolean(body, "store"),
    )
    return ChatRequest(
        answer,
        include_usage=bool(boolean(stream_options, "include_usage")),
        logprobs=bool(boolean(body, "logprobs")),
    )


def read_tool_choice(choice: object, tools: list[dict[str, Any]]) -> tuple[ToolChoice, str | None]:
    """`auto`, `none`, `required`, or the name of one tool. Raises RequestRefused for a tool that was not given."""
    if (chosen := choice_by_word(choice, tools)) is not None:
        return chosen
    if isinstance(choice, dict):
        record = cast("dict[str, Any]", choice)
        if record.get("type") == "function" and isinstance(record.get("function"), dict):
            return required_tool(record["function"].get("name"), tools)
    raise refused("tool_choice must be auto, none, required, or {type: function, function: {name}}", "tool_choice")


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages must be a list of at least one message", "messages")
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or not isinstance(cast("dict[str, Any]", message).get("role"), str):
            raise refused(f"messages[{index}] must be an object with a role", "messages")
        calls = cast("dict[str, Any]", message).get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise refused(f"messages[{index}].tool_calls must be a list", "messages")
    return cast("list[Message]", messages)
