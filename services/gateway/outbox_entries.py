"""What the outbox holds: turns with what the index must know of them, and next states.

entry     kind byte, length of the head (big-endian u32), head (JSON), body (the event's JSON, as on the log)
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from clawstream.bus.interface import OutgoingRecord
from clawstream.codec import decode_value
from clawstream.errors import DecodeError
from schemas.events import NextStateEvent, TurnIndexEvent
from schemas.events.base import RecordReference
from services.gateway.known_turn import KnownTurn
from services.gateway.next_states import NextStateDraft

_HEAD = struct.Struct(">cI")
_TURN = b"T"
_NEXT_STATE = b"N"
_NO_PLACE = RecordReference(topic="outbox", partition=0, offset=0)


@dataclass(frozen=True, slots=True)
class TurnEntry:
    """A finished turn."""

    record: OutgoingRecord
    """Exactly what goes to the log."""
    known: KnownTurn
    """What the index will say of it, without its place."""
    traceparent: str | None


@dataclass(frozen=True, slots=True)
class NextStateEntry:
    """Something that followed an answer."""

    draft: NextStateDraft
    traceparent: str | None


Entry = TurnEntry | NextStateEntry


def encode_turn(entry: TurnEntry) -> bytes:
    """The outbox payload of a turn. Its record must have a value."""
    head = {
        "topic": entry.record.topic,
        "key": (entry.record.key or b"").decode(),
        "headers": [[name, value.decode()] for name, value in entry.record.headers],
        "known": entry.known.at(_NO_PLACE).to_event().model_dump(mode="json"),
        "traceparent": entry.traceparent,
    }
    return _joined(_TURN, head, entry.record.value or b"")


def encode_next_state(entry: NextStateEntry) -> bytes:
    """The outbox payload of a next state."""
    head = {"place_known": entry.draft.place_known, "traceparent": entry.traceparent}
    return _joined(_NEXT_STATE, head, orjson.dumps(entry.draft.event.model_dump(mode="json")))


def decode_entry(payload: bytes, *, where: str) -> Entry:
    """The entry in a payload that one of the functions above made. Raises DecodeError with `where` otherwise."""
    try:
        kind, length = _HEAD.unpack_from(payload)
        head = orjson.loads(payload[_HEAD.size : _HEAD.size + length])
    except (struct.error, orjson.JSONDecodeError) as error:
        raise DecodeError(f"{where}: not an outbox entry: {error}") from error
    body = payload[_HEAD.size + length :]
    if kind == _TURN:
        known = TurnIndexEvent.model_validate(head["known"])
        record = OutgoingRecord(
            topic=head["topic"],
            key=head["key"].encode(),
            value=body,
            headers=tuple((name, value.encode()) for name, value in head["headers"]),
        )
        return TurnEntry(record=record, known=KnownTurn.from_event(known).unplaced(), traceparent=head["traceparent"])
    if kind == _NEXT_STATE:
        event = decode_value(body, NextStateEvent, where=where)
        draft = NextStateDraft(event=event, place_known=head["place_known"])
        return NextStateEntry(draft=draft, traceparent=head["traceparent"])
    raise DecodeError(f"{where}: an outbox entry of unknown kind {kind!r}; was it written by a newer clawstream?")


def _joined(kind: bytes, head: Mapping[str, Any], body: bytes) -> bytes:
    encoded = orjson.dumps(head)
    return b"".join((_HEAD.pack(kind, len(encoded)), encoded, body))
