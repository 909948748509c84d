"""OpenAI's JSON Lines: one conversation a line, as fine-tuning files have it.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
     "tools": [...], "id": "...", "user": "..."}

`tools`, the id (`id`, `conversation_id` or `session_id`) and `user` may be absent.
"""

from collections.abc import Mapping
from typing import Any, cast

import orjson

from clawstream.errors import DecodeError
from clawstream.importing.conversations import LoggedConversation, LoggedMessage
from schemas.events.base import Message

FORMAT = "openai"
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def parse_openai_line(line: bytes, where: str) -> LoggedConversation:
    """The conversation in one line. Raises DecodeError, which names the place and what is wrong."""
    try:
        document: object = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"{where}: not JSON: {error}") from error
    fields: Mapping[str, Any] = cast("Mapping[str, Any]", document) if isinstance(document, dict) else {}
    messages: object = fields.get("messages")
    tools: object = fields.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise DecodeError(f"{where}: no list of messages; one line is one conversation")
    found: list[LoggedMessage] = []
    for index, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict) or cast("Message", message).get("role") not in _ROLES:
            raise DecodeError(f"{where}: messages[{index}] is no message with one of the roles {sorted(_ROLES)}")
        found.append(LoggedMessage(cast("Message", message)))
    if not isinstance(tools, list):
        raise DecodeError(f"{where}: tools is no list")
    name = next((fields[key] for key in ("id", "conversation_id", "session_id") if fields.get(key)), "")
    user = fields.get("user")
    return LoggedConversation(
        where=where,
        log_format=FORMAT,
        name=str(name),
        messages=tuple(found),
        tools=tuple(cast("list[Message]", tools)),
        principal=str(user) if user else None,
    )
