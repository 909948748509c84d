"""Events to records and back: JSON values, CloudEvents binary-mode headers, W3C trace context.

Reference: CloudEvents Kafka protocol binding 1.0.2 section 3.2 (binary content mode): attributes are `ce_` headers,
the value is the data alone, so that records can be routed without parsing them.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import orjson
from pydantic import ValidationError

from clawstream.bus.interface import Headers, OutgoingRecord, Record
from clawstream.errors import DecodeError
from schemas.events import EVENT_MODELS, Event

EventType = TypeVar("EventType", bound=Event)

_SPECIFICATION = ("ce_specversion", b"1.0")


def encode(
    event: Event,
    *,
    topic: str,
    key: str,
    event_id: str,
    source: str,
    partition: int | None = None,
    traceparent: str | None = None,
) -> OutgoingRecord:
    """The record for `event`: see `encode_fields`."""
    return encode_fields(
        event.model_dump(mode="json"),
        type(event),
        topic=topic,
        key=key,
        event_id=event_id,
        source=source,
        partition=partition,
        traceparent=traceparent,
    )


def encode_fields(
    fields: Mapping[str, object],
    model: type[Event],
    *,
    topic: str,
    key: str,
    event_id: str,
    source: str,
    partition: int | None = None,
    traceparent: str | None = None,
) -> OutgoingRecord:
    """The record for an event of `model` whose `fields`, as JSON has them, are known to be valid.

    `topic` is the full name, `source` the process that writes it (`gateway/gateway-0`), `event_id` the event's own id.
    """
    headers: Headers = (_SPECIFICATION, ("ce_id", event_id.encode()), *_same_headers(model, source))
    if traceparent is not None:
        headers = (*headers, ("traceparent", traceparent.encode()))
    return OutgoingRecord(
        topic=topic,
        key=key.encode(),
        value=orjson.dumps(fields),
        headers=headers,
        partition=partition,
    )


@lru_cache(maxsize=256)
def _same_headers(model: type[Event], source: str) -> Headers:
    """Those that all records of a model and a source share."""
    return (
        ("ce_type", model.event_type.encode()),
        ("ce_source", source.encode()),
        ("ce_dataversion", str(model.event_version).encode()),
        ("content-type", b"application/json"),
    )


def header(headers: Headers, name: str) -> str | None:
    """The last value of a header as text, or None."""
    for found, value in reversed(headers):
        if found == name:
            return value.decode("utf-8", errors="replace")
    return None


def decode(record: Record) -> Event:
    """The event in `record`. Raises DecodeError, which names the position, for anything that is not a known event, and
    ForgottenContent for what was encrypted under a key that is deleted."""
    if record.unreadable is not None:
        raise record.unreadable
    if record.value is None:
        raise DecodeError(f"{record}: a tombstone where an event was expected")
    event_type = header(record.headers, "ce_type")
    model = EVENT_MODELS.get(event_type or "")
    if model is None:
        raise DecodeError(f"{record}: unknown event type {event_type!r}; was it written by a newer clawstream?")
    return decode_value(record.value, model, where=record)


def decode_as(record: Record, model: type[EventType]) -> EventType:
    """The event in `record`, which must be a `model`. Raises DecodeError otherwise."""
    event = decode(record)
    if not isinstance(event, model):
        raise DecodeError(f"{record}: a {event.event_type} where a {model.event_type} was expected")
    return event


def decode_value(value: bytes, model: type[EventType], *, where: object) -> EventType:
    """Parses and validates one value. Raises DecodeError with `where` (as text) and every wrong field."""
    try:
        document: object = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise DecodeError(f"{where}: not JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise DecodeError(f"{where}: a JSON {type(document).__name__} where an object was expected")
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'event'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise DecodeError(f"{where}: not a valid {model.event_type}: {problems}") from error
