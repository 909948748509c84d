"""Server-sent events. Pure."""

from collections.abc import Mapping
from typing import Any

import orjson


def sse_event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; `name` is its type, for APIs that give one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def recorded_comment(recorded: bool) -> bytes:
    """Whether the turn is safe on disk: a line that clients skip."""
    return f": x-clawstream-recorded: {str(recorded).lower()}\n\n".encode()
