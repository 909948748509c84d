"""Answers of which nothing is kept: no turn, no next state, no entry in the index, no byte on disk."""

from collections.abc import Mapping

from clawstream.errors import RequestRefused
from clawstream.metrics import Metrics
from schemas.events import TurnEvent
from schemas.events.base import TurnType
from schemas.events.turn import ParentEvidence
from services.gateway.ports import IncomingRequest, Placement

STORE_HEADER = "x-clawstream-store"
"""`false` opts a turn out; `true` records it whatever the body says (some agents always send `store: false`)."""
_VALUES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def is_opted_out(headers: Mapping[str, str], store: bool | None) -> bool:
    """Whether nothing of this turn may be written down. `store` is the body's field; the header overrules it.

    Raises RequestRefused for a header that says neither yes nor no: to guess would break a promise.
    """
    value = headers.get(STORE_HEADER, "").strip().lower()
    if not value:
        return store is False
    if value not in _VALUES:
        raise RequestRefused(f"{STORE_HEADER} must be true or false", code="invalid_header", parameter=STORE_HEADER)
    return not _VALUES[value]


class UnrecordedTurns:
    """Implements `services.gateway.ports.TurnRecorder` for turns that were opted out: it forgets them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def place(self, request: IncomingRequest) -> Placement:
        """A place of its own. What the client says of the session only helps to choose the engine."""
        return Placement(
            turn_id=request.turn_id,
            session_id=request.session_header or request.session_hint or request.turn_id,
            parent_turn_id=None,
            parent_evidence=ParentEvidence(rule="none"),
            depth=0,
            turn_type=request.turn_type_header or TurnType.MAIN,
            turn_type_reason="opted_out",
            client_profile="",
        )

    async def finish(self, request: IncomingRequest, placement: Placement, turn: TurnEvent) -> bool:
        """Forgets the turn."""
        self._metrics.increment("turns_opted_out_total")
        return False
