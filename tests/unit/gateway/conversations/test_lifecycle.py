"""Idle sessions, restarts, full disks and other ends, on the bus in memory with a clock that is moved by hand."""

import asyncio
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.errors import OutboxFull, SettingsError, TurnIndexUnwritable
from clawstream.topics import NEXT_STATES, TURNS
from schemas.events import NextStateEvent, TurnEvent
from schemas.events.next_state import NextStateKind
from schemas.events.turn import UntrainableReason
from services.gateway import index_follower
from services.gateway.event_size import fitted_next_state
from services.gateway.idle_sessions import IdleSessions
from services.gateway.index_secret import load_or_create_secret
from services.gateway.open_sessions import OpenSessions
from services.gateway.turn_index_store import TurnIndexStore
from tests.fixtures.conversations import (
    GatewayUnderTest,
    assistant,
    events_of,
    request,
    running_gateway,
    turn_event,
    until,
    user,
)
from tests.fixtures.turn_tree import TurnTree

GIVE_UP_SECONDS = 120.0


def kinds(bus: MemoryBus) -> dict[str, list[NextStateKind]]:
    found: dict[str, list[NextStateKind]] = {}
    for event in events_of(bus, NEXT_STATES):
        assert isinstance(event, NextStateEvent)
        found.setdefault(event.turn_id, []).append(event.kind)
    return found


async def test_an_idle_session_ends_once(bus: MemoryBus, tmp_path: Path) -> None:
    clock = ManualClock()
    async with running_gateway(bus, tmp_path, clock=clock, idle_limit_seconds=100) as gateway:
        old = await gateway.answer([user("a")], "old answer")
        clock.advance(60)
        young = await gateway.answer([user("b")], "young answer")
        clock.advance(60)
        assert await gateway.conversations.idle_sessions.close_idle() == 1
        assert await gateway.conversations.idle_sessions.close_idle() == 0
        late = await gateway.answer([user("a"), assistant("old answer"), user("still there?")], "yes")
        clock.advance(1000)
        assert await gateway.conversations.idle_sessions.close_idle() == 2
    assert late.parent_turn_id == old.turn_id
    assert kinds(bus) == {
        old.turn_id: [NextStateKind.SESSION_END, NextStateKind.REPLY],
        young.turn_id: [NextStateKind.SESSION_END],
        late.turn_id: [NextStateKind.SESSION_END],
    }


async def test_a_turn_with_feedback_is_not_ended(bus: MemoryBus, tmp_path: Path) -> None:
    clock = ManualClock()
    async with running_gateway(bus, tmp_path, clock=clock) as gateway:
        turn = await gateway.answer([user("a")], "an answer")
        await gateway.conversations.feedback(
            "alice", turn.response_id, feedback_id="f", score=1.0, text=None, source="user"
        )
        clock.advance(10_000)
        assert await gateway.conversations.idle_sessions.close_idle() == 0
    assert kinds(bus) == {turn.turn_id: [NextStateKind.FEEDBACK]}


async def test_a_turn_that_went_on_at_another_gateway_is_not_ended(bus: MemoryBus, tmp_path: Path) -> None:
    clock = ManualClock()
    async with running_gateway(bus, tmp_path, name="one", clock=clock) as one:
        first = await one.answer([user("a")], "an answer")
        async with running_gateway(bus, tmp_path, name="two", clock=clock) as two:
            assert await one.conversations.wait_until_indexed(GIVE_UP_SECONDS)
            await until(two.conversations.is_ready)
            second = await two.answer([user("a"), assistant("an answer"), user("b")], "another")
            assert second.parent_turn_id == first.turn_id
        await until(one.conversations.sees_other_gateways)
        clock.advance(10_000)
        assert await one.conversations.idle_sessions.close_idle() == 0


async def test_a_restart_goes_on_waiting_for_old_turns(bus: MemoryBus, tmp_path: Path) -> None:
    clock = ManualClock()
    async with running_gateway(bus, tmp_path, clock=clock) as gateway:
        old = await gateway.answer([user("a")], "old answer")
        clock.advance(10_000)
        young = await gateway.answer([user("b")], "young answer")
        assert await gateway.conversations.wait_until_indexed(GIVE_UP_SECONDS)
    for expected in (1, 1):  # The second restart does not end the old turn again.
        async with running_gateway(bus, tmp_path, clock=clock) as gateway:
            await until(gateway.conversations.is_ready)
            await gateway.conversations.idle_sessions.restore()
        assert len(kinds(bus)[old.turn_id]) == expected
        assert young.turn_id not in kinds(bus)
    async with running_gateway(bus, tmp_path, clock=clock) as gateway:
        await until(gateway.conversations.is_ready)
        await gateway.conversations.idle_sessions.restore()
        clock.advance(10_000)
        assert await gateway.conversations.idle_sessions.close_idle() == 1


