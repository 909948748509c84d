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

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""`developer` is rendered as `system`, and `function` as `tool`."""
MAX_TOP_LOGPROBS = 20
"""As OpenAI allows."""


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
    logprobs = bool(boolean(body, "logprobs"))
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
        logit_bias=_logit_bias(body),
        min_tokens=integer(body, "min_tokens", low=0) or None,
        response_format=mapping(body, "response_format"),
        top_logprobs=_top_logprobs(body, logprobs=logprobs),
        session_hint=session_hint(body),
        store=boolean(body, "store"),
    )
    return ChatRequest(
        answer,
        include_usage=bool(boolean(stream_options, "include_usage")),
        logprobs=logprobs,
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


def _top_logprobs(body: Mapping[str, Any], *, logprobs: bool) -> int:
    wanted = integer(body, "top_logprobs", low=0) or 0
    if wanted > MAX_TOP_LOGPROBS:
        raise refused(f"top_logprobs is {wanted}; it must be at most {MAX_TOP_LOGPROBS}", "top_logprobs")
    if wanted and not logprobs:
        raise refused("top_logprobs needs logprobs: true", "top_logprobs")
    return wanted


def _logit_bias(body: Mapping[str, Any]) -> dict[str, float] | None:
    """By token id, in decimal. Which ids there are is not known here."""
    given = mapping(body, "logit_bias") or {}
    for key in given:
        if not (key.isascii() and key.isdecimal()):
            raise refused(f"logit_bias has the key {key[:40]!r}, which is no token id", "logit_bias")
    biases: dict[str, float] = {}
    for key, bias in given.items():
        if bias is None:
            continue
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise refused(f"logit_bias of {key[:40]} must be a number between -100 and 100", "logit_bias")
        biases[str(int(key))] = bias
    return biases or None


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refused("messages must be a list of at least one message", "messages")
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or not isinstance(role := cast("dict[str, Any]", message).get("role"), str):
            raise refused(f"messages[{index}] must be an object with a role", "messages")
        if role not in ROLES:
            # A template would write it into the prompt as it is: a turn of a kind that the model never saw.
            raise refused(f"messages[{index}].role is {role[:40]!r}; it must be one of {', '.join(ROLES)}", "messages")
        calls = cast("dict[str, Any]", message).get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise refused(f"messages[{index}].tool_calls must be a list", "messages")
    return cast("list[Message]", messages)
