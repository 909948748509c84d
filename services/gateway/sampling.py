"""The client's sampling parameters as the engine's, and as the record of what was in force."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from clawstream.errors import RequestRefused
from schemas.events.turn import SamplingParameters
from services.gateway.surfaces.answer_request import AnswerRequest

_SMALLEST_TOP_P = 1e-6
"""OpenAI allows top_p 0, engines do not: this much keeps the best token only."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How an answer is sampled."""

    engine_parameters: Mapping[str, Any]
    """In SGLang's names."""
    recorded: SamplingParameters
    """For the turn."""


def plan_sampling(
    request: AnswerRequest,
    *,
    prompt_tokens: int,
    max_context_tokens: int,
    default_max_tokens: int,
    default_temperature: float,
    stop_token_ids: Sequence[int],
    vocabulary_size: int,
) -> SamplingPlan:
    """The cap on tokens is cut to what fits into the context.

    Raises RequestRefused when no token fits, or a bias is for a token that does not exist.
    """
    room = longest_prompt(max_context_tokens) - prompt_tokens + 1
    if room < 1:
        raise context_exceeded(max_context_tokens, prompt_tokens)
    unknown = next((key for key in request.logit_bias or () if int(key) >= vocabulary_size), None)
    if unknown is not None:
        raise RequestRefused(
            f"logit_bias: {unknown} is no token id; this model's are those below {vocabulary_size}",
            code="invalid_parameter",
            parameter="logit_bias",
        )
    max_new_tokens = min(request.max_tokens or default_max_tokens, room)
    temperature = default_temperature if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else max(request.top_p, _SMALLEST_TOP_P)
    top_k = -1 if request.top_k in (None, 0) else request.top_k
    grammar = _grammar(request.response_format)
    recorded = SamplingParameters(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        seed=request.seed,
        max_new_tokens=max_new_tokens,
        stop=list(request.stop),
        # A bias, or a token forbidden for a while, restricts what can be sampled just as a grammar does.
        # So does the beginning of a tool call that the client demands.
        constrained=bool(grammar or request.logit_bias or request.min_tokens or request.tool_choice == "required"),
    )
    parameters: dict[str, Any] = {
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stop_token_ids),
        **grammar,
    }
    # Only what differs from the engine's default is sent: engines know different sets of parameters.
    optional: dict[str, tuple[Any, Any]] = {
        "top_p": (recorded.top_p, 1.0),
        "top_k": (recorded.top_k, -1),
        "min_p": (recorded.min_p, 0.0),
        "frequency_penalty": (recorded.frequency_penalty, 0.0),
        "presence_penalty": (recorded.presence_penalty, 0.0),
        "repetition_penalty": (recorded.repetition_penalty, 1.0),
        "sampling_seed": (recorded.seed, None),
        "stop": (recorded.stop, []),
        "logit_bias": (request.logit_bias, None),
        "min_new_tokens": (request.min_tokens, None),
    }
    parameters |= {name: value for name, (value, default) in optional.items() if value != default}
    return SamplingPlan(parameters, recorded)


def longest_prompt(max_context_tokens: int) -> int:
    """Tokens of a prompt that leaves room for one token of an answer."""
    # SGLang keeps one position of the context free.
    return max_context_tokens - 2


def context_exceeded(max_context_tokens: int, prompt_tokens: int) -> RequestRefused:
    """What a client is told whose prompt is too long. `prompt_tokens` may be fewer than it has."""
    return RequestRefused(
        f"This model's maximum context length is {max_context_tokens} tokens, but the messages (with tools) are "
        f"at least {prompt_tokens} tokens. Please shorten the messages.",
        code="context_length_exceeded",
        parameter="messages",
    )


def _grammar(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    """`response_format` in SGLang's terms. Raises RequestRefused for a form that is not known."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        schema: Any = holder.get("schema") if isinstance(holder, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - JSON
        if isinstance(schema, dict):
            return {"json_schema": orjson.dumps(schema).decode()}
    raise RequestRefused(
        "response_format must be of type text, json_object, or json_schema with a schema",
        code="invalid_parameter",
        parameter="response_format",
    )
