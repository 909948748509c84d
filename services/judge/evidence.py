"""The next state as text for a judge: what was asked, what was answered, all that followed.

Judged text must not speak as the judge. It stands between marks that it cannot know (derived from the next state's
id), special tokens of chat templates and reasoning marks are broken up, and so are `\\boxed` and hint markers: a judge
that quotes what it read says nothing by it. The event on the log stays as it was; too long a text is cut in the middle,
always at the same place.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from clawstream.rendering.quoting import without_special_tokens
from schemas.events import NextStateEvent
from schemas.events.base import Message

_BOXED: Final = re.compile(r"\\(?=\s*boxed)", re.IGNORECASE)
_HINT_MARKER: Final = re.compile(r"\[(?=\s*/?\s*HINT)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The sections of a judge's prompt, defused and cut to fit."""

    mark: str
    """Stands before every section; unknown to whoever wrote the text."""
    request: str
    """The conversation up to the answer."""
    answer: str
    """The answer."""
    following: str
    """Everything that followed the answer."""
    cut_characters: int
    """How much was left out."""


def gather(next_state: NextStateEvent, *, max_characters: int) -> Evidence:
    """The evidence of `next_state` in at most `max_characters`, which the sections share fairly.

    A section shorter than its share leaves the rest to the others, so a short reply always arrives whole.
    """
    request = _transcript(next_state.request_messages)
    if next_state.tools:
        request = f"tools: {', '.join(_tool_name(tool) for tool in next_state.tools)}\n{request}"
    answer = _transcript([next_state.response_message] if next_state.response_message is not None else [])
    sections = [defused(text) for text in (request, answer, _transcript(next_state.following_messages))]
    shares = fair_shares([len(section) for section in sections], max_characters)
    kept = [cut_in_the_middle(section, share) for section, share in zip(sections, shares, strict=True)]
    return Evidence(
        mark=hashlib.sha256(f"evidence/{next_state.next_state_id}".encode()).hexdigest()[:12],
        request=kept[0],
        answer=kept[1],
        following=kept[2],
        cut_characters=sum(max(0, len(s) - share) for s, share in zip(sections, shares, strict=True)),
    )


def defused(text: str) -> str:
    """`text` with a space in all that a chat template, or the parser of verdicts and hints, would take for its own."""
    return _HINT_MARKER.sub("[ ", _BOXED.sub(r"\\ ", without_special_tokens(text)))


def on_one_line(text: str) -> str:
    """`text` with all white space as single spaces, for prompts whose lines mean something."""
    return " ".join(text.split())


def fair_shares(lengths: Sequence[int], total: int) -> list[int]:
    """Max-min fair division of `total` among texts of these lengths: none gets more than it needs."""
    shares = [0] * len(lengths)
    remaining = total
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    for position, index in enumerate(order):
        shares[index] = min(lengths[index], remaining // (len(order) - position))
        remaining -= shares[index]
    return shares


def cut_in_the_middle(text: str, max_characters: int) -> str:
    """Head and tail of `text` around a marker that says how much is missing; at most `max_characters` long.

    The head is as long as the tail or one longer. A cut too small for the marker keeps the head alone.
    """
    if len(text) <= max_characters:
        return text
    marker = f"\n[... {len(text) - max_characters:,} or more characters cut ...]\n"
    kept = max_characters - len(marker)
    if kept < 2:
        return text[:max_characters]
    tail = kept // 2
    return text[: kept - tail] + marker + text[len(text) - tail :]


def message_text(message: Message) -> str:
    """The text of a message's content, whether it is a string or a list of parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(_part_text(part) for part in content)


def user_text(messages: Sequence[Message]) -> str:
    """What the user wrote in `messages`, joined."""
    return "\n".join(text for message in messages if message.get("role") == "user" and (text := message_text(message)))


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    fields = cast("dict[str, Any]", part)
    text = fields.get("text")
    return text if isinstance(text, str) else f"[{fields.get('type', 'unknown part')}]"


def _transcript(messages: Sequence[Message]) -> str:
    return "\n".join(_line(message) for message in messages)


def _line(message: Message) -> str:
    role = str(message.get("role", "unknown"))
    text = message_text(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        text = "\n".join([*([text] if text else []), *(_call_text(call) for call in calls)])
    # Only a role begins at the margin: text cannot pass itself off as another message.
    return f"{role}: " + "\n  ".join(text.splitlines() or [""])


def _call_text(call: object) -> str:
    function = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "[tool call]"
    fields = cast("dict[str, Any]", function)
    arguments = fields.get("arguments", "")
    return f"[calls {fields.get('name')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})]"


def _tool_name(tool: Message) -> str:
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, dict) else str(tool.get("name"))
