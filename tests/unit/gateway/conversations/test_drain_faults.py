"""Whatever fails while the outbox is drained, every entry is on the log once, in order."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from clawstream.bus.interface import Record
from clawstream.bus.memory import MemoryBus
from clawstream.bus.memory_consumer import MemoryConsumer
from clawstream.clock import SystemClock
from clawstream.codec import decode_as
from clawstream.errors import BrokerUnavailable, Fenced, NameTaken, TransactionAbortable, TransactionTimedOut
from clawstream.topics import NEXT_STATES, OUTBOX, TURN_INDEX, TURNS
from schemas.events import NextStateEvent, OutboxPositionEvent, TurnEvent, TurnIndexEvent
from services.gateway import drain
from services.gateway.outbox_position import position_record
from tests.fixtures.conversations import assistant, create_topics, records_of, running_gateway, until, user

GIVE_UP_SECONDS = 120.0


class FaultAt:
    """Raises at the n-th moment at which a fault can be injected, once."""

    def __init__(self, number: int, make: Callable[[], Exception]) -> None:
        self._left = number
        self._make = make
        self.raised_at: str | None = None

    def __call__(self, operation: str, when: str) -> None:
        self._left -= 1
        if self._left == 0:
            self.raised_at = f"{when} {operation}"
            raise self._make()


async def converse(bus: MemoryBus, directory: Path) -> list[TurnEvent]:
    turns: list[TurnEvent] = []
    async with running_gateway(bus, directory) as gateway:
        messages = [user("begin")]
        for number in range(3):
            turns.append(await gateway.answer(messages, f"answer {number}"))
            messages = [*messages, assistant(f"answer {number}"), user(f"reply {number}")]
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
    return turns


def check_log(bus: MemoryBus, turns: list[TurnEvent]) -> None:
    written = [(record, decode_as(record, TurnEvent)) for record in records_of(bus, TURNS)]
    assert [event.turn_id for _, event in written] == [turn.turn_id for turn in turns]
    places = {event.turn_id: (record.partition, record.offset) for record, event in written}
    states = [decode_as(record, NextStateEvent) for record in records_of(bus, NEXT_STATES)]
    assert [state.turn_id for state in states] == [turn.turn_id for turn in turns[:-1]]
    entries = [decode_as(record, TurnIndexEvent) for record in records_of(bus, TURN_INDEX)]
    assert sorted(entry.turn_id for entry in entries) == sorted(places)
    for event in (*states, *entries):
        assert (event.turn_ref.partition, event.turn_ref.offset) == places[event.turn_id]
    positions = [decode_as(record, OutboxPositionEvent).next_sequence for record in records_of(bus, OUTBOX)]
    assert positions == sorted(set(positions))
    assert positions[-1] == len(turns) + len(states)


@pytest.mark.parametrize("error", [TransactionAbortable, BrokerUnavailable])
async def test_a_fault_at_every_moment(tmp_path: Path, error: type[Exception]) -> None:
    async def with_fault_at(number: int) -> str | None:
        bus = MemoryBus()
        create_topics(bus)
        fault = FaultAt(number, lambda: error("injected"))
        bus.set_fault(fault)
        turns = await converse(bus, tmp_path / str(number))
        bus.set_fault(None)
        check_log(bus, turns)
        return fault.raised_at

    moments = await asyncio.gather(*(with_fault_at(number) for number in range(1, 40)))
    assert {"before initialise", "before begin", "after produce", "before commit", "after commit"} <= set(moments)


TRANSACTIONAL_ID = "clawstream.gateway.gateway-0.outbox"


def take_the_name(bus: MemoryBus) -> None:
    """As another process does: its outbox's identity first of all."""
    producer = bus.transactional_producer(TRANSACTIONAL_ID)
    producer.begin()
    producer.produce(
        position_record(
            topic="clawstream.outbox.v1",
            gateway="gateway-0",
            source="gateway/gateway-0",
            outbox_id="another outbox",
            next_sequence=0,
            clock=SystemClock(),
        )
    )
    producer.commit()
    producer.close()


