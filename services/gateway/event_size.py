"""Keeps events within what the log takes: what is largest and least needed is left out, and the event says so. Pure."""

import orjson

from schemas.events import NextStateEvent, TurnEvent
from schemas.events.base import Message
from schemas.events.turn import UntrainableReason

_CUT_NOTE = "\n[... cut: too long for the log]"


def fitted_next_state(event: NextStateEvent, max_bytes: int) -> NextStateEvent:
    """The event without the oldest messages of its request, and at worst with shortened texts, so that it fits."""
    excess = _size(event) - max_bytes
    if excess <= 0:
        return event
    request = list(event.request_messages)
    while request and excess > 0:
        # A leading system message says what the agent is: it goes last.
        at = 1 if len(request) > 1 and request[0].get("role") in ("system", "developer") else 0
        excess -= _message_size(request.pop(at))
    event = event.model_copy(update={"request_messages": request, "tools": event.tools if excess <= 0 else []})
    if _size(event) <= max_bytes:
        return event
    share = max_bytes // (8 * (len(event.following_messages) + 1))
    return event.model_copy(
        update={
            "following_messages": [_shortened(message, share) for message in event.following_messages],
            "response_message": _shortened(event.response_message, share) if event.response_message else None,
        }
    )


def without_request(turn: TurnEvent, detail: str) -> TurnEvent:
    """The turn without the messages and tools of its request, and so not to be trained."""
    return turn.model_copy(
        update={
            "request_messages": [],
            "tools": [],
            "trainable": False,
            "untrainable_reason": UntrainableReason.OVERSIZED,
            "untrainable_detail": detail,
        }
    )


def _size(event: NextStateEvent) -> int:
    return len(orjson.dumps(event.model_dump(mode="json")))


def _message_size(message: Message) -> int:
    return len(orjson.dumps(message)) + 1


def _shortened(message: Message, max_characters: int) -> Message:
    """A message whose text is cut; one that is large for another reason keeps only its role and a note."""
    content = message.get("content")
    if isinstance(content, str) and len(content) > max_characters:
        message = {**message, "content": content[:max_characters] + _CUT_NOTE}
    if _message_size(message) > 8 * max_characters:
        return {"role": message.get("role"), "content": _CUT_NOTE.strip()}
    return message
