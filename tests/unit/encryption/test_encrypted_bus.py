"""A bus that encrypts, around one in memory: what others see of a record, and what becomes of one that is forgotten."""

import os
from dataclasses import replace
from typing import Any

import pytest

from clawstream import topics
from clawstream.bus.interface import Bus, Delivery, OutgoingRecord, Record, TopicPartition, TopicSpecification
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.codec import decode_as, encode, header
from clawstream.encryption.bus import EncryptedBus
from clawstream.encryption.deletion import delete_keys, keys_of_session
from clawstream.encryption.envelope import KEY_HEADER
from clawstream.encryption.master_key import MasterKeys
from clawstream.encryption.session_keys import SessionKeys
from clawstream.errors import (
    BrokerUnavailable,
    DecodeError,
    EngineRejected,
    ForgottenContent,
    RecordRejected,
    TransactionAbortable,
)
from clawstream.worker.dead_letters import dead_letter_record
from clawstream.worker.outcomes import DeadLetter
from schemas.events import OutboxPositionEvent, TurnEvent
from services.trainer.dead_letters import DeadLetter as TrainerDeadLetter
from tests.fixtures.buses import read_all
from tests.fixtures.judged_log import NOW, turn_event

NAMESPACE = "test"
TURNS, DEAD = f"{NAMESPACE}.{topics.TURNS}", f"{NAMESPACE}.{topics.JUDGE_DLQ}"
TURN = turn_event(1, session_id="session")
WORDS = b"Question 1?"


@pytest.fixture
def inner() -> MemoryBus:
    made = MemoryBus()
    made.admin().create_topics([TopicSpecification(f"{NAMESPACE}.{topics.SESSION_KEYS}", 1)])
    made.admin().create_topics([TopicSpecification(name, 1) for name in (TURNS, DEAD)])
    return made


def around(inner: Bus, *, encrypts: bool = True) -> EncryptedBus:
    """The bus of another process."""
    keys = SessionKeys(
        inner,
        NAMESPACE,
        MasterKeys(list),
        source="tests",
        renews=True,
        clock=ManualClock(),
        random_bytes=os.urandom,
    )
    return EncryptedBus(inner, keys, encrypts=encrypts)


def turn_record(**values: Any) -> OutgoingRecord:
    return replace(encode(TURN, topic=TURNS, key="session", event_id="turn-1", source="tests"), **values)


def write(bus: Bus, *records: OutgoingRecord) -> list[Delivery]:
    delivered: list[Delivery] = []
    producer = bus.transactional_producer("tests")
    producer.begin()
    for record in records:
        producer.produce(record, delivered.append)
    producer.commit()
    producer.close()
    return delivered


def forget(inner: Bus) -> None:
    delete_keys(inner, NAMESPACE, keys_of_session(inner, NAMESPACE, "session"), "tests")


def test_the_log_holds_ids_and_no_word_and_every_reader_gets_the_event(inner: MemoryBus) -> None:
    record = turn_record()
    delivered = write(around(inner), record)
    (stored,) = read_all(inner, TURNS)
    assert WORDS not in (stored.value or b"")
    assert b'"turn_id":"turn-1"' in (stored.value or b"")
    assert (stored.key, stored.headers[:-1]) == (b"session", record.headers)
    assert delivered == [Delivery(record, 0, stored.offset)], "a writer hears of the record that it gave"
    for bus in (around(inner), around(inner, encrypts=False)):
        (read,) = read_all(bus, TURNS)
        assert decode_as(read, TurnEvent) == TURN
        assert (read.value_on_log, read.key, read.offset) == (stored.value, stored.key, stored.offset)


def test_what_is_off_or_holds_no_content_or_is_a_tombstone_is_written_as_it_is(inner: MemoryBus) -> None:
    position = OutboxPositionEvent(gateway="g", outbox_id="o", next_sequence=3, written_at=NOW)
    plain = [
        encode(position, topic=TURNS, key="g", event_id="1", source="tests"),
        turn_record(value=None),
        OutgoingRecord(TURNS, b"poison", b"not json"),
    ]
    write(around(inner), *plain)
    write(around(inner, encrypts=False), turn_record())
    stored = read_all(inner, TURNS)
    assert [record.value for record in stored] == [*(each.value for each in plain), turn_record().value]
    assert read_all(inner, f"{NAMESPACE}.{topics.SESSION_KEYS}") == []
    assert read_all(around(inner), TURNS) == stored


