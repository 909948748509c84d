"""Client profiles: what an agent's own machinery puts into a conversation, as data.

A profile is a TOML file in `services/gateway/profiles/` (or in a folder of one's own): how to recognise the client, and
rules. A rule has a `kind`:

    volatile          text that is gone from the next request (cut; a message of nothing else does not exist)
    envelope          text around the user's words, such as a time stamp (cut)
    wrapper           text that a retry puts around the user's words (cut; the words twice become once)
    harness           the whole message comes from the agent; a request with nothing else new is a side turn
    notice            the whole message comes from the agent and says nothing about the answer before it
    compaction        a summary that stands for the history before it; a group named `summary` is the model's part
    side_request      a title, a summary and the like: the request is a side turn
    silent_answer     an answer that no user ever sees
    answer_directive  text that the client cuts out of answers

The model gets every message as it was sent. Matching and judging see the conversation without all this.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from clawstream.errors import SettingsError
from schemas.events.base import Message
from services.gateway.canonical import CanonicalAnswer, canonical_answer, message_text

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: Final[Mapping[JsonValue, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MARKER_MESSAGES = 3
"""Markers are looked for in so many messages at either end of a request."""


class RuleKind(StrEnum):
    """What a rule does. See the module's docstring."""

    VOLATILE = "volatile"
    ENVELOPE = "envelope"
    WRAPPER = "wrapper"
    HARNESS = "harness"
    NOTICE = "notice"
    COMPACTION = "compaction"
    SIDE_REQUEST = "side_request"
    SILENT_ANSWER = "silent_answer"
    ANSWER_DIRECTIVE = "answer_directive"


_CUTTING = (RuleKind.VOLATILE, RuleKind.WRAPPER, RuleKind.ENVELOPE)
"""In this order: a wrapper mostly stands outside the envelope."""
_MOST_LAYERS = 4
"""Clients make two. A text of nothing but time stamps must not cost a pass for each."""
_WHOLE_MESSAGE = (RuleKind.HARNESS, RuleKind.NOTICE, RuleKind.COMPACTION)


class Rule(BaseModel):
    """One pattern. An unknown field is an error: a misspelt one must not pass."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Appears as `turn_type_reason` when it decides."""
    kind: RuleKind
    """What a match means."""
    pattern: re.Pattern[str]
    """Python regular expression. Whole-message kinds match from the start, cutting kinds anywhere."""
    roles: tuple[Role, ...] = ("assistant",)
    """Messages that it applies to."""
    without_tools: bool = False
    """side_request: only when the request offers no tools."""
    max_messages: int | None = Field(default=None, ge=1)
    """side_request: only when the request has at most so many messages."""
    examples: tuple[str, ...] = Field(min_length=1)
    """Texts that it must match; a test tries them all."""


class Recognition(BaseModel):
    """How the client is recognised."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    user_agents: tuple[re.Pattern[str], ...] = ()
    """Any of these is found in the User-Agent header."""
    markers: tuple[str, ...] = ()
    """Any of these stands in one of the first or last messages."""


class ProfileFile(BaseModel):
    """One TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Written into every turn as `client_profile`."""
    description: str
    """For people."""
    extends: str | None = None
    """A profile whose rules apply too, after these."""
    recognise: Recognition
    """How the client is recognised."""
    rules: tuple[Rule, ...]
    """Its rules."""


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message as matching and judging see it."""

    role: Role | None
    """None for a role that no client should send."""
    text: str
    """Without volatile text, envelopes and wrappers; ends trimmed."""
    message: Message | None
    """What the judge may see; None when nothing of it comes from the user or a tool."""
    rule: Rule | None
    """The whole-message rule that it matched, if any."""
    volatile: bool
    """Nothing but volatile text: as if it were not there."""
    summary: str | None = None
    """Of a compaction: the summary as the model gave it, where the rule tells it from the words around it."""

    @property
    def is_evidence(self) -> bool:
        """Whether it says something about the answer before it."""
        return self.message is not None and self.rule is None and not self.volatile


