"""OpenClaw's session files: JSON Lines, a header and then entries that form a tree by `id` and `parentId`.

    {"type": "session", "version": 3, "id": "...", "timestamp": "..."}
    {"type": "message", "id": "a1", "parentId": null, "timestamp": "...", "message": {"role": "user", "content": [...]}}

The conversation is the branch that ends at the file's last message, as the agent itself continues it. Entries that are
no messages (changes of model, notices) are passed over. After a compaction the model no longer saw what was summed up:
messages before the first one that was kept are replaced by the summary, as the agent does it.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, cast

import orjson

from clawstream.errors import DecodeError
from clawstream.importing.conversations import LoggedConversation, LoggedMessage
from schemas.events.base import Message

FORMAT = "openclaw"

Entry = Mapping[str, Any]


def parse_openclaw_session(lines: Iterable[bytes], where: str) -> LoggedConversation:
    """The conversation in one session file. Raises DecodeError, which names the line and what is wrong."""
    entries = [_entry(line, f"{where}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not entries or entries[0].get("type") != "session":
        raise DecodeError(f"{where}:1: no session header; is this a session file of OpenClaw?")
    header, rest = entries[0], entries[1:]
    branch = _branch(rest)
    messages = _visible(branch)
    return LoggedConversation(
        where=where,
        log_format=FORMAT,
        name=str(header.get("id", "")),
        messages=tuple(messages),
        left_out=len(rest) - len(messages),
    )


def _entry(line: bytes, where: str) -> Entry:
    try:
        document: object = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"{where}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DecodeError(f"{where}: no JSON object")
    return cast("Entry", document)


def _branch(entries: list[Entry]) -> list[Entry]:
    """From the root to the last entry with an id. A file without ids is one branch."""
    by_id = {entry["id"]: entry for entry in entries if isinstance(entry.get("id"), str)}
    last = next((entry for entry in reversed(entries) if entry.get("id") in by_id), None)
    if last is None:
        return entries
    branch: list[Entry] = []
    seen: set[str] = set()
    current: Entry | None = last
    while current is not None and current["id"] not in seen:
        branch.append(current)
        seen.add(current["id"])
        current = by_id.get(cast("str", current.get("parentId")))
    return branch[::-1]


def _visible(branch: list[Entry]) -> list[LoggedMessage]:
    """Messages as the model saw them at the end of the branch."""
    found: list[tuple[str, LoggedMessage]] = []
    for entry in branch:
        at = _time(entry.get("timestamp"))
        if entry.get("type") == "compaction":
            kept = entry.get("firstKeptEntryId")
            start = next((index for index, (identity, _) in enumerate(found) if identity == kept), len(found))
            summary: Message = {"role": "user", "content": str(entry.get("summary", ""))}
            found = [("", LoggedMessage(summary, at)), *found[start:]]
        elif entry.get("type") == "message" and isinstance(entry.get("message"), dict):
            message = _openai_message(cast("Entry", entry["message"]))
            if message is not None:
                found.append((str(entry.get("id", "")), LoggedMessage(message, at)))
    return [message for _, message in found]


def _openai_message(message: Entry) -> Message | None:
    """The message in OpenAI's form; None for roles of the agent's own that no model sees."""
    role, content = message.get("role"), message.get("content")
    if role == "user":
        return {"role": "user", "content": _text(content)}
    if role == "toolResult":
        return {"role": "tool", "tool_call_id": str(message.get("toolCallId", "")), "content": _text(content)}
    if role != "assistant":
        return None
    calls = [part for part in _parts(content) if part.get("type") == "toolCall"]
    answer: Message = {"role": "assistant", "content": _text(content) or (None if calls else "")}
    if calls:
        answer["tool_calls"] = [
            {
                "id": str(part.get("id", "")),
                "type": "function",
                "function": {
                    "name": str(part.get("name", "")),
                    "arguments": orjson.dumps(part.get("arguments", {})).decode(),
                },
            }
            for part in calls
        ]
    return answer


def _parts(content: object) -> list[Entry]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    return [cast("Entry", part) for part in cast("list[Any]", content) if isinstance(part, dict)]


def _text(content: object) -> str:
    """Text parts joined; reasoning is left out, as clients leave it out of what they send back."""
    return "\n".join(str(part.get("text", "")) for part in _parts(content) if part.get("type") == "text")


def _time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None
