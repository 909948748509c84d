"""From turns and next states to outbox entries that the log takes. Does no I/O; large ones take milliseconds."""

import re
from collections.abc import Sequence
from datetime import datetime

from clawstream.bus.interface import OutgoingRecord
from clawstream.codec import encode
from schemas.events import TurnEvent
from services.gateway.event_size import fitted_next_state, without_request
from services.gateway.known_turn import KnownTurn
from services.gateway.next_states import NextStateDraft, session_end
from services.gateway.outbox_entries import NextStateEntry, TurnEntry, encode_next_state, encode_turn
from services.gateway.placing import Placed, Placer
from services.gateway.ports import IncomingRequest

_MAX_TURN_BYTES = 3_900_000
"""Below the limit of the turns topic (4 MiB), with room for headers."""
_TRACE_ID = re.compile(r"\A[0-9a-f]{32}\Z")
_SPAN_ID = re.compile(r"\A[0-9a-f]{16}\Z")


class EntryEncoder:
    """Thread-safe."""

    def __init__(self, *, placer: Placer, turns_topic: str, source: str, max_next_state_bytes: int) -> None:
        """`source` is what the records say of their origin."""
        self._placer = placer
        self._turns_topic = turns_topic
        self._source = source
        self._max_next_state_bytes = max_next_state_bytes

    def turn(self, request: IncomingRequest, placed: Placed, turn: TurnEvent) -> tuple[KnownTurn, bytes]:
        """What the index will say of a turn, and its entry. A turn too large for the log leaves its request out."""
        traceparent = _traceparent(request.trace_id, turn.turn_id)
        record = self._turn_record(turn, traceparent)
        size = len(record.value or b"")
        if size > _MAX_TURN_BYTES:
            turn = without_request(turn, f"the event has {size} bytes, the log takes {_MAX_TURN_BYTES}")
            record = self._turn_record(turn, traceparent)
        known = self._placer.known_turn(request, placed, turn)
        return known, encode_turn(TurnEntry(record=record, known=known, traceparent=traceparent))

    def next_state(self, draft: NextStateDraft, trace_id: str | None) -> bytes:
        """The entry of a next state, cut so that the log takes it."""
        event = fitted_next_state(draft.event, self._max_next_state_bytes)
        fitted = NextStateDraft(event=event, place_known=draft.place_known)
        traceparent = _traceparent(trace_id, event.next_state_id)
        return encode_next_state(NextStateEntry(draft=fitted, traceparent=traceparent))

    def session_ends(self, turns: Sequence[KnownTurn], now: datetime) -> list[bytes]:
        """The entries that say that nothing followed these turns."""
        return [self.next_state(session_end(turn, now), None) for turn in turns]

    def _turn_record(self, turn: TurnEvent, traceparent: str | None) -> OutgoingRecord:
        return encode(
            turn,
            topic=self._turns_topic,
            key=turn.session_id,
            event_id=turn.turn_id,
            source=self._source,
            traceparent=traceparent,
        )


def _traceparent(trace_id: str | None, cause: str) -> str | None:
    """W3C trace context with the first 16 hexadecimal digits of the event's own id as the parent span."""
    if trace_id is None or not _TRACE_ID.match(trace_id):
        return None
    span = cause.replace("-", "")[:16]
    return f"00-{trace_id}-{span}-01" if _SPAN_ID.match(span) else None
