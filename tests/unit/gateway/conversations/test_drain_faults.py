"""Whatever fails while the outbox is drained, every entry is on the log once, in order."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.codec import decode_as
from clawstream.errors import BrokerUnavailable, Fenced, TransactionAbortable
from clawstream.topics import NEXT_STATES, OUTBOX, TURN_INDEX, TURNS
from schemas.events import NextStateEvent, OutboxPositionEvent, TurnEvent, TurnIndexEvent
from tests.fixtures.conversations import assistant, create_topics, records_of, running_gateway, user

GIVE_UP_SECONDS = 30.0


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


async def test_whoever_takes_the_name_stops_the_old_one(tmp_path: Path) -> None:
    bus = MemoryBus()
    create_topics(bus)
    async with running_gateway(bus, tmp_path) as gateway:
        await gateway.answer([user("a")], "b")
        assert gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
        bus.transactional_producer("clawstream.gateway.gateway-0.outbox").close()
        await gateway.answer([user("c")], "d")
        assert not gateway.conversations.drain.wait_until_drained(GIVE_UP_SECONDS)
        assert isinstance(gateway.conversations.failure, Fenced)
        assert not gateway.conversations.is_ready()


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
