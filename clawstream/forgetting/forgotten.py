"""What must not be used any more: a fold of the `forgotten` topic."""

from clawstream.bus.interface import Record
from clawstream.codec import decode_as
from schemas.events import ForgottenEvent
from schemas.events.base import RecordReference
from schemas.events.forgotten import ForgottenKind


def forgotten_key(kind: ForgottenKind, subject: str) -> str:
    """Key of a request on the log."""
    return f"{kind.value}/{subject}"


class Forgotten:
    """All requests. One thread applies, any may ask."""

    def __init__(self) -> None:
        self._requests: dict[str, ForgottenEvent] = {}

    def apply(self, record: Record) -> None:
        """Takes a record in. A tombstone withdraws a request. Raises DecodeError for what is no request."""
        if record.key is None:
            return
        key = record.key.decode(errors="replace")
        if record.value is None:
            self._requests.pop(key, None)
        else:
            self._requests[key] = decode_as(record, ForgottenEvent)

    def get(self, kind: ForgottenKind, subject: str) -> ForgottenEvent | None:
        """The request that names this, if any."""
        return self._requests.get(forgotten_key(kind, subject))

    def covers(self, *, session_id: str, principal: str, turn_ref: RecordReference) -> bool:
        """Whether what follows from the turn at `turn_ref` is to be refused."""
        if not self._requests:
            return False
        if self.get(ForgottenKind.SESSION, session_id) is not None:
            return True
        request = self.get(ForgottenKind.PRINCIPAL, principal)
        return request is not None and turn_ref.offset < request.turn_ends.get(str(turn_ref.partition), 0)
