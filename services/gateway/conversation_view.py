"""A request as the session tree sees it: answers by key, user and tool messages by key, harness text set apart."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clawstream.ids import derive
from schemas.events.base import Message
from services.gateway.canonical import MessageKeys
from services.gateway.client_profiles import ClientProfile, MessageView, RuleKind
from services.gateway.known_turn import MAX_MESSAGE_KEYS
from services.gateway.ports import IncomingRequest

MAX_MESSAGES_VIEWED = 256
"""Of a longer request only the newest messages are looked at: the parent's answer is always near the end."""

_PLAIN_SESSION_ID = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}\Z")
_HINT_COUNTER = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """An assistant message of the request: one of ours, rewritten, or invented by the client."""

    position: int
    """Index in the request's messages."""
    key: str
    distinctive: bool
    """Long enough not to come up elsewhere by chance."""
    silent: bool
    """No user ever saw it."""
    empty: bool
    message: Message


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """A message of the request that is not the assistant's."""

    position: int
    """Index in the request's messages."""
    view: MessageView
    key: str | None
    """None for system messages, for harness messages and for empty ones."""


@dataclass(frozen=True, slots=True)
class ConversationView:
    """What the session tree needs of a request."""

    answers: tuple[SeenAnswer, ...]
    """In order."""
    messages: tuple[SeenMessage, ...]
    """In order."""
    compacted: bool
    """A summary stands for what was before it."""
    summary_key: str | None
    """Key of that summary as an answer, if the client's profile can tell it and it is distinctive."""
    asserted_session_id: str | None
    """From `X-Session-Id`."""
    hint_key: str | None
    trace_id: str | None

    def message_keys(self, before: int | None = None) -> tuple[str, ...]:
        """Keys of user and tool messages, in order; only those before a position if one is given."""
        return tuple(
            seen.key for seen in self.messages if seen.key is not None and (before is None or seen.position < before)
        )

    @property
    def newest_message_keys(self) -> tuple[str, ...]:
        """What the turn's index entry keeps."""
        return self.message_keys()[-MAX_MESSAGE_KEYS:]

    def messages_after(self, position: int | None) -> tuple[SeenMessage, ...]:
        """Messages after a position (all, for None), without volatile ones and system messages."""
        return tuple(
            seen
            for seen in self.messages
            if (position is None or seen.position > position) and not seen.view.volatile and seen.view.role != "system"
        )

    def answers_summary(self, position: int) -> bool:
        """Whether the assistant message there is itself the summary: some clients put a question before it."""
        before = [seen.view for seen in self.messages if seen.position < position and not seen.view.volatile]
        rule = before[-1].rule if before else None
        return rule is not None and rule.kind is RuleKind.COMPACTION

    def answers_machinery(self, position: int) -> bool:
        """Whether the assistant message there follows nothing but words of the client's machinery since the one before.

        Both are then the client's own: aider reports a commit as the user and says "Ok." as the assistant.
        """
        start = max((answer.position for answer in self.answers if answer.position < position), default=-1)
        between = [seen.view for seen in self.messages if start < seen.position < position and not seen.view.volatile]
        return bool(between) and not any(view.is_evidence for view in between)


def session_id_from_header(principal: str, header: str | None) -> str | None:
    """The asserted session. Blank is absent; what would make a poor record key is replaced by a hash of it."""
    value = (header or "").strip()
    if not value:
        return None
    return value if _PLAIN_SESSION_ID.match(value) else derive("session", principal, _printable(value))


def view_request(request: IncomingRequest, profile: ClientProfile, keys: MessageKeys) -> ConversationView:
    """Looks at the newest messages of a request through the client's profile."""
    answers: list[SeenAnswer] = []
    messages: list[SeenMessage] = []
    compacted = False
    summary_key: str | None = None
    first = max(0, len(request.messages) - MAX_MESSAGES_VIEWED)
    for position in range(first, len(request.messages)):
        message = request.messages[position]
        if message.get("role") == "assistant":
            answers.append(_seen_answer(position, message, profile, keys))
            continue
        view = profile.view(message)
        if view.rule is not None and view.rule.kind is RuleKind.COMPACTION:
            compacted = True
            summary_key = _summary_key(view, profile, keys)
        messages.append(SeenMessage(position=position, view=view, key=_message_key(view, keys)))
    return ConversationView(
        answers=tuple(answers),
        messages=tuple(messages),
        compacted=compacted,
        summary_key=summary_key,
        asserted_session_id=session_id_from_header(request.principal, request.session_header),
        hint_key=_hint_key(request.session_hint, keys),
        trace_id=request.trace_id,
    )


def following_key(keys: MessageKeys, following: Sequence[SeenMessage]) -> str:
    """The identity of what followed an answer: equal for a request that is sent again."""
    return keys.following([seen.key or "" for seen in following])


def _seen_answer(position: int, message: Message, profile: ClientProfile, keys: MessageKeys) -> SeenAnswer:
    answer = profile.answer(message)
    return SeenAnswer(
        position=position,
        key=keys.answer(answer),
        distinctive=answer.is_distinctive,
        silent=profile.is_silent(answer),
        empty=answer.is_empty,
        message=message,
    )


def _summary_key(view: MessageView, profile: ClientProfile, keys: MessageKeys) -> str | None:
    if view.summary is None:
        return None
    answer = profile.answer({"role": "assistant", "content": view.summary})
    return keys.answer(answer) if answer.is_distinctive else None


def _message_key(view: MessageView, keys: MessageKeys) -> str | None:
    if view.role not in ("user", "tool") or not view.is_evidence or not view.text:
        return None
    return keys.message(view.role, view.text)


def _hint_key(hint: str | None, keys: MessageKeys) -> str | None:
    """OpenClaw counts compactions behind a colon; the session is what stands before."""
    value = _HINT_COUNTER.sub("", (hint or "").strip())
    return keys.hint(value) if value else None


def _printable(value: str) -> str:
    return value.encode("utf-8", errors="backslashreplace").decode()