async def test_whoever_takes_the_name_stops_the_old_one(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    async with running_gateway(bus, tmp_path) as gateway:
        await gateway.answer([user("a")], "b")
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
        take_the_name(bus)
        await gateway.answer([user("c")], "d")
        assert not gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
        assert isinstance(gateway.conversations.failure, NameTaken)
        assert not gateway.conversations.is_ready()


async def test_an_earlier_initialisation_of_ours_that_comes_late_stops_nothing(tmp_path: Path) -> None:
    """After an outage the broker may carry out what was given up long ago: it fences us, and writes nothing."""
    bus = MemoryBus()
    create_topics(bus)
    turns: list[TurnEvent] = []
    async with running_gateway(bus, tmp_path) as gateway:
        for number in range(3):
            turns.append(await gateway.answer([user(f"question {number}")], f"answer {number}"))
            assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)
            bus.transactional_producer(TRANSACTIONAL_ID).close()
        turns.append(await gateway.answer([user("the last")], "answer"))
        assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)
        assert gateway.conversations.failure is None
    on_log = [decode_as(record, TurnEvent).turn_id for record in records_of(bus, TURNS)]
    assert sorted(on_log) == sorted(turn.turn_id for turn in turns)


class BrokerEndsTransaction:
    """At the n-th commit: the broker has ended the transaction, because it was open for too long, and fenced us."""

    def __init__(self, bus: MemoryBus, commit: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._bus = bus
        self._left = commit
        self._meanwhile = meanwhile

    def __call__(self, operation: str, when: str) -> None:
        if (operation, when) != ("commit", "before"):
            return
        self._left -= 1
        if self._left == 0:
            self._bus.set_fault(None)
            # Raises the epoch and aborts what is open, as the broker does.
            self._bus.transactional_producer(TRANSACTIONAL_ID).close()
            self._meanwhile()
            raise TransactionTimedOut("open for longer than its timeout")


@pytest.mark.parametrize("commit", [1, 2, 3])
async def test_a_transaction_that_outlived_its_timeout_is_sent_again(tmp_path: Path, commit: int) -> None:
    bus = MemoryBus()
    create_topics(bus)
    bus.set_fault(BrokerEndsTransaction(bus, commit))
    check_log(bus, await converse(bus, tmp_path))


async def test_who_took_the_name_during_a_transaction_that_outlived_its_timeout_keeps_it(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)

    def another_process_starts() -> None:
        take_the_name(bus)

    async with running_gateway(bus, tmp_path) as gateway:
        await gateway.answer([user("a")], "b")
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
        bus.set_fault(BrokerEndsTransaction(bus, 1, another_process_starts))
        await gateway.answer([user("c")], "d")
        await until(lambda: gateway.conversations.failure is not None)
        assert isinstance(gateway.conversations.failure, Fenced)
        assert "another outbox" in str(gateway.conversations.failure)
    assert len(records_of(bus, TURNS)) == 1


async def test_a_process_writes_whose_outbox_it_drains_before_anything_else(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    async with running_gateway(bus, tmp_path / "old-disk"):
        await until(lambda: len(records_of(bus, OUTBOX)) == 1)
    async with running_gateway(bus, tmp_path / "new-disk"):
        await until(lambda: len(records_of(bus, OUTBOX)) == 2)
    async with running_gateway(bus, tmp_path / "new-disk") as gateway:
        await gateway.answer([user("a")], "b")
    old, new, drained = (decode_as(record, OutboxPositionEvent) for record in records_of(bus, OUTBOX))
    assert old.outbox_id != new.outbox_id == drained.outbox_id
    assert (old.next_sequence, new.next_sequence, drained.next_sequence) == (0, 0, 1)


async def test_no_transaction_is_open_while_the_index_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBus()
    create_topics(bus)
    async with running_gateway(bus, tmp_path, close_drain_seconds=0) as gateway:
        await until(gateway.conversations.is_ready)
        bus.set_available(False)
        first = await gateway.answer([user("a")], "the first answer of all")
        await gateway.answer([user("a"), assistant("the first answer of all"), user("b")], "the second answer of all")
    bus.set_available(True)

    def only_the_first_turn(operation: str, when: str) -> None:
        if (operation, when) == ("begin", "before") and records_of(bus, TURNS):
            raise BrokerUnavailable("injected")

    bus.set_fault(only_the_first_turn)
    monkeypatch.setattr(drain, "_MAX_ENTRIES", 1)
    async with running_gateway(bus, tmp_path, close_drain_seconds=0) as gateway:
        await until(lambda: len(records_of(bus, TURNS)) == 1)
    (tmp_path / "gateway-0" / "clawstream" / "turn-index.sqlite").unlink()

    begun: list[str] = []
    index_is_loaded = threading.Event()
    consume = MemoryConsumer.consume

    def consume_late(consumer: MemoryConsumer, max_records: int, timeout_seconds: float) -> list[Record]:
        if threading.current_thread().name == "index-follower":
            index_is_loaded.wait(GIVE_UP_SECONDS)
        return consume(consumer, max_records, timeout_seconds)

    monkeypatch.setattr(MemoryConsumer, "consume", consume_late)
    bus.set_fault(lambda operation, when: begun.append(operation) if operation == "begin" else None)
    async with running_gateway(bus, tmp_path) as gateway:
        assert not gateway.conversations.drain.wait_until_drained(0.3)
        assert begun == []
        index_is_loaded.set()
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
    assert begun
    (state,) = (decode_as(record, NextStateEvent) for record in records_of(bus, NEXT_STATES))
    assert state.turn_id == first.turn_id


async def test_a_reply_to_a_turn_whose_commit_was_not_answered_waits_for_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBus()
    create_topics(bus)
    index_is_read = threading.Event()
    index_is_read.set()
    follower_stands = threading.Event()
    consume = MemoryConsumer.consume

    def consume_late(consumer: MemoryConsumer, max_records: int, timeout_seconds: float) -> list[Record]:
        if threading.current_thread().name == "index-follower" and not index_is_read.is_set():
            follower_stands.set()
            index_is_read.wait(GIVE_UP_SECONDS)
        return consume(consumer, max_records, timeout_seconds)

    def without_answer(operation: str, when: str) -> None:
        if (operation, when) == ("commit", "after"):
            bus.set_fault(None)
            raise BrokerUnavailable("injected")

    monkeypatch.setattr(MemoryConsumer, "consume", consume_late)
    async with running_gateway(bus, tmp_path) as gateway:
        await until(gateway.conversations.is_ready)
        await until(lambda: len(records_of(bus, OUTBOX)) == 1)
        index_is_read.clear()
        await until(follower_stands.is_set)
        bus.set_fault(without_answer)
        first = await gateway.answer([user("a")], "the first answer of all")
        await until(lambda: len(records_of(bus, TURNS)) == 1)
        await gateway.answer([user("a"), assistant("the first answer of all"), user("b")], "the second answer of all")
        assert not gateway.conversations.drain.wait_until_drained(0.3)
        index_is_read.set()
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
    (state,) = (decode_as(record, NextStateEvent) for record in records_of(bus, NEXT_STATES))
    assert state.turn_id == first.turn_id


async def test_a_lost_disk_starts_a_new_outbox(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    first = await converse(bus, tmp_path / "old-disk")
    second = await converse(bus, tmp_path / "new-disk")
    found = [decode_as(record, TurnEvent).turn_id for record in records_of(bus, TURNS)]
    assert sorted(found) == sorted(turn.turn_id for turn in (*first, *second))


async def test_an_entry_too_large_for_the_log_does_not_hold_up_the_others(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    admin = bus.admin()
    admin.alter_topic_config("clawstream.next-states.v1", {"max.message.bytes": "3000"})
    async with running_gateway(bus, tmp_path) as gateway:
        first = await gateway.answer([user("a")], "the first answer")
        history = [user("a"), assistant("the first answer")]
        await gateway.answer([*history, user("x" * 10_000)], "the second answer")
        await gateway.answer([*history, user("short")], "the third answer")
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
    states = [decode_as(record, NextStateEvent) for record in records_of(bus, NEXT_STATES)]
    assert [(state.turn_id, state.following_messages) for state in states] == [(first.turn_id, [user("short")])]
    assert len(records_of(bus, TURNS)) == 3


async def test_a_turn_too_large_for_the_log_leaves_the_index_and_is_counted(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    admin = bus.admin()
    admin.alter_topic_config("clawstream.turns.v1", {"max.message.bytes": "3000"})
    async with running_gateway(bus, tmp_path) as gateway:
        large = [user("x" * 10_000)]
        await gateway.answer(large, "the first answer")
        await gateway.answer([*large, assistant("the first answer"), user("short")], "the second answer")
        kept = await gateway.answer([user("a")], "the third answer")
        conversations = gateway.conversations
        assert conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
        await until(lambda: conversations._index.pending_turns == 0)  # pyright: ignore[reportPrivateUsage]
        exposed = conversations.metrics.exposition().decode()
    assert [decode_as(record, TurnEvent).turn_id for record in records_of(bus, TURNS)] == [kept.turn_id]
    assert records_of(bus, NEXT_STATES) == [], "the turn that it judges is not on the log"
    assert 'outbox_entries_dropped_total{kind="turn"} 2.0' in exposed