class ClientProfile:
    """The rules of one client, ready to be applied."""

    def __init__(self, file: ProfileFile, inherited: Sequence[Rule] = ()) -> None:
        self.name = file.name
        self._recognise = file.recognise
        self.rules: tuple[Rule, ...] = (*file.rules, *inherited)
        self._cutting = tuple(rule for kind in _CUTTING for rule in self.rules if rule.kind is kind)
        self._whole_message = tuple(rule for rule in self.rules if rule.kind in _WHOLE_MESSAGE)
        self._side_requests = tuple(rule for rule in self.rules if rule.kind is RuleKind.SIDE_REQUEST)
        self._silent = tuple(rule.pattern for rule in self.rules if rule.kind is RuleKind.SILENT_ANSWER)
        self._directives = tuple(rule.pattern for rule in self.rules if rule.kind is RuleKind.ANSWER_DIRECTIVE)

    def recognises(self, user_agent: str, messages: Sequence[Message]) -> bool:
        """Whether a request comes from this client."""
        if any(pattern.search(user_agent) for pattern in self._recognise.user_agents):
            return True
        if not self._recognise.markers:
            return False
        ends = [*messages[:_MARKER_MESSAGES], *messages[_MARKER_MESSAGES:][-_MARKER_MESSAGES:]]
        texts = [message_text(message) for message in ends if message.get("role") != "assistant"]
        return any(marker in text for marker in self._recognise.markers for text in texts)

    def view(self, message: Message) -> MessageView:
        """Classifies one message that is not the assistant's."""
        role = _ROLES.get(message.get("role"))
        original = message_text(message)
        text = self._cut(original, role)
        stripped = text.strip()
        if not stripped and original.strip():
            return MessageView(role=role, text="", message=None, rule=None, volatile=True)
        rule, summary = self._whole_message_rule(stripped, role)
        cleaned = message
        if text != original:
            content = message.get("content")
            cut: JsonValue = self._cut_parts(content, role) if isinstance(content, list) else text
            cleaned = {**message, "content": cut}
        return MessageView(
            role=role,
            text=stripped,
            message=None if rule is not None else cleaned,
            rule=rule,
            volatile=False,
            summary=summary,
        )

    def answer(self, message: Message) -> CanonicalAnswer:
        """The canonical form of an assistant message as this client sends it back."""
        return canonical_answer(message, self._directives)

    def is_silent(self, answer: CanonicalAnswer) -> bool:
        """Whether no user ever sees this answer, so that nothing which follows is about it."""
        return not answer.tool_calls and any(pattern.match(answer.text) for pattern in self._silent)

    def side_request(self, messages: Sequence[Message], *, has_tools: bool) -> str | None:
        """Name of the rule by which the request is a side call (title, summary), or None."""
        for rule in self._side_requests:
            if rule.without_tools and has_tools:
                continue
            if rule.max_messages is not None and len(messages) > rule.max_messages:
                continue
            for message in (*messages[:1], *messages[-1:]):
                if _ROLES.get(message.get("role")) in rule.roles and rule.pattern.match(message_text(message)):
                    return rule.name
        return None

    def _whole_message_rule(self, text: str, role: Role | None) -> tuple[Rule | None, str | None]:
        for rule in self._whole_message:
            if role in rule.roles and (match := rule.pattern.match(text)) is not None:
                return rule, match.groupdict().get("summary")
        return None, None

    def _cut(self, text: str, role: Role | None) -> str:
        """Layer by layer: a wrapper may stand within an envelope, as an envelope within a wrapper."""
        for _ in range(_MOST_LAYERS):
            shorter = self._cut_once(text, role)
            if shorter == text:
                break
            text = shorter
        return text

    def _cut_once(self, text: str, role: Role | None) -> str:
        for rule in self._cutting:
            if role in rule.roles:
                shorter = rule.pattern.sub("", text)
                if rule.kind is RuleKind.WRAPPER and shorter != text:
                    shorter = _said_once(self._without_envelopes(shorter, role))
                text = shorter
        return text

    def _without_envelopes(self, text: str, role: Role | None) -> str:
        for rule in self._cutting:
            if rule.kind is RuleKind.ENVELOPE and role in rule.roles:
                text = rule.pattern.sub("", text)
        return text

    def _cut_parts(self, content: list[JsonValue], role: Role | None) -> list[JsonValue]:
        parts: list[JsonValue] = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(part, dict) or not isinstance(text, str):
                parts.append(part)
            elif kept := self._cut(text, role):
                parts.append({**part, "text": kept})
        return parts


class ClientProfiles:
    """All known profiles."""

    def __init__(self, files: Iterable[ProfileFile]) -> None:
        """Raises SettingsError when a profile extends an unknown one, or when `generic` is missing."""
        by_name = {file.name: file for file in files}
        if "generic" not in by_name:
            raise SettingsError("client profiles: there must be one named `generic`")
        for file in by_name.values():
            if file.extends is not None and file.extends not in by_name:
                raise SettingsError(f"client profile {file.name!r} extends the unknown profile {file.extends!r}")
        self._profiles = {
            file.name: ClientProfile(file, by_name[file.extends].rules if file.extends else ())
            for file in by_name.values()
        }

    def __iter__(self) -> Iterator[ClientProfile]:
        return iter(self._profiles.values())

    def named(self, name: str) -> ClientProfile:
        """The profile `name`, or `generic` when there is none of that name (any more)."""
        return self._profiles.get(name, self._profiles["generic"])

    def choose(self, user_agent: str, messages: Sequence[Message]) -> ClientProfile:
        """The first profile that recognises the request, else `generic`."""
        for profile in self._profiles.values():
            if profile.recognises(user_agent, messages):
                return profile
        return self._profiles["generic"]


def load_profiles(directory: Path | None = None) -> ClientProfiles:
    """The profiles that ship with clawstream, and those in `directory`, which win over shipped ones of the same name.

    Raises SettingsError naming the file and the field.
    """
    shipped = [
        _parse(entry.name, entry.read_text(encoding="utf-8"))
        for entry in sorted(resources.files("services.gateway.profiles").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    ]
    own = (
        [_parse(str(file), file.read_text(encoding="utf-8")) for file in sorted(directory.glob("*.toml"))]
        if directory is not None
        else []
    )
    return ClientProfiles([*shipped, *own])


def _parse(where: str, text: str) -> ProfileFile:
    try:
        return ProfileFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{where}: not TOML: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise SettingsError(f"{where}: not a client profile: {problems}") from error


def _said_once(text: str) -> str:
    """The first half of a text whose halves, separated by an empty line, are equal."""
    stripped = text.strip()
    middle = len(stripped) // 2
    for separator in (stripped.rfind("\n\n", 0, middle + 2), stripped.find("\n\n", max(middle - 1, 0))):
        if separator > 0 and stripped[:separator].strip() == stripped[separator:].strip():
            return stripped[:separator].strip()
    return text
