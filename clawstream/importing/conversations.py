"""A conversation of a chat log, whatever its format was, and the turns in it. Pure.

An imported turn is a message that an assistant wrote somewhere else. What stood before it is its request, what stands
after it up to the assistant's next message is its next state.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import orjson

from clawstream import ids
from schemas.events.base import Message


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """One message in OpenAI's form."""

    message: Message
    at: datetime | None = None
    """When it was written, if the log says so."""

    @property
    def role(self) -> str:
        return str(self.message.get("role", ""))


@dataclass(frozen=True, slots=True)
class LoggedConversation:
    """A conversation from its first message to its last."""

    where: str
    """File and line, for people."""
    log_format: str
    """Name of the format that it was read from."""
    name: str
    """The log's own id of the conversation; empty when it has none, so that the content names it."""
    messages: tuple[LoggedMessage, ...]
    tools: tuple[Message, ...] = ()
    principal: str | None = None
    """Whose it is, if the log says so."""
    left_out: int = 0
    """Entries of the log that are no part of it: other branches, notices, what compaction put in place of messages."""

    @property
    def content_sha256(self) -> str:
        """Checksum of messages and tools: whether it is the same conversation still."""
        content = [[each.message for each in self.messages], list(self.tools)]
        return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def session_id(self, principal: str) -> str:
        """Derived, so that the same conversation has the same id however often it is imported."""
        return ids.derive("imported-session", principal, self.log_format, self.name or self.content_sha256)


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """One answer in a conversation."""

    number: int
    """Of the conversation's turns, from 0."""
    request: tuple[LoggedMessage, ...]
    answer: LoggedMessage
    following: tuple[LoggedMessage, ...]
    """Up to the next answer; empty for the last one, if nothing follows it."""


def turns_of(conversation: LoggedConversation) -> Iterator[LoggedTurn]:
    """Its answers in order. One with nothing before it answers nothing and is no turn."""
    messages = conversation.messages
    answers = [index for index, each in enumerate(messages) if each.role == "assistant" and index > 0]
    for number, index in enumerate(answers):
        end = answers[number + 1] if number + 1 < len(answers) else len(messages)
        yield LoggedTurn(number, messages[:index], messages[index], messages[index + 1 : end])


def is_evidence(following: Sequence[LoggedMessage]) -> bool:
    """Whether what follows an answer says anything about it."""
    return any(each.role in ("user", "tool") for each in following)
