"""A rollout's outcome reaches every turn of it, and says where it ended."""

from dataclasses import replace
from pathlib import Path

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.errors import RequestRefused
from clawstream.topics import NEXT_STATES
from schemas.events import NextStateEvent, TurnEvent
from schemas.events.base import RolloutPosition, TurnType
from schemas.events.next_state import NextStateKind
from services.gateway.ports import RolloutOutcome
from tests.fixtures.conversations import (
    GatewayUnderTest,
    assistant,
    events_of,
    running_gateway,
    until,
    user,
)

OUTCOME = RolloutOutcome(
    rollout_id="r",
    score=1.0,
    steps=3,
    step_scores={1: -0.5},
    text="solved",
    source="verifier",
    feedback_id="outcome:r",
)


def position(step: int, rollout: str = "r") -> RolloutPosition:
    return RolloutPosition(task_id="t", group_id="g", rollout_id=rollout, step_index=step)


async def rollout(gateway: GatewayUnderTest, name: str = "r", steps: int = 3) -> list[TurnEvent]:
    messages, turns = [user(f"task of {name}")], list[TurnEvent]()
    for step in range(steps):
        reply = f"command {step} of {name}"
        turns.append(await gateway.answer(messages, reply, session=name, rollout=position(step, name)))
        messages = [*messages, assistant(reply), user(f"output {step}")]
    return turns


def outcomes(bus: MemoryBus) -> list[NextStateEvent]:
    states = [event for event in events_of(bus, NEXT_STATES) if isinstance(event, NextStateEvent)]
    return [state for state in states if state.kind is NextStateKind.OUTCOME]


async def test_every_turn_gets_the_outcome_and_its_own_step_score(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        turns = await rollout(gateway)
        await rollout(gateway, "other")
        first = await gateway.conversations.rollout_outcome("alice", OUTCOME)
        again = await gateway.conversations.rollout_outcome("alice", OUTCOME)
        with pytest.raises(LookupError):
            await gateway.conversations.rollout_outcome("bob", OUTCOME)

    states = outcomes(bus)
    assert [state.turn_id for state in states] == [turn.turn_id for turn in turns]
    assert [state.next_state_id for state in states] == first.next_state_ids == again.next_state_ids
    assert [state.feedback.score for state in states if state.feedback] == [1.0, 1.0, 1.0]
    assert [state.feedback.step_score for state in states if state.feedback] == [None, -0.5, None]
    assert [state.feedback.text for state in states if state.feedback] == [None, None, "solved"]
    where = [state.rollout for state in states if state.rollout]
    assert [(one.step_index, one.last_step_index, one.trainable_turns) for one in where] == [
        (0, 2, 3),
        (1, 2, 3),
        (2, 2, 3),
    ]
    assert [one.is_last for one in where] == [False, False, True]
    assert not any(turn.rollout.is_last for turn in turns if turn.rollout)


async def test_the_outcome_finds_the_turns_again_after_a_restart(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        turns = await rollout(gateway)
        assert gateway.conversations.drain.wait_until_drained(30)
        assert await gateway.conversations.wait_until_indexed(30)
    async with running_gateway(bus, tmp_path) as gateway:
        await until(gateway.conversations.is_ready)
        await gateway.conversations.rollout_outcome("alice", OUTCOME)
    assert [state.turn_id for state in outcomes(bus)] == [turn.turn_id for turn in turns]


async def test_missing_turns_are_refused_and_can_be_tried_again(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        await rollout(gateway, steps=2)
        with pytest.raises(RequestRefused) as caught:
            await gateway.conversations.rollout_outcome("alice", OUTCOME)
        assert (caught.value.status, caught.value.code) == (409, "rollout_incomplete")
        assert caught.value.retry_after_seconds is not None
        assert outcomes(bus) == []
        await gateway.conversations.rollout_outcome("alice", replace(OUTCOME, steps=None))
    assert len(outcomes(bus)) == 2


async def test_a_step_asked_twice_counts_once_and_side_turns_do_not_count(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        asked = [user("task")]
        await gateway.answer(asked, "lost on the way", session="r", rollout=position(0))
        kept = await gateway.answer(asked, "received", session="r", rollout=position(0))
        title = [user("a title?")]
        await gateway.answer(title, "Task", session="r", rollout=position(1), turn_type=TurnType.SIDE)
        await gateway.conversations.rollout_outcome("alice", replace(OUTCOME, steps=1))
    (state,) = outcomes(bus)
    assert state.turn_id == kept.turn_id
    assert state.rollout is not None
    assert (state.rollout.last_step_index, state.rollout.trainable_turns) == (0, 1)
