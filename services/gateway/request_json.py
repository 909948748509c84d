"""Bytes of a request body to JSON that every later step can hold: valid Unicode, finite numbers."""

import json
import math
from typing import Any, NoReturn, cast

import orjson

from clawstream.errors import RequestRefused
from clawstream.rendering.text import replace_lone_surrogates

_MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 128
"""Objects and lists inside each other. Serialisers stop at 254, and what is sent on or written wraps the body."""


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object in `body`. Halves of surrogate pairs become U+FFFD. Raises RequestRefused, status 400."""
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = _parse_leniently(body)
    if not isinstance(value, dict):
        raise _malformed("the body must be a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:  # Else no bracket can be that deep inside others.
        _refuse_deep(cast("dict[str, Any]", value))
    return cast("dict[str, Any]", value)


def _refuse_deep(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (
            child
            for item in level
            for child in (cast("dict[str, Any]", item).values() if isinstance(item, dict) else item)
        )
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise _malformed(f"the body nests objects and lists more than {MAX_DEPTH} deep")


def _parse_leniently(body: bytes) -> Any:
    """For what orjson refuses although clients send it: cut emoji as lone `\\ud83d`."""
    try:
        return _cleaned(json.loads(body, parse_constant=_refuse_constant))
    except (ValueError, RecursionError) as error:
        raise _malformed(f"the body is not valid JSON: {str(error)[:200]}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _malformed(message: str) -> RequestRefused:
    return RequestRefused(message, status=400, code="invalid_json")
