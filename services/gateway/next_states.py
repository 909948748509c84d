"""What followed an answer, for the judge: all messages after it, less what the client's machinery put there. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue

from clawstream.ids import next_state_id
from schemas.events import NextStateEvent
from schemas.events.base import Message, RecordReference
from schemas.events.next_state import ExplicitFeedback, NextStateKind
from services.gateway.canonical import MessageKeys
from services.gateway.conversation_view import ConversationView, SeenMessage, following_key
from services.gateway.known_turn import KnownTurn
from services.gateway.ports import IncomingRequest
from services.gateway.session_tree import Found

_UNKNOWN_PLACE = RecordReference(topic="outbox", partition=0, offset=0)
"""Stands for the place of a turn that is not on the log yet; it never leaves the gateway."""


@dataclass(frozen=True, slots=True)
class NextStateDraft:
    """A next state whose turn may not be on the log yet."""

    event: NextStateEvent
    """Complete but for `turn_ref` when that is not known."""
    place_known: bool
    """Whether `event.turn_ref` is real."""

    def at(self, turn_ref: RecordReference) -> NextStateEvent:
        """The event with its turn's place."""
        return self.event.model_copy(update={"turn_ref": turn_ref})


def next_state_of_request(
    request: IncomingRequest, view: ConversationView, found: Found, *, child_turn_id: str, keys: MessageKeys
) -> NextStateDraft | None:
    """The parent's next state that this main request brings, or None when it says nothing about the parent's answer.

    A request that only repeats its parent's brings none: nothing stands after the answer. One that repeats an earlier
    sibling brings the same next state again, with the same id.
    """
    parent, answer = found.parent, found.answer
    if parent is None or answer is None or not parent.is_main:
        return None
    evidence = _evidence_after(view, found, answer.position)
    if not evidence:
        return None
    following = _with_assistant_messages(request.messages, evidence, view, found, answer.position)
    kind = NextStateKind.TOOL_RESULT if evidence[0].view.role == "tool" else NextStateKind.REPLY
    return _draft(
        parent,
        cause=f"messages:{following_key(keys, evidence)}",
        kind=kind,
        observed_at=request.received_at,
        content={
            "request_messages": list(request.messages[: answer.position]),
            "tools": list(request.tools),
            "response_message": answer.message,
            "following_messages": following,
            "child_turn_id": child_turn_id,
        },
    )


def explicit_next_state(parent: KnownTurn, feedback: ExplicitFeedback, observed_at: datetime) -> NextStateDraft:
    """Explicit evidence: a person's judgement, or an environment's or verifier's outcome."""
    kind = NextStateKind.FEEDBACK if feedback.source == "user" else NextStateKind.OUTCOME
    return _draft(
        parent,
        cause=f"feedback:{feedback.feedback_id}",
        kind=kind,
        observed_at=observed_at,
        content={"feedback": feedback},
    )


def session_end(parent: KnownTurn, observed_at: datetime) -> NextStateDraft:
    """Nothing followed the turn: its session was closed or fell idle."""
    return _draft(parent, cause="session_end", kind=NextStateKind.SESSION_END, observed_at=observed_at, content={})


def _draft(
    parent: KnownTurn,
    *,
    cause: str,
    kind: NextStateKind,
    observed_at: datetime,
    content: Mapping[str, object],
) -> NextStateDraft:
    event = NextStateEvent.model_validate(
        {
            "next_state_id": next_state_id(parent.turn_id, cause),
            "turn_id": parent.turn_id,
            "turn_ref": parent.turn_ref or _UNKNOWN_PLACE,
            "session_id": parent.session_id,
            "principal": parent.principal,
            "kind": kind,
            "turn_trainable": parent.trainable,
            "rollout": parent.rollout,
            "observed_at": observed_at,
            **content,
        }
    )
    return NextStateDraft(event=event, place_known=parent.turn_ref is not None)


def _evidence_after(view: ConversationView, found: Found, position: int) -> list[SeenMessage]:
    """User and tool messages after the answer, less harness messages and the tool results of side turns."""
    evidence: list[SeenMessage] = []
    for seen in view.messages_after(position):
        if not seen.view.is_evidence or seen.key is None:
            continue
        if seen.view.role == "tool" and _answer_before(view, seen.position) in found.hidden:
            continue
        evidence.append(seen)
    return evidence


def _answer_before(view: ConversationView, position: int) -> int | None:
    return max((answer.position for answer in view.answers if answer.position < position), default=None)


def _with_assistant_messages(
    messages: Sequence[Message], evidence: Sequence[SeenMessage], view: ConversationView, found: Found, position: int
) -> list[Message]:
    """The evidence as the judge sees it, with assistant messages that the client put between, in order."""
    last = evidence[-1].position
    between: dict[int, Message] = {
        answer.position: messages[answer.position]
        for answer in view.answers
        if position < answer.position < last
        and answer.position not in found.hidden
        and not view.answers_machinery(answer.position)
    }
    shown: dict[int, Message] = {seen.position: _shown(seen) for seen in evidence}
    return [message for _, message in sorted({**between, **shown}.items())]


def _shown(seen: SeenMessage) -> dict[str, JsonValue]:
    assert seen.view.message is not None, "evidence has a message"
    return seen.view.message
