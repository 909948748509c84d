"""No input is ever forgotten: cancelled handlers, deadlines that count work alone, and the last flushes."""

import asyncio
from contextlib import suppress
from contextvars import ContextVar

import pytest

from clawstream.bus.interface import Record
from clawstream.bus.memory import MemoryBus
from clawstream.clock import SystemClock
from clawstream.codec import header
from clawstream.errors import BrokerUnavailable, EngineUnavailable, HandlerCancelled, TransactionAbortable
from clawstream.log import get_logger
from clawstream.worker.deadline import Deadlines, waiting_for_a_turn
from clawstream.worker.handling import HandlerPool
from clawstream.worker.outcomes import Outcome
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.tracker import Ticket
from tests.fixtures.buses import read_all
from tests.fixtures.workers import FunctionHandler, Scene, eventually, running, text


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(session_timeout_seconds=0.0)


@pytest.fixture
def scene(bus: MemoryBus) -> Scene:
    return Scene(bus, "test")


async def test_a_handler_under_which_something_is_cancelled_costs_one_record(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        if text(record) == "cancelled":
            awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            awaited.cancel()
            await awaited
        return scene.echo(record)

    scene.write("a", "cancelled", "b")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 3}, "the partition goes on")
    assert scene.written() == ["a", "b"]
    (dead,) = scene.buried()
    assert header(dead.headers, "dlq.reason") == "handler_cancelled"
    assert header(dead.headers, "dlq.error.type") == "HandlerCancelled"


async def test_a_preparation_that_is_cancelled_stops_the_worker(scene: Scene) -> None:
    class Cancelled(FunctionHandler):
        async def on_assigned(self, partitions: object) -> None:
            raise asyncio.CancelledError

    async def handle(record: Record) -> Outcome:
        return scene.echo(record)

    scene.write("a")
    with pytest.raises(HandlerCancelled, match="on_assigned"):
        await asyncio.wait_for(scene.worker(Cancelled(handle)).run(), 60)
    assert scene.written() == []


async def test_a_deadline_hook_that_hangs_is_ended_too(scene: Scene) -> None:
    class Hanging(FunctionHandler):
        async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
            await asyncio.Event().wait()
            return scene.echo(record)

    async def handle(record: Record) -> Outcome:
        await asyncio.Event().wait()
        return scene.echo(record)

    scene.write("a")
    async with running(scene.worker(Hanging(handle), settings=WorkerSettings(deadline_seconds=0.05))):
        await eventually(lambda: scene.committed() == {0: 1}, "the partition goes on")
    assert [header(record.headers, "dlq.reason") for record in scene.buried()] == ["deadline"]


async def test_a_deadline_hook_that_fails_costs_one_record_and_in_an_outage_is_asked_again(scene: Scene) -> None:
    asked: list[str] = []

    class Failing(FunctionHandler):
        async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
            asked.append(text(record))
            if text(record) == "bug":
                raise KeyError("missing")
            if text(record) == "cancelled":
                raise asyncio.CancelledError
            if text(record) == "outage" and asked.count("outage") < 3:
                raise BrokerUnavailable("the broker is away")
            return scene.echo(record)

    async def handle(record: Record) -> Outcome:
        await asyncio.Event().wait()
        return scene.echo(record)

    scene.write("outage", "bug", "cancelled", "a")
    settings = WorkerSettings(deadline_seconds=0.05, retry_initial_seconds=0.01)
    handler = Failing(handle)
    async with running(scene.worker(handler, settings=settings)):
        await eventually(lambda: scene.committed() == {0: 4}, "the partition goes on")
    assert scene.written() == ["outage", "a"]
    found = [(text(dead), header(dead.headers, "dlq.reason")) for dead in scene.buried()]
    assert found == [("bug", "handler_failed"), ("cancelled", "handler_cancelled")]
    assert sorted(handler.handled) == ["a", "bug", "cancelled", "outage"]
    assert asked.count("outage") == 3