async def test_turns_left_in_the_outbox_are_known_after_a_restart_without_a_broker(
    bus: MemoryBus, tmp_path: Path
) -> None:
    async with running_gateway(bus, tmp_path, close_drain_seconds=0) as gateway:
        await until(gateway.conversations.is_ready)
        bus.set_available(False)
        first = await gateway.answer([user("a")], "an answer")
        left = await gateway.conversations.close()
        assert left == 1
    async with running_gateway(bus, tmp_path, close_drain_seconds=0) as gateway:
        second = await gateway.answer([user("a"), assistant("an answer"), user("b")], "another")
        assert second.parent_turn_id == first.turn_id
        bus.set_available(True)
        assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)
    assert [event.turn_id for event in events_of(bus, TURNS) if isinstance(event, TurnEvent)] == [
        first.turn_id,
        second.turn_id,
    ]
    assert kinds(bus) == {first.turn_id: [NextStateKind.REPLY]}


async def finish(gateway: GatewayUnderTest, text: str, reply: str) -> bool:
    asked = request([user(text)], clock=gateway.clock)
    placement = await gateway.conversations.place(asked)
    return await gateway.conversations.finish(
        asked, placement, turn_event(asked, placement, assistant(reply), gateway.clock)
    )


async def test_a_full_outbox_serves_turns_unrecorded(bus: MemoryBus, tmp_path: Path) -> None:
    bus.set_available(False)
    async with running_gateway(bus, tmp_path, outbox_max_bytes=8000, close_drain_seconds=0) as gateway:
        recorded = [await finish(gateway, f"question {number}", f"answer {number}") for number in range(6)]
        assert recorded[0] is True
        assert recorded[-1] is False
        assert recorded == sorted(recorded, reverse=True)
        with pytest.raises(LookupError):
            await gateway.conversations.feedback(
                "alice", "chatcmpl-unrecorded", feedback_id="f", score=1, text=None, source="user"
            )
        bus.set_available(True)
        assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)
        assert await finish(gateway, "again", "recorded again")
        assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)
        exposed = gateway.conversations.metrics.exposition().decode()
    assert f"clawstream_turns_unrecorded_total {float(recorded.count(False))}" in exposed
    assert len(events_of(bus, TURNS)) == recorded.count(True) + 1


async def test_feedback_on_a_full_outbox_is_an_error(bus: MemoryBus, tmp_path: Path) -> None:
    bus.set_available(False)
    async with running_gateway(bus, tmp_path, outbox_max_bytes=4000, close_drain_seconds=0) as gateway:
        turn = await gateway.answer([user("a")], "b")
        with pytest.raises(OutboxFull):
            await gateway.conversations.feedback(
                "alice", turn.response_id, feedback_id="f", score=1, text="x" * 4000, source="user"
            )


async def test_a_request_too_large_for_the_log_leaves_a_stub(bus: MemoryBus, tmp_path: Path) -> None:
    async with running_gateway(bus, tmp_path) as gateway:
        large = [user("a"), user("x" * 4_500_000)]
        first = await gateway.answer(large, "an answer that is long enough to be told from any other")
        second = await gateway.answer(
            [*large, assistant("an answer that is long enough to be told from any other"), user("short")], "yes"
        )
    stub = next(e for e in events_of(bus, TURNS) if isinstance(e, TurnEvent) and e.turn_id == first.turn_id)
    assert stub.request_messages == []
    assert stub.untrainable_reason is UntrainableReason.OVERSIZED
    assert second.parent_turn_id == first.turn_id
    (state,) = (e for e in events_of(bus, NEXT_STATES) if isinstance(e, NextStateEvent))
    assert state.following_messages == [user("short")]


def test_a_next_state_that_fits_is_untouched_and_one_that_does_not_loses_the_oldest_first() -> None:
    tree = TurnTree()
    system: Any = {"role": "system", "content": "be brief"}
    history = [system, *(user(f"old {number} " + "x" * 1000) for number in range(50))]
    tree.answer(history, "an answer that is long enough to be told from any other one")
    tree.answer(
        [*history, assistant("an answer that is long enough to be told from any other one"), user("wrong " * 20)], "x"
    )
    (event,) = tree.next_states.values()
    assert fitted_next_state(event, 10_000_000) is event
    smaller = fitted_next_state(event, 10_000)
    assert smaller.request_messages[0] == system
    assert smaller.request_messages[1:] == history[-len(smaller.request_messages) + 1 :]
    assert 5 < len(smaller.request_messages) < 12
    assert smaller.following_messages == event.following_messages
    tiny = fitted_next_state(event.model_copy(update={"following_messages": [user("y" * 100_000)]}), 10_000)
    assert len(tiny.model_dump_json()) < 10_000
    assert str(tiny.following_messages[0]["content"]).startswith("yyy")