def test_a_forgotten_record_comes_as_it_lies_there_and_says_so_when_it_is_decoded(inner: MemoryBus) -> None:
    write(around(inner), turn_record())
    (stored,) = read_all(inner, TURNS)
    forget(inner)
    (read,) = read_all(around(inner), TURNS)
    assert (read.value, read.value_on_log) == (stored.value, stored.value)
    with pytest.raises(ForgottenContent, match=rf"{TURNS}\[0\]@{stored.offset}.*forgotten"):
        decode_as(read, TurnEvent)


def test_a_damaged_record_is_no_forgotten_one(inner: MemoryBus) -> None:
    write(around(inner), turn_record())
    (stored,) = read_all(inner, TURNS)
    write(inner, OutgoingRecord(TURNS, b"another key", stored.value, stored.headers))
    _, moved = read_all(around(inner), TURNS)
    with pytest.raises(DecodeError, match="belongs to another record") as caught:
        decode_as(moved, TurnEvent)
    assert not isinstance(caught.value, ForgottenContent)


@pytest.mark.parametrize("stage", ["worker", "trainer"])
def test_a_dead_letter_holds_the_bytes_of_the_log_and_can_be_read_until_it_is_forgotten(
    inner: MemoryBus, stage: str
) -> None:
    bus = around(inner)
    write(bus, turn_record())
    (read,) = read_all(bus, TURNS)
    assert isinstance(read.value, bytes)
    assert WORDS in read.value
    write(bus, _letter(read, stage))
    (letter,) = read_all(inner, DEAD)
    assert letter.value == read.value_on_log
    (readable,) = read_all(bus, DEAD)
    assert readable.value == read.value
    sent_back = OutgoingRecord(TURNS, letter.key, letter.value, read.headers)
    write(inner, sent_back)
    assert [decode_as(each, TurnEvent) for each in read_all(bus, TURNS)] == [TURN, TURN]
    forget(inner)
    assert read_all(around(inner), DEAD)[0].value == letter.value


def _letter(record: Record, stage: str) -> OutgoingRecord:
    error = DecodeError("what is wrong")
    if stage == "trainer":
        made = TrainerDeadLetter.of(record, error, process="trainer", now_iso=NOW.isoformat())
        return TrainerDeadLetter.model_validate_json(made.model_dump_json()).outgoing(DEAD)
    outcome = DeadLetter("undecodable", error)
    return dead_letter_record(record, outcome, topic=DEAD, group="g", service_version="1", now=NOW)


def test_a_dead_letter_does_not_quote_what_was_encrypted(inner: MemoryBus) -> None:
    bus = around(inner)
    write(bus, turn_record())
    (read,) = read_all(bus, TURNS)
    (plain,) = [replace(read, encrypted_value=None)]

    def message(record: Record, error: Exception) -> str | None:
        letter = dead_letter_record(
            record, DeadLetter("handler_failed", error), topic=DEAD, group="g", service_version="1", now=NOW
        )
        return header(letter.headers, "dlq.error.message")

    quoting = [KeyError("Question 1?"), EngineRejected("Question 1? is too long", status=400)]
    assert all("Question" not in (message(read, error) or "") for error in quoting)
    assert all("Question" in (message(plain, error) or "") for error in quoting)
    assert message(read, DecodeError("turns[0]@1: field x")) == "turns[0]@1: field x"


def test_a_refused_record_is_named_as_it_was_given() -> None:
    small = MemoryBus()
    small.admin().create_topics([TopicSpecification(f"{NAMESPACE}.{topics.SESSION_KEYS}", 1)])
    small.admin().create_topics([TopicSpecification(TURNS, 1, {"max.message.bytes": "300"})])
    record = turn_record()
    producer = around(small).transactional_producer("tests")
    producer.begin()
    with pytest.raises(RecordRejected) as caught:
        producer.produce(record)
        producer.commit()
    assert caught.value.record is record


def test_without_a_key_a_transaction_is_aborted_and_nothing_is_written(
    inner: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = around(inner)
    producer = bus.transactional_producer("tests")
    producer.begin()

    def unavailable(*_: object) -> None:
        raise BrokerUnavailable("no broker")

    monkeypatch.setattr(SessionKeys, "_send", unavailable)
    with pytest.raises(TransactionAbortable, match="no key for a record"):
        producer.produce(turn_record())
    producer.abort()
    monkeypatch.undo()
    write(bus, turn_record())
    assert len(read_all(inner, TURNS)) == 1


def test_a_members_records_are_decrypted_too(inner: MemoryBus) -> None:
    write(around(inner), turn_record())
    reader = around(inner).reader()
    reader.assign({TopicPartition(TURNS, 0): 0})
    (read,) = reader.consume(10, 1.0)
    assert decode_as(read, TurnEvent) == TURN
    assert header(read.headers, KEY_HEADER)
