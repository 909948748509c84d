"""The body of `/v1/chat/completions`, read leniently.

Unknown fields are ignored; what is known and cannot be honoured is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from clawstream.errors import RequestRefused
from schemas.events.base import Message

_MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks for. None where it leaves the choice to us."""

    model: str | None
    messages: list[Message]
    """At least one, as sent."""
    tools: list[Message]
    """As sent."""
    tool_choice_none: bool
    """The client forbids tools in this answer."""
    stream: bool
    include_usage: bool
    """A last chunk with the usage is wanted."""
    max_tokens: int | None
    """Cap on sampled tokens."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: list[str]
    logit_bias: Mapping[str, Any] | None
    min_tokens: int | None
    response_format: Mapping[str, Any] | None
    logprobs: bool
    """The client wants the log-probs of its tokens."""
    session_hint: str | None
    """A sign of the session in the body."""


def read_chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Raises RequestRefused, status 400, naming the parameter."""
    if (choices := _integer(body, "n", low=1)) not in (None, 1):
        raise _refused(f"n is {choices}: one answer is given to a request", "n")
    if _integer(body, "top_logprobs", low=0):
        raise _refused("top_logprobs: only the log-prob of the sampled token is known; use 0", "top_logprobs")
    if body.get("functions"):
        raise _refused("functions is the old form of tools; send tools", "functions")
    stream_options = _mapping(body, "stream_options") or {}
    max_tokens = _integer(body, "max_completion_tokens", low=1)
    if max_tokens is None:
        max_tokens = _integer(body, "max_tokens", low=1)
    return ChatRequest(
        model=_text(body, "model"),
        messages=_messages(body),
        tools=_tools(body),
        tool_choice_none=body.get("tool_choice") == "none",
        stream=_boolean(body, "stream"),
        include_usage=_boolean(stream_options, "include_usage"),
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", low=0.0, high=2.0),
        top_p=_number(body, "top_p", low=0.0, high=1.0),
        top_k=_integer(body, "top_k", low=-1),
        min_p=_number(body, "min_p", low=0.0, high=1.0),
        frequency_penalty=_number(body, "frequency_penalty", low=-2.0, high=2.0),
        presence_penalty=_number(body, "presence_penalty", low=-2.0, high=2.0),
        repetition_penalty=_number(body, "repetition_penalty", low=0.01, high=2.0),
        seed=_integer(body, "seed", low=-(2**63)),
        stop=_stop(body),
        logit_bias=_mapping(body, "logit_bias") or None,
        min_tokens=_integer(body, "min_tokens", low=0) or None,
        response_format=_mapping(body, "response_format"),
        logprobs=_boolean(body, "logprobs"),
        session_hint=_session_hint(body),
    )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages must be a list of at least one message", "messages")
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or not isinstance(cast("dict[str, Any]", message).get("role"), str):
            raise _refused(f"messages[{index}] must be an object with a role", "messages")
        calls = cast("dict[str, Any]", message).get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise _refused(f"messages[{index}].tool_calls must be a list", "messages")
    return cast("list[Message]", messages)


def _tools(body: Mapping[str, Any]) -> list[Message]:
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise _refused("tools must be a list of objects", "tools")
    return cast("list[Message]", tools)


def _stop(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop")
    if stop is None:
        return []
    listed = cast("list[Any]", stop) if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) for text in listed):
        raise _refused("stop must be a text or a list of texts", "stop")
    if len(listed) > _MAX_STOP_STRINGS:
        raise _refused(f"at most {_MAX_STOP_STRINGS} stop strings", "stop")
    return [text for text in cast("list[str]", listed) if text]


def _session_hint(body: Mapping[str, Any]) -> str | None:
    metadata = body.get("metadata")
    candidates = (
        body.get("prompt_cache_key"),
        body.get("session_id"),
        cast("dict[str, Any]", metadata).get("session_id") if isinstance(metadata, dict) else None,
    )
    return next((value for value in candidates if isinstance(value, str) and value.strip()), None)


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise _refused(f"{name} must be a text", name)
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _refused(f"{name} must be true or false", name)
    return bool(value)


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise _refused(f"{name} must be an object", name)
    return cast("dict[str, Any] | None", value)


def _number(body: Mapping[str, Any], name: str, *, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refused(f"{name} must be a number", name)
    if not low <= value <= high:
        raise _refused(f"{name} is {value}; it must be between {low:g} and {high:g}", name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, *, low: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(f"{name} must be a whole number", name)
    if value < low:
        raise _refused(f"{name} is {value}; it must be at least {low}", name)
    return value


def _refused(message: str, parameter: str) -> RequestRefused:
    return RequestRefused(message, status=400, code="invalid_parameter", parameter=parameter)