def test_the_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "secret"
    secret = load_or_create_secret(file)
    assert load_or_create_secret(file) == secret
    assert len(secret) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    file.write_bytes(b"short")
    with pytest.raises(SettingsError, match="32 bytes, found 5"):
        load_or_create_secret(file)


def test_many_idle_sessions_leave_nothing_in_memory() -> None:
    tree = TurnTree()
    tree.answer([user("a")], "b")
    (turn,) = tree.turns
    sessions = OpenSessions()
    for number in range(20_000):
        sessions.touch(f"session-{number}", float(number))
    sessions.add(turn, 20_000.0)
    assert sessions.close_idle(20_000.0) == []
    assert len(sessions) == 1
    assert sessions.close_idle(20_001.0) == [turn]
    assert len(sessions) == 0


async def test_an_index_that_is_damaged_is_a_failure_of_the_gateway(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    async with running_gateway(bus, tmp_path) as gateway:
        monkeypatch.setattr(TurnIndexStore, "fold", refuse)
        await gateway.answer([user("a")], "an answer")
        await until(lambda: gateway.conversations.failure is not None)
        assert isinstance(gateway.conversations.failure, sqlite3.DatabaseError)
        assert not gateway.conversations.is_ready()


async def test_an_index_whose_disk_is_full_is_written_when_there_is_space(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_follower, "_REFUSED_SECONDS", 0.01)
    fold, refusals = TurnIndexStore.fold, 0

    def refuse(*_: Any, **__: Any) -> None:
        nonlocal refusals
        refusals += 1
        raise TurnIndexUnwritable("database or disk is full")

    async with running_gateway(bus, tmp_path) as gateway:
        await until(gateway.conversations.is_ready)
        monkeypatch.setattr(TurnIndexStore, "fold", refuse)
        first = await gateway.answer([user("a")], "an answer")
        await until(lambda: refusals > 1)
        assert gateway.conversations.failure is None
        assert gateway.conversations.is_ready(), "chat goes on"
        second = await gateway.answer([user("a"), assistant("an answer"), user("b")], "another")
        assert second.parent_turn_id == first.turn_id
        monkeypatch.setattr(TurnIndexStore, "fold", fold)
        assert await gateway.conversations.wait_until_indexed(GIVE_UP_SECONDS)


async def test_a_turn_that_ended_its_session_is_not_ended_again_after_a_restart(bus: MemoryBus, tmp_path: Path) -> None:
    clock = ManualClock()
    async with running_gateway(bus, tmp_path, clock=clock) as gateway:
        turn = await gateway.answer([user("a")], "goodbye", done=True)
        assert await gateway.conversations.wait_until_indexed(GIVE_UP_SECONDS)
    clock.advance(10_000)
    async with running_gateway(bus, tmp_path, clock=clock) as gateway:
        await until(gateway.conversations.is_ready)
        await gateway.conversations.idle_sessions.restore()
    assert kinds(bus) == {turn.turn_id: [NextStateKind.SESSION_END]}


async def test_an_end_that_was_written_and_not_noted_is_not_written_again(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the two, or on a full disk."""
    clock = ManualClock()
    with monkeypatch.context() as patched:
        patched.setattr(TurnIndexStore, "mark_ended", lambda *_: None)
        async with running_gateway(bus, tmp_path, clock=clock) as gateway:
            turn = await gateway.answer([user("a")], "an answer")
            clock.advance(10_000)
            assert await gateway.conversations.idle_sessions.close_idle() == 1
            assert await gateway.conversations.wait_until_indexed(GIVE_UP_SECONDS)
    async with running_gateway(bus, tmp_path, clock=clock) as gateway:
        await until(gateway.conversations.is_ready)
        await gateway.conversations.idle_sessions.restore()
    assert kinds(bus) == {turn.turn_id: [NextStateKind.SESSION_END]}


async def test_sessions_that_cannot_be_ended_are_a_failure_of_the_gateway(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: IdleSessions) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(IdleSessions, "close_idle", refuse)
    async with running_gateway(bus, tmp_path, idle_check_seconds=0.01) as gateway:
        await until(lambda: gateway.conversations.failure is not None)
        assert isinstance(gateway.conversations.failure, OSError)