async def test_an_input_that_was_taken_from_us_in_an_outage_is_not_tried_again(bus: MemoryBus, scene: Scene) -> None:
    outage = True
    attempts: list[int] = []

    async def handle(record: Record) -> Outcome:
        attempts.append(1)
        if outage:
            raise EngineUnavailable("away")
        return scene.echo(record)

    scene.write("a")
    settings = WorkerSettings(retry_initial_seconds=1.0, retry_max_seconds=1.0, shutdown_grace_seconds=5.0)
    worker = scene.worker(FunctionHandler(handle), settings=settings)
    async with running(worker):
        await eventually(lambda: len(attempts) == 1, "tried")
        bus.expel("test.worker", "worker-0")
        await eventually(lambda: len(attempts) == 2, "read again under the new assignment")
        outage = False
        await eventually(lambda: scene.committed() == {0: 1}, "committed")
        pool = worker._pool  # pyright: ignore[reportPrivateUsage] - only it knows what is still under way
        await eventually(lambda: not pool._tasks, "nothing is left")  # pyright: ignore[reportPrivateUsage] - as above
    assert len(attempts) == 3, "the input of the lost assignment was given up"
    assert scene.count("worker_late_results_total") == 0


async def test_stopping_commits_all_that_is_done_in_as_many_transactions_as_it_takes(
    bus: MemoryBus, scene: Scene
) -> None:
    first_may_end = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        if text(record) == "0":
            await first_may_end.wait()
        return scene.echo(record)

    commits = 0

    def some_commits_fail(operation: str, when: str) -> None:
        nonlocal commits
        if (operation, when) == ("commit", "before"):
            commits += 1
            if commits in (2, 5):
                raise TransactionAbortable("now and then")

    scene.write(*(str(number) for number in range(20)))
    handler = FunctionHandler(handle)
    settings = WorkerSettings(
        max_results_per_transaction=3, flush_ceiling_seconds=1000.0, flush_results=1000, shutdown_grace_seconds=60.0
    )
    worker = scene.worker(handler, settings=settings)
    async with running(worker) as task:
        await eventually(lambda: len(handler.handled) == 20, "all are under way")
        bus.set_fault(some_commits_fail)
        worker.request_stop()
        await eventually(lambda: worker.status()["state"] == "stopping", "stopping")
        first_may_end.set()
        await asyncio.wait_for(asyncio.shield(task), 60)
    assert scene.committed() == {0: 20}
    assert scene.written() == [str(number) for number in range(20)]
    assert commits >= 9


async def test_a_deadline_counts_work_and_not_the_wait_for_a_turn() -> None:
    turn = asyncio.Event()

    async def wait_for_the_turn() -> None:
        with waiting_for_a_turn():
            await turn.wait()

    async with Deadlines(0.05).begin() as deadline:
        first, second = asyncio.create_task(wait_for_the_turn()), asyncio.create_task(wait_for_the_turn())
        await asyncio.sleep(0)  # From now on both wait, and the deadline stands still.
        with deadline.paused():
            await asyncio.sleep(0.15)
        turn.set()
        await asyncio.gather(first, second)
        assert not deadline.expired()
    with pytest.raises(TimeoutError):
        async with Deadlines(0.05).begin() as deadline:
            with deadline.paused():
                await asyncio.sleep(0.1)
            await asyncio.Event().wait()
    assert deadline.expired()


async def test_a_wait_that_the_deadline_itself_cancels_leaves_it_expired() -> None:
    async def wait_for_ever() -> None:
        await asyncio.sleep(0.02)  # Not begun with waiting yet: the deadline runs.
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with Deadlines(0.05).begin():
            try:
                await wait_for_ever()
            finally:
                with waiting_for_a_turn():
                    pass


