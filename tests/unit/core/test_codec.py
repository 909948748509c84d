"""Records and events: CloudEvents headers, and refusals that say where and why."""

from datetime import UTC, datetime

import orjson
import pytest

from clawstream.bus.interface import Headers, OutgoingRecord, Record
from clawstream.codec import decode, decode_as, encode, header
from clawstream.errors import DecodeError
from schemas.events import WeightPointerEvent, WeightVersionEvent

POINTER = WeightPointerEvent(policy="default", weight_version=3, pointed_at=datetime(2026, 1, 1, tzinfo=UTC))


def as_read(outgoing: OutgoingRecord, *, value: bytes | None = None, headers: Headers | None = None) -> Record:
    return Record(
        topic=outgoing.topic,
        partition=2,
        offset=14,
        key=outgoing.key,
        value=outgoing.value if value is None else value,
        headers=outgoing.headers if headers is None else headers,
        timestamp_milliseconds=0,
    )


def encoded() -> OutgoingRecord:
    return encode(
        POINTER,
        topic="x.weights.v1",
        key="default",
        event_id="id-1",
        source="trainer/trainer-0",
        traceparent="00-abc-def-01",
    )


def test_an_event_comes_back_and_its_headers_are_cloudevents() -> None:
    record = as_read(encoded())
    assert decode(record) == POINTER
    assert decode_as(record, WeightPointerEvent) == POINTER
    assert dict(record.headers) == {
        "ce_specversion": b"1.0",
        "ce_id": b"id-1",
        "ce_type": b"clawstream.weight-pointer",
        "ce_source": b"trainer/trainer-0",
        "ce_dataversion": b"1",
        "content-type": b"application/json",
        "traceparent": b"00-abc-def-01",
    }
    assert record.key == b"default"


def test_the_last_header_of_a_name_counts_and_bad_text_does_not_raise() -> None:
    headers = (("a", b"1"), ("b", b"\xff"), ("a", b"2"))
    assert header(headers, "a") == "2"
    assert header(headers, "b") == "�"
    assert header(headers, "c") is None


@pytest.mark.parametrize(
    ("value", "headers", "message"),
    [
        (b"not json", None, "not JSON"),
        (b"[1]", None, "a JSON list where an object was expected"),
        (orjson.dumps({"policy": ""}), None, r"policy: .*; weight_version: .*; pointed_at: "),
        (None, (), "unknown event type None"),
        (None, (("ce_type", b"clawstream.from-the-future"),), "unknown event type 'clawstream.from-the-future'"),
    ],
)
def test_what_cannot_be_decoded_says_where_and_why(value: bytes | None, headers: Headers | None, message: str) -> None:
    with pytest.raises(DecodeError, match=rf"x\.weights\.v1\[2\]@14: .*{message}"):
        decode(as_read(encoded(), value=value, headers=headers))


def test_a_tombstone_is_no_event() -> None:
    outgoing = OutgoingRecord("x.weights.v1", b"default", None, encoded().headers)
    with pytest.raises(DecodeError, match="tombstone"):
        decode(as_read(outgoing))


def test_another_event_than_expected_is_refused() -> None:
    with pytest.raises(DecodeError, match=r"a clawstream\.weight-pointer where a clawstream\.weight-version"):
        decode_as(as_read(encoded()), WeightVersionEvent)


def test_an_unknown_field_is_ignored() -> None:
    document = {**orjson.loads(encoded().value or b""), "from_the_future": [1]}
    assert decode(as_read(encoded(), value=orjson.dumps(document))) == POINTER
