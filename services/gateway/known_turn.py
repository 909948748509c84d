"""What a gateway knows of a turn: the content of a turn-index entry, before or after the turn's place on the log."""

from dataclasses import dataclass, replace
from datetime import datetime

from schemas.events import TurnIndexEvent
from schemas.events.base import RecordReference, RolloutPosition, TurnType

MAX_ANCESTORS = 16
"""So many answer keys of ancestors are kept."""
MAX_MESSAGE_KEYS = 64
"""So many keys of a request's newest messages are kept."""


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """A turn that a request may follow. All keys are keyed hashes, see `services.gateway.canonical`."""

    turn_id: str
    session_id: str
    principal: str
    parent_turn_id: str | None
    depth: int
    turn_type: TurnType
    trainable: bool
    response_id: str
    answer_key: str
    ancestor_answer_keys: tuple[str, ...]
    """Nearest first."""
    message_keys: tuple[str, ...]
    """Of its request, in order."""
    session_hint: str | None
    trace_id: str | None
    rollout: RolloutPosition | None
    created_at: datetime
    turn_ref: RecordReference | None
    """None while the turn waits in this gateway's outbox."""

    @property
    def is_main(self) -> bool:
        return self.turn_type is TurnType.MAIN

    def at(self, turn_ref: RecordReference) -> "KnownTurn":
        """The same turn with its place on the log."""
        return replace(self, turn_ref=turn_ref)

    def unplaced(self) -> "KnownTurn":
        """The same turn as if it were not on the log."""
        return replace(self, turn_ref=None)

    def to_event(self) -> TurnIndexEvent:
        """The index entry. Raises ValueError while the turn's place on the log is unknown."""
        if self.turn_ref is None:
            raise ValueError(f"turn {self.turn_id} is not on the log yet")
        return TurnIndexEvent(
            turn_id=self.turn_id,
            session_id=self.session_id,
            principal=self.principal,
            parent_turn_id=self.parent_turn_id,
            depth=self.depth,
            turn_type=self.turn_type,
            trainable=self.trainable,
            response_id=self.response_id,
            answer_key=self.answer_key,
            ancestor_answer_keys=list(self.ancestor_answer_keys),
            message_keys=list(self.message_keys),
            session_hint=self.session_hint,
            trace_id=self.trace_id,
            rollout=self.rollout,
            turn_ref=self.turn_ref,
            created_at=self.created_at,
        )

    @classmethod
    def from_event(cls, event: TurnIndexEvent) -> "KnownTurn":
        """From an entry that was read."""
        return cls(
            turn_id=event.turn_id,
            session_id=event.session_id,
            principal=event.principal,
            parent_turn_id=event.parent_turn_id,
            depth=event.depth,
            turn_type=event.turn_type,
            trainable=event.trainable,
            response_id=event.response_id,
            answer_key=event.answer_key,
            ancestor_answer_keys=tuple(event.ancestor_answer_keys),
            message_keys=tuple(event.message_keys),
            session_hint=event.session_hint,
            trace_id=event.trace_id,
            rollout=event.rollout,
            created_at=event.created_at,
            turn_ref=event.turn_ref,
        )
