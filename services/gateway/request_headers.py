"""What request headers say about session, turn and rollout. All of them are optional."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

from clawstream.errors import RequestRefused
from schemas.events.base import RolloutPosition, TurnType

SESSION_HINT_HEADERS = ("session_id", "session-id", "x-session-affinity", "x-openclaw-session-key", "thread-id")
"""Signs of the session that agents can be told to send, in order of precedence; a body's hint comes after them."""
_MAX_ID_CHARACTERS = 200
_PLAIN_ID = re.compile(r"[!-~]+")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_TRUE = ("1", "true", "yes")


def plain_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """ASGI's headers by name; the first of several of one name."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return headers


def clean_identifier(value: str | None) -> str | None:
    """An id that a client chose, fit for keys: empty is absent; too long or unprintable ones are hashed."""
    if value is None or not (stripped := value.strip()):
        return None
    if len(stripped) <= _MAX_ID_CHARACTERS and _PLAIN_ID.fullmatch(stripped):
        return stripped
    return "sha256-" + hashlib.sha256(stripped.encode("utf-8", errors="surrogatepass")).hexdigest()


def session_header(headers: Mapping[str, str]) -> str | None:
    """`X-Session-Id`."""
    return clean_identifier(headers.get("x-session-id"))


def session_hint(headers: Mapping[str, str], names: Sequence[str], body_hint: str | None) -> str | None:
    """The first hint among the headers `names`, else the body's."""
    for name in names:
        if name in headers and (hint := clean_identifier(headers[name])) is not None:
            return hint
    return clean_identifier(body_hint)


def turn_type(headers: Mapping[str, str]) -> TurnType | None:
    """`X-Turn-Type`. Raises RequestRefused for another value than main or side."""
    value = headers.get("x-turn-type", "").strip().lower()
    if not value:
        return None
    try:
        return TurnType(value)
    except ValueError as error:
        raise RequestRefused(
            f"X-Turn-Type is {value[:40]!r}; it must be main or side", code="invalid_header", parameter="X-Turn-Type"
        ) from error


def session_done(headers: Mapping[str, str]) -> bool:
    """`X-Session-Done`."""
    return headers.get("x-session-done", "").strip().lower() in _TRUE


def trace_id(headers: Mapping[str, str]) -> str | None:
    """The trace id of `traceparent` (W3C Trace Context, section 3.2); None when absent, malformed or all zero."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    return match[1] if match and match[1].strip("0") else None


def rollout_position(headers: Mapping[str, str]) -> RolloutPosition | None:
    """`X-Task-Id`, `X-Group-Id`, `X-Rollout-Id` and `X-Step-Index`: all or none. Raises RequestRefused."""
    names = ("x-task-id", "x-group-id", "x-rollout-id", "x-step-index")
    values = {name: headers.get(name, "").strip() for name in names}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(names):
        return None
    if missing:
        raise RequestRefused(
            f"a rollout needs all of {', '.join(names)}; missing: {', '.join(missing)}", code="invalid_header"
        )
    step = values["x-step-index"]
    if not (step.isascii() and step.isdecimal() and len(step) < 10):
        raise RequestRefused("x-step-index must be a whole number from 0", code="invalid_header")
    task, group, rollout = (clean_identifier(values[name]) or "" for name in names[:3])
    return RolloutPosition(task_id=task, group_id=group, rollout_id=rollout, step_index=int(step))
