"""Which engine a request gets, and what it is told when there is none."""

import asyncio
from collections import Counter
from datetime import timedelta

import pytest

from clawstream.clock import ManualClock
from clawstream.errors import NoEngineReady
from clawstream.metrics import Metrics
from schemas.events import WeightsAppliedEvent
from schemas.events.weights import EngineState
from services.gateway.gate.board import EngineBoard
from services.gateway.gate.router import BoardRouter
from tests.unit.gateway.scripted_engine import ScriptedEngine, known

NAMES = ["engine-0", "engine-1", "engine-2"]


def make_router(clock: ManualClock, *, hold_seconds: float = 5.0) -> tuple[EngineBoard, BoardRouter, list[str]]:
    board = EngineBoard(NAMES, clock)
    failures: list[str] = []
    router = BoardRouter(
        board,
        {name: ScriptedEngine(name) for name in NAMES},  # pyright: ignore[reportArgumentType] - only handed on
        hold_seconds=hold_seconds,
        retry_after_seconds=7.0,
        metrics=Metrics(),
        failure_reported=failures.append,
    )
    return board, router, failures


def heartbeat(
    clock: ManualClock,
    engine: str,
    version: int | None,
    *,
    epoch: int = 1,
    owner: str = "gateway-9",
    state: EngineState = EngineState.READY,
) -> WeightsAppliedEvent:
    return WeightsAppliedEvent(
        policy="default", engine=engine, state=state, weight_version=version, gate_owner=owner, gate_epoch=epoch,
        observed_at=clock.now(), expires_at=clock.now() + timedelta(seconds=10),
    )  # fmt: skip


def fold(board: EngineBoard, event: WeightsAppliedEvent) -> None:
    board.note_term(event.gate_epoch, event.gate_owner)
    board.fold(event)


async def test_a_session_stays_with_its_engine_and_sessions_spread() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)
    for name in NAMES:
        fold(board, heartbeat(clock, name, 3))
    seen: Counter[str] = Counter()
    for number in range(300):
        chosen: set[str] = set()
        for _ in range(2):
            async with router.lease(known(f"session-{number}")) as lease:
                chosen.add(lease.engine.name)
                assert lease.weight_version == 3
        assert len(chosen) == 1
        seen.update(chosen)
    assert set(seen) == set(NAMES)
    assert min(seen.values()) > 60


async def test_the_only_engine_is_taken_before_the_session_is_known() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)
    fold(board, heartbeat(clock, "engine-1", 3))

    async def unknown() -> str:
        raise AssertionError("there is no choice")

    async with router.lease(unknown) as lease:
        assert lease.engine.name == "engine-1"


async def test_an_engine_that_leaves_while_the_session_is_looked_up_is_not_chosen() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)
    for name in NAMES:
        fold(board, heartbeat(clock, name, 3))
    async with router.lease(known("session")) as lease:
        preferred = lease.engine.name

    async def looked_up() -> str:
        fold(board, heartbeat(clock, preferred, None, state=EngineState.UPDATING))
        return "session"

    async with router.lease(looked_up) as lease:
        assert lease.engine.name != preferred


async def test_affinity_yields_to_load() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)
    for name in NAMES:
        fold(board, heartbeat(clock, name, 3))
    leases = [router.lease(known("one-busy-session")) for _ in range(30)]
    for lease in leases:
        await lease.__aenter__()
    assert max(record.requests for record in board.records) <= 13
    for lease in leases:
        await lease.__aexit__(None, None, None)
    assert [record.requests for record in board.records] == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "version"),
    [(EngineState.UPDATING, None), (EngineState.UNREACHABLE, None), (EngineState.FAILED, None), (None, None)],
)
async def test_an_engine_on_no_known_version_gets_no_traffic(state: EngineState | None, version: int | None) -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock, hold_seconds=0.01)
    if state is not None:
        fold(board, heartbeat(clock, "engine-0", version, state=state))
    assert not router.is_ready()
    with pytest.raises(NoEngineReady, match="engine-0") as raised:
        async with router.lease(known("session")):
            pass
    assert raised.value.retry_after_seconds == 7.0


async def test_an_engine_back_on_its_old_version_after_a_failed_update_serves() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)
    fold(board, heartbeat(clock, "engine-1", 4, state=EngineState.FAILED))
    async with router.lease(known("session")) as lease:
        assert (lease.engine.name, lease.weight_version) == ("engine-1", 4)


async def test_a_request_is_held_until_an_engine_is_ready() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)

    async def ask() -> int:
        async with router.lease(known("session")) as lease:
            return lease.weight_version

    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    assert board.longest_wait_seconds() == 0.0
    clock.advance(1.5)
    assert board.longest_wait_seconds() == 1.5
    fold(board, heartbeat(clock, "engine-0", 5))
    assert await asking == 5
    assert board.longest_wait_seconds() is None


async def test_an_expired_heartbeat_says_nothing_until_the_engine_confirms_it() -> None:
    clock = ManualClock()
    board, router, _ = make_router(clock)
    fold(board, heartbeat(clock, "engine-0", 3))
    clock.advance(9.9)
    assert router.is_ready()
    clock.advance(0.1)
    assert not router.is_ready()
    assert not board.confirm("engine-0", 0, valid_seconds=10)
    assert not router.is_ready()
    assert board.confirm("engine-0", 3, valid_seconds=10)
    assert router.is_ready()


async def test_a_failed_engine_is_left_out_until_it_is_seen_healthy() -> None:
    clock = ManualClock()
    board, router, failures = make_router(clock)
    for name in NAMES[:2]:
        fold(board, heartbeat(clock, name, 3))
    router.report_failure("engine-0")
    assert failures == ["engine-0"]
    for number in range(50):
        async with router.lease(known(f"session-{number}")) as lease:
            assert lease.engine.name == "engine-1"
    fold(board, heartbeat(clock, "engine-0", 3))
    assert [record.name for record in board.ready()] == ["engine-1"], "a heartbeat may be older than the failure"
    board.confirm("engine-0", 3, valid_seconds=10)
    assert [record.name for record in board.ready()] == NAMES[:2]


async def test_late_heartbeats_of_an_earlier_owner_are_ignored() -> None:
    clock = ManualClock()
    board, _, _ = make_router(clock)
    fold(board, heartbeat(clock, "engine-0", None, epoch=8, owner="gateway-1", state=EngineState.UPDATING))
    fold(board, heartbeat(clock, "engine-0", 3, epoch=5, owner="gateway-0"))
    assert board["engine-0"].state is EngineState.UPDATING
    fold(board, heartbeat(clock, "engine-0", 3, epoch=8, owner="gateway-0"))
    assert board["engine-0"].state is EngineState.UPDATING, "of two owners with one epoch the first on the log counts"
    assert board.newest_term == (8, "gateway-1")
