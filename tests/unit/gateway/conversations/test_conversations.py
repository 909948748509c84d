"""Conversations end to end on the bus in memory."""

from pathlib import Path

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.codec import decode_as
from clawstream.topics import NEXT_STATES, TURN_INDEX, TURNS
from schemas.events import NextStateEvent, TurnEvent
from schemas.events.base import TurnType
from schemas.events.next_state import NextStateKind
from tests.fixtures.conversations import (
    assistant,
    events_of,
    records_of,
    request,
    running_gateway,
    until,
    user,
)


def next_states(bus: MemoryBus) -> list[NextStateEvent]:
    return [event for event in events_of(bus, NEXT_STATES) if isinstance(event, NextStateEvent)]


async def test_two_turns_without_headers_are_one_session_and_the_reply_is_the_next_state(
    bus: MemoryBus, tmp_path: Path
) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        first = await gateway.answer([user("capital of Australia?")], "Canberra")
        messages = [user("capital of Australia?"), assistant("Canberra"), user("longer please")]
        second = await gateway.answer(messages, "The capital of Australia is Canberra.")
        stranger = await gateway.answer(messages, "Canberra it is", principal="bob")

    assert second.session_id == first.session_id
    assert second.parent_turn_id == first.turn_id
    assert second.depth == 1
    assert stranger.session_id != first.session_id
    assert {event.turn_id for event in events_of(bus, TURNS) if isinstance(event, TurnEvent)} == {
        first.turn_id,
        second.turn_id,
        stranger.turn_id,
    }
    (state,) = next_states(bus)
    assert state.kind is NextStateKind.REPLY
    assert state.turn_id == first.turn_id
    assert state.child_turn_id == second.turn_id
    assert state.following_messages == [user("longer please")]
    assert state.request_messages == [user("capital of Australia?")]
    assert state.response_message == assistant("Canberra")


async def test_a_next_state_refers_to_its_turn_where_it_really_is(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        await gateway.answer([user("a")], "first answer")
        await gateway.answer([user("a"), assistant("first answer"), user("b")], "second")

    (state,) = next_states(bus)
    turns = {(record.topic, record.partition, record.offset): record for record in records_of(bus, TURNS)}
    place = (state.turn_ref.topic, state.turn_ref.partition, state.turn_ref.offset)
    assert decode_as(turns[place], TurnEvent).turn_id == state.turn_id


async def test_the_next_state_is_on_the_log_before_the_answer_exists(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        await gateway.answer([user("a")], "first answer")
        asked = request([user("a"), assistant("first answer"), user("wrong!")], clock=gateway.clock)
        await gateway.conversations.place(asked)
        assert gateway.conversations.drain.wait_until_drained(30)
        assert [state.following_messages for state in next_states(bus)] == [[user("wrong!")]]


async def test_a_session_done_ends_its_unanswered_turns(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        first = await gateway.answer([user("a")], "first answer")
        last = await gateway.answer([user("a"), assistant("first answer"), user("b")], "last", done=True)

    kinds = {state.turn_id: state.kind for state in next_states(bus)}
    assert kinds == {first.turn_id: NextStateKind.REPLY, last.turn_id: NextStateKind.SESSION_END}


async def test_feedback_by_response_id(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        turn = await gateway.answer([user("a")], "first answer")
        how = {"feedback_id": "f1", "score": -1.0, "text": "too short", "source": "user"}
        feedback = gateway.conversations.feedback
        once = await feedback("alice", turn.response_id, **how)  # pyright: ignore[reportArgumentType]
        again = await feedback("alice", turn.response_id, **how)  # pyright: ignore[reportArgumentType]
        outcome = await feedback("alice", turn.response_id, feedback_id="f2", score=1, text=None, source="pytest")
        with pytest.raises(LookupError, match="nonsense"):
            await feedback("alice", "nonsense", feedback_id="f3", score=1, text=None, source="user")
        with pytest.raises(LookupError):
            await feedback("bob", turn.response_id, feedback_id="f4", score=1, text=None, source="user")

    assert once == again != outcome
    assert [(state.kind, state.next_state_id) for state in next_states(bus)] == [
        (NextStateKind.FEEDBACK, once),
        (NextStateKind.OUTCOME, outcome),
    ]


async def test_a_side_turn_is_recorded_and_brings_no_next_state(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        await gateway.answer([user("a")], "first answer")
        messages = [user("a"), assistant("first answer"), user("Title?")]
        side = await gateway.answer(messages, "A title", turn_type=TurnType.SIDE)

    assert side.turn_type is TurnType.SIDE
    assert next_states(bus) == []
    assert len(events_of(bus, TURN_INDEX)) == 2


async def test_a_restart_forgets_nothing(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        first = await gateway.answer([user("a")], "first answer")
    async with running_gateway(bus, tmp_path) as gateway:
        second = await gateway.answer([user("a"), assistant("first answer"), user("b")], "second")
    assert second.parent_turn_id == first.turn_id


async def test_turns_of_an_outage_are_known_at_once_and_reach_the_log_in_order(bus: MemoryBus, tmp_path: Path) -> None:
    messages = [user("begin")]
    turns: list[TurnEvent] = []
    async with running_gateway(bus, tmp_path) as gateway:
        turns.append(await gateway.answer(messages, "answer number 0"))
        assert gateway.conversations.drain.wait_until_drained(30)
        bus.set_available(False)
        for number in range(1, 6):
            messages = [*messages, assistant(f"answer number {number - 1}"), user(f"go on {number}")]
            turns.append(await gateway.answer(messages, f"answer number {number}"))
        bus.set_available(True)
        assert gateway.conversations.drain.wait_until_drained(30)

    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert [event.turn_id for event in events_of(bus, TURNS) if isinstance(event, TurnEvent)] == [
        turn.turn_id for turn in turns
    ]
    assert [state.turn_id for state in next_states(bus)] == [turn.turn_id for turn in turns[:-1]]


async def test_another_gateway_knows_the_turn(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path, name="one") as one, running_gateway(bus, tmp_path, name="two") as two:
        messages = [user("begin")]
        turns = [await one.answer(messages, "answer number 0")]
        await two.answer([user("x")], "something unrelated to it")
        await until(lambda: all(gateway.conversations.sees_other_gateways() for gateway in (one, two)))
        for number in range(1, 8):
            messages = [*messages, assistant(f"answer number {number - 1}"), user(f"go on {number}")]
            turns.append(await (two, one)[number % 2 == 0].answer(messages, f"answer number {number}"))

    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert len({turn.session_id for turn in turns}) == 1
    states = next_states(bus)
    assert sorted(state.turn_id for state in states) == sorted(turn.turn_id for turn in turns[:-1])
    places = {event.turn_id: record for record in records_of(bus, TURNS) if (event := decode_as(record, TurnEvent))}
    for state in states:
        record = places[state.turn_id]
        assert (record.partition, record.offset) == (state.turn_ref.partition, state.turn_ref.offset)
