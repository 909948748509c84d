"""The canonical form of messages, and the keyed hashes by which they are recognised.

Clients send our answers back almost unchanged: ends are trimmed, reasoning is cut, tool-call ids are rewritten,
arguments are serialised again, null becomes "" or disappears. The canonical form is what survives all of that.

Keys are HMAC-SHA256 over principal and canonical form, so that the index tells nothing of what was said and an
answer is found only by the principal who received it. They are truncated (RFC 2104 section 5): entries stay small.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from pydantic import JsonValue

from schemas.events.base import Message

MINIMUM_DISTINCTIVE_CHARACTERS: Final = 48
"""Answers whose canonical form is shorter ("Done.", `ls {}`) can come up in unrelated conversations."""

_ANSWER_KEY_CHARACTERS: Final = 32
"""128 bits: the least that RFC 2104 allows for SHA-256."""
_MESSAGE_KEY_CHARACTERS: Final = 16
"""64 bits: message keys only count what two requests have in common."""
_LARGEST_EXACT_INTEGER: Final = 2**53
"""Above this JavaScript clients round, so that two spellings of one number must agree."""

_CLOSED_REASONING = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
_HEADLESS_REASONING = re.compile(r"\A.*?</think(?:ing)?>", re.DOTALL)
_UNCLOSED_REASONING = re.compile(r"<think(?:ing)?>.*\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CanonicalAnswer:
    """An assistant message without what clients change."""

    text: str
    """Visible text, ends trimmed, without reasoning."""
    tool_calls: tuple[tuple[str, str], ...]
    """Name and canonical arguments of each call, in order."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to be recognised by."""
        return not self.text and not self.tool_calls

    @property
    def is_distinctive(self) -> bool:
        """Whether it is unlikely to come up in two unrelated conversations."""
        length = len(self.text) + sum(len(name) + len(arguments) for name, arguments in self.tool_calls)
        return length >= MINIMUM_DISTINCTIVE_CHARACTERS

    def to_bytes(self) -> bytes:
        """What the key is computed over."""
        return _encoded(json.dumps([self.text, self.tool_calls], ensure_ascii=False, separators=(",", ":")))


def message_text(message: Message) -> str:
    """The text of a message whose content is a string, null, or a list of parts.

    Parts that are not text stand as a hash of their JSON, so that two different images differ.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return canonical_json(content)
    return "\n".join(_part_text(part) for part in content)


def without_reasoning(text: str) -> str:
    """Text without `<think>` blocks, also without one that was cut short or whose start stood in the prompt."""
    if "<think" not in text and "</think" not in text:
        return text
    text = _CLOSED_REASONING.sub("", text)
    return _UNCLOSED_REASONING.sub("", _HEADLESS_REASONING.sub("", text))


def canonical_answer(message: Message, directives: Sequence[re.Pattern[str]] = ()) -> CanonicalAnswer:
    """The canonical form of an assistant message. `directives` are what this client cuts out of answers."""
    text = without_reasoning(message_text(message))
    for directive in directives:
        text = directive.sub("", text)
    return CanonicalAnswer(text=text.strip(), tool_calls=tuple(_tool_calls(message)))


def canonical_arguments(arguments: JsonValue) -> str:
    """Tool arguments as canonical JSON when they parse, else as trimmed text. Absent, null and "" are `{}`."""
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        stripped = arguments.strip()
        if not stripped:
            return "{}"
        try:
            parsed: JsonValue = json.loads(stripped, parse_constant=_refuse_constant)
            return canonical_json(parsed)
        except (ValueError, RecursionError):
            return stripped
    return canonical_json(arguments)


def canonical_json(value: JsonValue) -> str:
    """JSON with sorted keys, without spaces, with numbers as JavaScript would write them (10.0 is 10)."""
    return json.dumps(_canonical_value(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


class MessageKeys:
    """Keyed hashes of canonical messages for one principal."""

    def __init__(self, secret: bytes, principal: str) -> None:
        self._base = hmac.new(secret, _encoded(principal) + b"\x1f", hashlib.sha256)

    def answer(self, answer: CanonicalAnswer) -> str:
        """Key of an assistant message: 32 hexadecimal characters."""
        return self._key(b"answer", answer.to_bytes(), _ANSWER_KEY_CHARACTERS)

    def message(self, role: str, normalised_text: str) -> str:
        """Key of a user or tool message: 16 hexadecimal characters."""
        return self._key(role.encode(), _encoded(normalised_text.strip()), _MESSAGE_KEY_CHARACTERS)

    def hint(self, hint: str) -> str:
        """Key of a session hint: 32 hexadecimal characters."""
        return self._key(b"hint", _encoded(hint), _ANSWER_KEY_CHARACTERS)

    def following(self, message_keys: Sequence[str]) -> str:
        """Key of all messages that followed an answer, in order: 32 hexadecimal characters."""
        return self._key(b"following", "\x1f".join(message_keys).encode(), _ANSWER_KEY_CHARACTERS)

    def _key(self, kind: bytes, content: bytes, characters: int) -> str:
        state = self._base.copy()
        state.update(kind + b"\x1f" + content)
        return state.hexdigest()[:characters]


def _tool_calls(message: Message) -> list[tuple[str, str]]:
    calls = message.get("tool_calls")
    found: list[tuple[str, str]] = []
    if isinstance(calls, list):
        for call in calls:
            if isinstance(call, dict):
                function = call.get("function")
                found.append(_named_arguments(function if isinstance(function, dict) else call))
    function_call = message.get("function_call")
    if isinstance(function_call, dict):
        found.append(_named_arguments(function_call))
    return found


def _named_arguments(function: Mapping[str, JsonValue]) -> tuple[str, str]:
    name = function.get("name")
    return (name if isinstance(name, str) else "", canonical_arguments(function.get("arguments")))


def _part_text(part: JsonValue) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return cast("str", part["text"])
    return f"[part {hashlib.sha256(_encoded(canonical_json(part))).hexdigest()}]"


def _canonical_value(value: JsonValue) -> JsonValue:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        if abs(value) <= _LARGEST_EXACT_INTEGER:
            return value
        try:
            return float(value)
        except OverflowError:
            return str(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _LARGEST_EXACT_INTEGER else value
    if isinstance(value, list):
        return [_canonical_value(item) for item in value]
    return {key: _canonical_value(item) for key, item in value.items()}


def _refuse_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


def _encoded(text: str) -> bytes:
    """UTF-8; a lone surrogate, which clients can send, is encoded instead of raising."""
    return text.encode("utf-8", errors="surrogatepass")
