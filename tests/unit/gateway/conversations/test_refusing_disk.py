"""A disk that refuses a write and takes the next one: what was not durable is written when it is brought again."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.errors import OutboxError
from clawstream.topics import NEXT_STATES, TURNS
from schemas.events import NextStateEvent, TurnEvent
from schemas.events.next_state import NextStateKind
from services.gateway import outbox
from tests.fixtures.conversations import (
    GatewayUnderTest,
    assistant,
    events_of,
    request,
    running_gateway,
    turn_event,
    user,
)

GIVE_UP_SECONDS = 120.0
ANSWER = "an answer that is long enough to be told from any other"


class Disk:
    """Writes of the outbox; the next ones fail when a test says so."""

    def __init__(self) -> None:
        self.refusals = 0
        self.refused = threading.Event()

    def write(self, descriptor: int, content: bytes, offset: int) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            self.refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(descriptor, content, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(outbox, "write_at", disk.write)
    return disk


@asynccontextmanager
async def drained_gateway(bus: MemoryBus, directory: Path, clock: ManualClock) -> AsyncIterator[GatewayUnderTest]:
    async with running_gateway(bus, directory, clock=clock) as gateway:
        yield gateway
        assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)


def next_states(bus: MemoryBus) -> list[tuple[str, NextStateKind]]:
    return [(event.turn_id, event.kind) for event in events_of(bus, NEXT_STATES) if isinstance(event, NextStateEvent)]


HISTORY = [user("a"), assistant(ANSWER), user("wrong!")]


async def settle(gateway: GatewayUnderTest, disk: Disk) -> None:
    """Until the disk has refused what it was told to, and the outbox has answered everything that was submitted."""
    assert await asyncio.to_thread(disk.refused.wait, GIVE_UP_SECONDS)  # Else it would refuse what comes now.
    await gateway.conversations.feedback(
        "alice", await response_id(gateway), feedback_id="settle", score=1.0, text=None, source="user"
    )


async def response_id(gateway: GatewayUnderTest) -> str:
    turn = await gateway.answer([user("something else")], "an answer to something else")
    return turn.response_id


async def test_a_repeated_request_writes_the_next_state_that_the_disk_refused(
    bus: MemoryBus, tmp_path: Path, disk: Disk
) -> None:
    async with drained_gateway(bus, tmp_path, ManualClock()) as gateway:
        first = await gateway.answer([user("a")], ANSWER)
        disk.refusals = 1
        await gateway.conversations.place(request(HISTORY, clock=gateway.clock))  # Its engine fails: no turn follows.
        await settle(gateway, disk)
        await gateway.conversations.place(request(HISTORY, clock=gateway.clock))
        await gateway.conversations.place(request(HISTORY, clock=gateway.clock))
    assert [kind for turn_id, kind in next_states(bus) if turn_id == first.turn_id] == [NextStateKind.REPLY]


async def test_a_turn_brings_the_next_state_that_the_disk_refused_before(
    bus: MemoryBus, tmp_path: Path, disk: Disk
) -> None:
    async with drained_gateway(bus, tmp_path, ManualClock()) as gateway:
        first = await gateway.answer([user("a")], ANSWER)
        asked = request(HISTORY, clock=gateway.clock)
        disk.refusals = 1
        placement = await gateway.conversations.place(asked)
        await settle(gateway, disk)
        turn = turn_event(asked, placement, assistant("better"), gateway.clock)
        assert await gateway.conversations.finish(asked, placement, turn) is True
    assert (first.turn_id, NextStateKind.REPLY) in next_states(bus)


async def test_a_turn_whose_next_state_is_refused_again_is_not_called_recorded(
    bus: MemoryBus, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with drained_gateway(bus, tmp_path, ManualClock()) as gateway:
        first = await gateway.answer([user("a")], ANSWER)
        asked = request(HISTORY, clock=gateway.clock)
        disk.refusals = 1
        placement = await gateway.conversations.place(asked)
        await settle(gateway, disk)
        turn = turn_event(asked, placement, assistant("better"), gateway.clock)
        writes = 0

        def every_second(descriptor: int, content: bytes, offset: int) -> None:
            nonlocal writes
            writes += 1
            if writes == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.pwrite(descriptor, content, offset)

        monkeypatch.setattr(outbox, "write_at", every_second)
        assert await gateway.conversations.finish(asked, placement, turn) is False
    assert turn.turn_id in {event.turn_id for event in events_of(bus, TURNS) if isinstance(event, TurnEvent)}
    assert (first.turn_id, NextStateKind.REPLY) not in next_states(bus)


async def test_a_turn_whose_next_state_was_refused_goes_on_waiting_for_one(
    bus: MemoryBus, tmp_path: Path, disk: Disk
) -> None:
    clock = ManualClock()
    async with drained_gateway(bus, tmp_path, clock) as gateway:
        first = await gateway.answer([user("a")], ANSWER)
        disk.refusals = 1
        await gateway.conversations.place(request(HISTORY, clock=clock))
        await settle(gateway, disk)
        clock.advance(10_000)
        assert await gateway.conversations.idle_sessions.close_idle() == 1
    assert (first.turn_id, NextStateKind.SESSION_END) in next_states(bus)


async def test_feedback_that_the_disk_refused_may_be_sent_again(bus: MemoryBus, tmp_path: Path, disk: Disk) -> None:
    async with drained_gateway(bus, tmp_path, ManualClock()) as gateway:
        turn = await gateway.answer([user("a")], ANSWER)

        async def feedback() -> str:
            return await gateway.conversations.feedback(
                "alice", turn.response_id, feedback_id="f", score=1.0, text=None, source="user"
            )

        disk.refusals = 1
        with pytest.raises(OutboxError, match="refused"):
            await feedback()
        again, twin = await asyncio.gather(feedback(), feedback())
        assert again == twin
    assert next_states(bus) == [(turn.turn_id, NextStateKind.FEEDBACK)]


async def test_an_idle_session_that_could_not_be_ended_is_ended_later(
    bus: MemoryBus, tmp_path: Path, disk: Disk
) -> None:
    clock = ManualClock()
    async with drained_gateway(bus, tmp_path, clock) as gateway:
        turn = await gateway.answer([user("a")], ANSWER)
        clock.advance(10_000)
        disk.refusals = 1
        assert await gateway.conversations.idle_sessions.close_idle() == 0
        assert await gateway.conversations.idle_sessions.close_idle() == 1
    assert next_states(bus) == [(turn.turn_id, NextStateKind.SESSION_END)]


async def test_the_turns_of_a_session_whose_end_was_refused_go_on_waiting(
    bus: MemoryBus, tmp_path: Path, disk: Disk
) -> None:
    clock = ManualClock()
    async with drained_gateway(bus, tmp_path, clock) as gateway:
        first = await gateway.answer([user("a")], ANSWER, session="s")
        asked = request([user("another branch")], clock=clock, session="s", done=True)
        placement = await gateway.conversations.place(asked)
        disk.refusals = 1
        turn = turn_event(asked, placement, assistant("bye"), clock)
        assert await gateway.conversations.finish(asked, placement, turn) is False
        clock.advance(10_000)
        assert await gateway.conversations.idle_sessions.close_idle() == 1
    assert next_states(bus) == [(first.turn_id, NextStateKind.SESSION_END)]
