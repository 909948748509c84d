"""Next states for the judge's tests."""

from datetime import UTC, datetime
from typing import Any

from schemas.events import NextStateEvent
from schemas.events.base import Message, RecordReference

REFERENCE = RecordReference(topic="clawstream.next-states.v1", partition=3, offset=17)


def next_state(**values: Any) -> NextStateEvent:
    """A reply of a user; any field can be replaced."""
    return NextStateEvent.model_validate(
        {
            "next_state_id": "next-state-1",
            "turn_id": "turn-1",
            "turn_ref": {"topic": "clawstream.turns.v1", "partition": 3, "offset": 40},
            "session_id": "session-1",
            "principal": "alice",
            "kind": "reply",
            "request_messages": [{"role": "user", "content": "What is the capital of Australia?"}],
            "response_message": {"role": "assistant", "content": "Canberra."},
            "following_messages": [{"role": "user", "content": "Thanks, exactly."}],
            "observed_at": datetime(2026, 3, 1, 9, 15, tzinfo=UTC),
            **values,
        }
    )


def reply(text: str) -> NextStateEvent:
    """A reply with this text."""
    return next_state(following_messages=[{"role": "user", "content": text}])


def tool_results(*texts: str) -> NextStateEvent:
    """Results of tools."""
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": f"call-{number}", "content": text} for number, text in enumerate(texts)
    ]
    return next_state(kind="tool_result", following_messages=messages)


def feedback(score: float, text: str | None = None, kind: str = "feedback") -> NextStateEvent:
    """Explicit evidence."""
    return next_state(
        kind=kind,
        request_messages=[],
        response_message=None,
        following_messages=[],
        feedback={"feedback_id": "feedback-1", "score": score, "text": text},
    )
