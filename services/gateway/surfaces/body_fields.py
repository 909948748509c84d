"""Reads single fields of a request body: null is absent, a wrong type is refused and named, the rest is ignored."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from clawstream.errors import RequestRefused

LARGEST_INTEGER = 2**63 - 1
"""What engines and the log can hold: neither takes a whole number of more than 64 bits."""
MAX_STOP_STRINGS = 16


def refused(message: str, parameter: str, *, code: str = "invalid_parameter") -> RequestRefused:
    """A refusal that names its parameter, status 400."""
    return RequestRefused(message, status=400, code=code, parameter=parameter)


def text(body: Mapping[str, Any], name: str) -> str | None:
    """A text. Raises RequestRefused."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise refused(f"{name} must be a text", name)
    return value


def boolean(body: Mapping[str, Any], name: str) -> bool | None:
    """true or false. Raises RequestRefused."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refused(f"{name} must be true or false", name)
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """An object. Raises RequestRefused."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise refused(f"{name} must be an object", name)
    return cast("dict[str, Any] | None", value)


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; absent is empty. Raises RequestRefused."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in cast("list[Any]", value)):
        raise refused(f"{name} must be a list of objects", name)
    return cast("list[dict[str, Any]]", value)


def number(body: Mapping[str, Any], name: str, *, low: float, high: float) -> float | None:
    """A number between two bounds. Raises RequestRefused."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refused(f"{name} must be a number", name)
    if not low <= value <= high:
        raise refused(f"{name} is {value}; it must be between {low:g} and {high:g}", name)
    return float(value)


def integer(body: Mapping[str, Any], name: str, *, low: int) -> int | None:
    """A whole number, also written as 8.0. Raises RequestRefused."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(f"{name} must be a whole number", name)
    if value < low:
        raise refused(f"{name} is {value}; it must be at least {low}", name)
    if value > LARGEST_INTEGER:
        raise refused(f"{name} is {value}; it must be at most {LARGEST_INTEGER}", name)
    return value


def stop_strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text or a list of texts; empty ones are left out. Raises RequestRefused."""
    stop = body.get(name)
    if stop is None:
        return ()
    listed = cast("list[Any]", stop) if isinstance(stop, list) else [stop]
    if not all(isinstance(item, str) for item in listed):
        raise refused(f"{name} must be a text or a list of texts", name)
    if len(listed) > MAX_STOP_STRINGS:
        raise refused(f"at most {MAX_STOP_STRINGS} stop strings", name)
    return tuple(item for item in cast("list[str]", listed) if item)


def first_text(candidates: Sequence[object]) -> str | None:
    """The first that is a text with something in it."""
    return next((value for value in candidates if isinstance(value, str) and value.strip()), None)


def session_hint(body: Mapping[str, Any]) -> str | None:
    """A sign of the session: `prompt_cache_key`, `session_id`, `metadata.session_id`."""
    metadata = body.get("metadata")
    of_metadata = cast("dict[str, Any]", metadata).get("session_id") if isinstance(metadata, dict) else None
    return first_text((body.get("prompt_cache_key"), body.get("session_id"), of_metadata))