async def test_a_cancellation_from_outside_is_not_taken_for_the_deadline() -> None:
    deadlines = Deadlines(0.05)
    began = asyncio.Event()

    async def work(resists: bool) -> str:
        async with deadlines.begin() as deadline:
            try:
                began.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not resists:
                    raise
                # As if both came at once: the deadline has cancelled the task, and so does somebody else.
                asyncio.get_running_loop().call_soon(task.cancel)
                await asyncio.Event().wait()
        return f"expired: {deadline.expired()}"

    for resists in (False, True):
        began.clear()
        task = asyncio.create_task(work(resists))
        await began.wait()
        if not resists:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_after_its_deadline_a_task_goes_on_as_if_nobody_had_cancelled_it() -> None:
    deadlines = Deadlines(0.05)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with deadlines.begin():
                await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
    async with deadlines.begin():
        await asyncio.sleep(0.0)


async def test_inputs_that_await_something_are_under_way_side_by_side(scene: Scene) -> None:
    everyone_is_there = asyncio.Barrier(3)

    async def handle(record: Record) -> Outcome:
        if text(record) == "meets":
            await everyone_is_there.wait()
        return scene.echo(record)

    scene.write("meets", "quick", "meets", "quick", "meets")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 5}, "those that meet were under way side by side")


@pytest.mark.parametrize("is_swallowed", [False, True])
async def test_a_handler_that_is_cancelled_and_ends_well_leaves_nothing_to_the_next_input(
    scene: Scene, is_swallowed: bool
) -> None:
    cancellations: list[int] = []

    async def handle(record: Record) -> Outcome:
        task = asyncio.current_task()
        assert task is not None
        cancellations.append(task.cancelling())
        if text(record) == "cancels itself":
            task.cancel()
            if is_swallowed:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
        else:
            await asyncio.sleep(0)  # Here a cancellation that is left over would be raised.
        return scene.echo(record)

    scene.write("cancels itself", "next", "cancels itself", "last")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 4}, "the partition goes on")
    assert scene.written() == ["cancels itself", "next", "cancels itself", "last"]
    assert scene.buried() == []
    assert cancellations == [0, 0, 0, 0]


async def test_what_a_handler_sets_in_its_context_the_next_input_does_not_see(scene: Scene) -> None:
    variable: ContextVar[str] = ContextVar("of_one_input", default="")
    seen: list[str] = []

    async def handle(record: Record) -> Outcome:
        seen.append(variable.get())
        variable.set(text(record))
        return scene.echo(record)

    scene.write("a", "b", "c")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 3}, "all committed")
    assert seen == ["", "", ""]


async def test_a_pool_that_is_cancelled_begins_with_nothing_though_a_handler_resists(scene: Scene) -> None:
    begun: list[str] = []
    first_began = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        begun.append(text(record))
        first_began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return scene.echo(record)

    scene.write("a", "b", "c")
    pool = HandlerPool(
        FunctionHandler(handle),
        settings=WorkerSettings(),
        metrics=scene.metrics,
        clock=SystemClock(),
        logger=get_logger(),
    )
    pool.submit([Ticket(record, 1) for record in read_all(scene.bus, scene.inputs)])
    await first_began.wait()
    cancelled = asyncio.create_task(pool.cancel())
    ended, _ = await asyncio.wait([cancelled], timeout=30.0)
    assert ended, "an input that nobody cancels was begun"
    assert "c" not in begun


async def test_without_a_deadline_waiting_is_just_waiting() -> None:
    with waiting_for_a_turn():
        await asyncio.sleep(0)
    async with Deadlines(60.0).begin() as deadline:
        assert not deadline.expired()
    with deadline.paused():
        pass


async def test_one_timer_ends_every_attempt_that_works_too_long_and_no_other() -> None:
    deadlines = Deadlines(0.2)
    ended: list[str] = []

    async def work(name: str, seconds: float) -> None:
        try:
            async with deadlines.begin():
                await asyncio.sleep(seconds)
        except TimeoutError:
            ended.append(name)

    await work("quick", 0.0)
    await asyncio.sleep(0.05)  # The timer has found nothing to look after, and rests.
    await asyncio.gather(work("slow", 60.0), work("slower", 120.0), work("in time", 0.01))
    assert sorted(ended) == ["slow", "slower"]
    await work("after a rest", 60.0)
    assert ended[-1] == "after a rest"
