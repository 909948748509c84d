"""`clawstream.turn-index`: finds a turn by its answer or by its response id."""

from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event, RecordReference, RolloutPosition, TurnType


class TurnIndexEvent(Event):
    """What a gateway must know of a turn to recognise the request that follows it.

    Holds keyed hashes (truncated HMAC-SHA256 in hexadecimal), never text: who reads the index learns nothing of what
    was said.
    """

    event_type: ClassVar[str] = "clawstream.turn-index"

    turn_id: str = Field(min_length=1)
    """The turn."""
    session_id: str = Field(min_length=1)
    """Its conversation."""
    principal: str = Field(min_length=1)
    """Whom the API key belongs to: an answer is found only by the one who received it."""
    parent_turn_id: str | None = None
    """Its parent."""
    depth: int = Field(default=0, ge=0)
    """Number of ancestors."""
    turn_type: TurnType = TurnType.MAIN
    """main or side."""
    trainable: bool = True
    """Copied from the turn."""
    response_id: str = Field(min_length=1)
    """The OpenAI response id."""
    answer_key: str = Field(min_length=1)
    """Keyed hash of principal and canonical answer: 32 hexadecimal characters."""
    ancestor_answer_keys: list[str] = Field(default=[])
    """Answer keys of the ancestors, nearest first, at most 16."""
    message_keys: list[str] = Field(default=[])
    """Keyed hashes of the request's normalised user and tool messages, in order, the newest 64, 16 characters each."""
    session_hint: str | None = None
    """Keyed hash of the session hint that the client sent, if any."""
    trace_id: str | None = None
    """W3C trace id of the request, if any."""
    rollout: RolloutPosition | None = None
    """Copied from the turn, so that its next states can carry it."""
    turn_ref: RecordReference
    """Where the turn is on the log."""
    created_at: AwareDatetime
    """When the turn was finished."""


class OutboxPositionEvent(Event):
    """How far a gateway's outbox has been drained. Written in the transaction that drained it."""

    event_type: ClassVar[str] = "clawstream.outbox-position"

    gateway: str = Field(min_length=1)
    """Name of the gateway."""
    outbox_id: str = Field(min_length=1)
    """Identity of the outbox on disk: a new disk starts a new one."""
    next_sequence: int = Field(ge=0)
    """The first entry that is not on the log yet."""
    written_at: AwareDatetime
    """When it was written."""
