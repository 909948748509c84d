"""The worker over the bus in memory: order, transactions, faults, stopping."""

import asyncio
import threading

import pytest

from clawstream.bus.interface import Record, TopicPartition
from clawstream.bus.kafka_properties import SLOW_END_OF_TRANSACTION_SECONDS
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.codec import header
from clawstream.errors import (
    BrokerUnavailable,
    DecodeError,
    Fenced,
    OffsetNotRetained,
    RetryLater,
    TooManyDeadLetters,
    TransactionAbortable,
    TransactionOutcomeUnknown,
)
from clawstream.worker.outcomes import DeadLetter, Outcome, Output, Skip
from clawstream.worker.settings import WorkerSettings
from tests.fixtures.buses import Rebalances, create_topic
from tests.fixtures.workers import FunctionHandler, Scene, eventually, running, text


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(session_timeout_seconds=0.0)


@pytest.fixture
def scene(bus: MemoryBus) -> Scene:
    return Scene(bus, "test")


async def test_outputs_come_in_the_order_of_inputs_though_later_ones_finish_first(scene: Scene) -> None:
    first_may_end = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        if text(record) == "0":
            await first_may_end.wait()
        return scene.echo(record)

    scene.write(*(str(number) for number in range(20)))
    handler = FunctionHandler(handle)
    async with running(scene.worker(handler)):
        await eventually(lambda: len(handler.handled) == 20, "all are under way at once")
        assert scene.written() == []
        assert scene.committed() == {}
        first_may_end.set()
        await eventually(lambda: scene.committed() == {0: 20}, "all committed")
    assert scene.written() == [str(number) for number in range(20)]
    assert handler.closed


async def test_what_is_finished_before_a_slow_input_is_committed_without_it(scene: Scene) -> None:
    never = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        if text(record) == "2":
            await never.wait()
        return scene.echo(record)

    scene.write("0", "1", "2", "3")
    settings = WorkerSettings(shutdown_grace_seconds=0.0)
    async with running(scene.worker(FunctionHandler(handle), settings=settings)):
        await eventually(lambda: scene.committed() == {0: 2}, "the prefix is committed")
        assert scene.written() == ["0", "1"]
    assert scene.committed() == {0: 2}


async def test_skips_and_several_outputs_commit_their_offsets(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        if text(record) == "skip":
            return Skip("session_end")
        return Output(scene.echo(record, "/a").records + scene.echo(record, "/b").records)

    scene.write("skip", "x", "skip")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 3}, "all committed")
    assert scene.written() == ["x/a", "x/b"]
    assert scene.count('worker_inputs_total{reason="session_end",result="skip"}') == 2
    assert scene.count('worker_inputs_total{reason="",result="output"}') == 1


async def test_an_undecodable_input_is_a_dead_letter_and_the_partition_goes_on(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        if text(record) == "poison":
            raise DecodeError(f"{record}: not JSON: " + "x" * 2000)
        if text(record) == "bug":
            raise KeyError("missing")
        return scene.echo(record)

    scene.write("a", "poison", "bug", "b")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 4}, "all committed")
    assert scene.written() == ["a", "b"]
    poison, bug = scene.buried()
    assert (poison.key, poison.value, poison.headers[0]) == (b"session", b"poison", ("traceparent", b"00-1"))
    found = {name: header(poison.headers, name) for name, _ in poison.headers}
    assert found["dlq.topic"] == scene.inputs
    assert (found["dlq.partition"], found["dlq.offset"], found["dlq.group"]) == ("0", "1", "test.worker")
    assert (found["dlq.reason"], found["dlq.error.type"], found["dlq.attempts"]) == ("undecodable", "DecodeError", "1")
    assert len((found["dlq.error.message"] or "").encode()) == 512
    assert {"dlq.timestamp", "dlq.service.version", "dlq.time"} <= found.keys()
    assert header(bug.headers, "dlq.reason") == "handler_failed"
    assert scene.count('dead_letters_total{reason="undecodable"}') == 1


async def test_a_record_without_a_key_stays_without_one_as_a_dead_letter(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        return DeadLetter("unwanted", ValueError("no key"))

    scene.write("x", key=None)
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 1}, "committed")
    assert [record.key for record in scene.buried()] == [None]


async def test_an_aborted_transaction_is_sent_again_without_handling_again(bus: MemoryBus, scene: Scene) -> None:
    failures = iter(["produce", "send_offsets", "commit"])
    expected = next(failures)
    seen: list[str] = []

    def fault(operation: str, when: str) -> None:
        nonlocal expected
        if (operation, when) == (expected, "before"):
            seen.append(operation)
            expected = next(failures, "")
            raise TransactionAbortable(f"{operation} fails once")

    bus.set_fault(fault)
    scene.write("a", "b", "c")
    handler = FunctionHandler(lambda record: _now(scene.echo(record)))
    async with running(scene.worker(handler)):
        await eventually(lambda: scene.committed() == {0: 3}, "committed at last")
    assert seen == ["produce", "send_offsets", "commit"]
    assert scene.written() == ["a", "b", "c"]
    assert handler.handled == ["a", "b", "c"]
    assert scene.count('worker_transactions_total{result="abort"}') == 3
    assert scene.count('worker_transactions_total{result="producer_replaced"}') >= 3


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_without_an_answer_is_decided_by_the_committed_offsets(
    bus: MemoryBus, scene: Scene, when: str
) -> None:
    raised = False

    def fault(operation: str, moment: str) -> None:
        nonlocal raised
        if (operation, moment) == ("commit", when) and not raised:
            raised = True
            raise TransactionOutcomeUnknown("no answer")

    bus.set_fault(fault)
    scene.write("a", "b", "c")
    handler = FunctionHandler(lambda record: _now(scene.echo(record)))
    async with running(scene.worker(handler)):
        await eventually(lambda: scene.committed() == {0: 3}, "committed")
        scene.write("d")
        await eventually(lambda: scene.committed() == {0: scene.bus.reader().watermarks(_input(scene))[1]}, "goes on")
    assert raised
    assert scene.written() == ["a", "b", "c", "d"]
    assert handler.handled == ["a", "b", "c", "d"]


async def test_an_output_that_its_topic_refuses_makes_a_dead_letter(bus: MemoryBus) -> None:
    scene = Scene(bus, "test", output_limit="100")

    async def handle(record: Record) -> Outcome:
        return scene.echo(record, "x" * 200 if text(record) == "big" else "")

    scene.write("a", "big", "b")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 3}, "committed")
    assert scene.written() == ["a", "b"]
    assert [(record.value, header(record.headers, "dlq.reason")) for record in scene.buried()] == [(b"big", "oversize")]


async def test_a_dead_letter_that_does_not_fit_loses_its_value_and_nothing_else(bus: MemoryBus) -> None:
    scene = Scene(bus, "test")
    scene.dead_letters = create_topic(bus, "test.small-dlq.v1", max_message_bytes="100")

    async def handle(record: Record) -> Outcome:
        raise DecodeError("no")

    scene.write("y" * 500)
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 1}, "committed")
    (letter,) = scene.buried()
    assert letter.value is None
    assert header(letter.headers, "dlq.offset") == "0"
    assert header(letter.headers, "dlq.value.omitted") is not None


async def test_an_outage_is_waited_out(scene: Scene) -> None:
    attempts = 0

    async def handle(record: Record) -> Outcome:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise RetryLater("the model is away")
        return scene.echo(record)

    scene.write("a")
    settings = WorkerSettings(retry_initial_seconds=0.01, retry_max_seconds=0.02)
    async with running(scene.worker(FunctionHandler(handle), settings=settings)):
        await eventually(lambda: scene.committed() == {0: 1}, "committed")
    assert attempts == 4
    assert scene.written() == ["a"]
    assert scene.buried() == []


async def test_a_deadline_ends_an_attempt_and_the_handler_may_have_a_better_answer(scene: Scene) -> None:
    class Patient(FunctionHandler):
        async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
            if text(record) == "known":
                return scene.echo(record, "/failed")
            return await super().on_deadline(record, deadline_seconds)

    async def hang(record: Record) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    scene.write("known", "unknown")
    async with running(scene.worker(Patient(hang), settings=WorkerSettings(deadline_seconds=0.05))):
        await eventually(lambda: scene.committed() == {0: 2}, "committed")
    assert scene.written() == ["known/failed"]
    assert [header(record.headers, "dlq.reason") for record in scene.buried()] == ["deadline"]


async def test_a_timeout_of_the_handlers_own_is_not_the_deadline(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        raise TimeoutError("its own")

    scene.write("a")
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == {0: 1}, "committed")
    assert [header(record.headers, "dlq.reason") for record in scene.buried()] == ["handler_failed"]


async def test_late_results_of_a_lost_partition_are_dropped_and_counted(bus: MemoryBus, scene: Scene) -> None:
    may_end = asyncio.Event()
    calls = 0

    async def handle(record: Record) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == 1:
            await may_end.wait()
            return scene.echo(record, "/late")
        return scene.echo(record, "/again")

    scene.write("a")
    handler = FunctionHandler(handle)
    async with running(scene.worker(handler)):
        await eventually(lambda: calls == 1, "the first is under way")
        bus.expel("test.worker", "worker-0")
        await eventually(lambda: scene.committed() == {0: 1}, "read again and committed")
        may_end.set()
        await eventually(lambda: scene.count("worker_late_results_total") == 1, "counted")
    assert scene.written() == ["a/again"]
    assert handler.released[0] == [_input(scene)]


async def test_a_revoked_partition_is_drained_before_it_goes(bus: MemoryBus) -> None:
    scene = Scene(bus, "test", partitions=2)
    never = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        if text(record) == "slow":
            await never.wait()
        return scene.echo(record)

    for partition in (0, 1):
        scene.write("done", "slow", partition=partition)
    # Nothing is flushed by itself: the slow ones are under way, and the wait is long.
    settings = WorkerSettings(flush_ceiling_seconds=1000.0, shutdown_grace_seconds=0.0)
    worker = scene.worker(FunctionHandler(handle), settings=settings)
    worker._flush_policy._flush_seconds = 1000.0  # pyright: ignore[reportPrivateUsage] - a bus so slow that waiting is right
    handler = worker._handler  # pyright: ignore[reportPrivateUsage] - the one made above
    assert isinstance(handler, FunctionHandler)
    async with running(worker):
        await eventually(lambda: len(handler.handled) == 4, "all are under way")
        assert scene.committed() == {}
        rebalances = Rebalances()
        second = bus.group_consumer(
            [scene.inputs], group="test.worker", instance="other", callbacks=rebalances.callbacks()
        )
        await eventually(lambda: bool(second.consume(1, 0.05) or rebalances.held), "a partition moves")
        (moved,) = rebalances.held
        assert scene.committed()[moved.partition] == 1, "the finished one was committed before the partition went"
        second.close()


async def test_two_workers_share_and_each_input_is_handled_once(bus: MemoryBus) -> None:
    scene = Scene(bus, "test", partitions=4)
    handlers = [FunctionHandler(lambda record: _now(scene.echo(record))) for _ in range(2)]
    workers = [scene.worker(handler, name=f"worker-{number}") for number, handler in enumerate(handlers)]
    async with running(workers[0]), running(workers[1]):
        await eventually(lambda: all(len(worker.status().get("partitions", [])) == 2 for worker in workers), "settled")
        for partition in range(4):
            scene.write(*(f"{partition}/{number}" for number in range(25)), partition=partition)
        await eventually(lambda: len(scene.written()) == 100, "all written")
    assert scene.written() == [f"{partition}/{number}" for partition in range(4) for number in range(25)]
    assert sorted(handlers[0].handled + handlers[1].handled) == sorted(scene.written())
    assert all(handler.handled for handler in handlers)


async def test_no_record_is_handled_before_the_handler_is_prepared(scene: Scene) -> None:
    prepared = asyncio.Event()

    class Prepared(FunctionHandler):
        async def on_assigned(self, partitions: object) -> None:
            self.assigned.append(partitions)  # pyright: ignore[reportArgumentType] - noted as it came
            await prepared.wait()

    scene.write("a")
    handler = Prepared(lambda record: _now(scene.echo(record)))
    async with running(scene.worker(handler)):
        await eventually(lambda: handler.assigned == [{_input(scene): None}], "told of the assignment")
        await asyncio.sleep(0)
        assert handler.handled == []
        prepared.set()
        await eventually(lambda: scene.committed() == {0: 1}, "committed")


async def test_a_handler_that_cannot_prepare_stops_the_worker(scene: Scene) -> None:
    class Broken(FunctionHandler):
        async def on_assigned(self, partitions: object) -> None:
            raise OffsetNotRetained("the ledger is gone", offset=0, first=5, end=9)

    handler = Broken(lambda record: _now(scene.echo(record)))
    with pytest.raises(OffsetNotRetained, match="the ledger is gone"):
        await asyncio.wait_for(scene.worker(handler).run(), 60)
    assert handler.closed


async def test_backpressure_pauses_a_stuck_partition_and_lets_others_go_on(bus: MemoryBus) -> None:
    scene = Scene(bus, "test", partitions=2)
    may_end = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        if record.partition == 0:
            await may_end.wait()
        return scene.echo(record)

    scene.write(*(f"stuck/{number}" for number in range(200)), partition=0)
    handler = FunctionHandler(handle)
    worker = scene.worker(handler, settings=WorkerSettings(window_per_partition=4, max_in_flight=64))
    async with running(worker):
        await eventually(lambda: len(handler.handled) == 4, "the window is full")
        scene.write(*(f"free/{number}" for number in range(50)), partition=1)
        await eventually(lambda: scene.committed() == {1: 50}, "the other partition is done")
        assert len([value for value in handler.handled if value.startswith("stuck")]) == 4
        assert worker._tracker.unfinished()[_input(scene)] < 120  # pyright: ignore[reportPrivateUsage] - read ahead is bounded
        may_end.set()
        await eventually(lambda: scene.committed() == {0: 200, 1: 50}, "resumed and done")
    assert scene.written() == [f"stuck/{number}" for number in range(200)] + [f"free/{number}" for number in range(50)]


@pytest.mark.parametrize("max_in_flight", [2, 16])
async def test_one_input_that_hangs_holds_up_its_own_partition_alone(bus: MemoryBus, max_in_flight: int) -> None:
    """Also where fewer inputs are handled at once than what makes a partition hold many."""
    scene = Scene(bus, "test", partitions=2)
    may_end = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        if text(record) == "hangs":
            await may_end.wait()
        return scene.echo(record)

    scene.write("hangs", *(f"behind/{number}" for number in range(100)), partition=0)
    handler = FunctionHandler(handle)
    worker = scene.worker(handler, settings=WorkerSettings(max_in_flight=max_in_flight))
    async with running(worker):
        await eventually(lambda: len(handler.handled) == 101, "what came behind it is done")
        scene.write(*(str(number) for number in range(200)), partition=1)
        await eventually(lambda: scene.committed() == {1: 200}, "the other partition is done")
        may_end.set()
        await eventually(lambda: scene.committed() == {0: 101, 1: 200}, "done")


@pytest.mark.parametrize("max_in_flight", [4, 16])
async def test_a_partition_whose_inputs_all_hang_leaves_handlers_to_others(bus: MemoryBus, max_in_flight: int) -> None:
    scene = Scene(bus, "test", partitions=2)
    may_end = asyncio.Event()
    under_way = 0

    async def handle(record: Record) -> Outcome:
        nonlocal under_way
        if record.partition == 0:
            under_way += 1
            await may_end.wait()
        return scene.echo(record)

    scene.write(*(str(number) for number in range(100)), partition=0)
    worker = scene.worker(FunctionHandler(handle), settings=WorkerSettings(max_in_flight=max_in_flight))
    async with running(worker):
        await eventually(lambda: under_way == max_in_flight - max_in_flight // 4, "all that may hang does")
        scene.write(*(str(number) for number in range(200)), partition=1)
        await eventually(lambda: scene.committed() == {1: 200}, "the other partition is done")
        may_end.set()
        await eventually(lambda: scene.committed() == {0: 100, 1: 200}, "done")


async def test_a_paused_partition_that_is_lost_and_comes_back_in_one_poll_is_not_taken_for_paused(
    bus: MemoryBus, scene: Scene
) -> None:
    never = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        await never.wait()
        return scene.echo(record)

    scene.write(*(str(number) for number in range(50)))
    handler = FunctionHandler(handle)
    settings = WorkerSettings(window_per_partition=4, max_in_flight=64, shutdown_grace_seconds=0.0)
    worker = scene.worker(handler, settings=settings)

    def paused() -> bool:
        return _input(scene) in worker._backpressure._paused_since  # pyright: ignore[reportPrivateUsage] - what it believes

    async with running(worker):
        await eventually(paused, "paused")
        bus.expel("test.worker", "worker-0")
        await eventually(lambda: len(handler.assigned) == 2, "assigned anew")
        await eventually(lambda: not paused(), "unpaused")


async def test_never_more_under_way_than_allowed(scene: Scene) -> None:
    under_way = most = 0

    async def handle(record: Record) -> Outcome:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return scene.echo(record)

    scene.write(*(str(number) for number in range(300)))
    async with running(scene.worker(FunctionHandler(handle), settings=WorkerSettings(max_in_flight=8))):
        await eventually(lambda: scene.committed() == {0: 300}, "committed")
    assert most <= 8


async def test_handlers_have_work_while_a_transaction_lasts(bus: MemoryBus, scene: Scene) -> None:
    """Without it a backlog is handled and committed in turns, and either waits for the other."""
    slow_may_end = asyncio.Event()
    next_one_has_begun = threading.Event()
    began_in_time: list[bool] = []

    async def handle(record: Record) -> Outcome:
        if text(record) == "slow":
            await slow_may_end.wait()
        if text(record) == "next":
            next_one_has_begun.set()
        return scene.echo(record)

    def first_commit_waits(operation: str, when: str) -> None:
        if (operation, when) == ("commit", "before") and not began_in_time:
            began_in_time.append(next_one_has_begun.wait(20.0))

    bus.set_fault(first_commit_waits)
    scene.write("quick", "slow", "next")
    settings = WorkerSettings(max_in_flight=2, flush_results=1, shutdown_grace_seconds=5.0)
    async with running(scene.worker(FunctionHandler(handle), settings=settings)):
        await eventually(lambda: bool(began_in_time), "the first transaction")
        slow_may_end.set()
        await eventually(lambda: scene.committed() == {0: 3}, "all are committed")
    assert began_in_time == [True]


async def test_stopping_lets_what_is_under_way_finish_and_gives_back_the_rest(bus: MemoryBus, scene: Scene) -> None:
    may_end = asyncio.Event()

    async def handle(record: Record) -> Outcome:
        await may_end.wait()
        return scene.echo(record)

    scene.write("a", "b", "c")
    handler = FunctionHandler(handle)
    worker = scene.worker(handler, settings=WorkerSettings(max_in_flight=2, shutdown_grace_seconds=30.0))
    async with running(worker) as task:
        await eventually(lambda: len(handler.handled) == 2, "two are under way")
        worker.request_stop()
        await eventually(lambda: worker.status()["state"] == "stopping", "stopping")
        may_end.set()
        await asyncio.wait_for(asyncio.shield(task), 60)
    assert scene.written() == ["a", "b"]
    assert scene.committed() == {0: 2}
    successor = FunctionHandler(handle)
    async with running(scene.worker(successor)):
        await eventually(lambda: scene.committed() == {0: 3}, "the successor does the rest")
    assert successor.handled == ["c"]


async def test_a_broker_that_is_away_is_waited_for_at_start_and_later(bus: MemoryBus, scene: Scene) -> None:
    scene.write("a")
    bus.set_available(False)
    worker = scene.worker(FunctionHandler(lambda record: _now(scene.echo(record))))
    async with running(worker):
        await asyncio.sleep(0)
        assert not worker.ready()
        bus.set_available(True)
        await eventually(lambda: scene.committed() == {0: 1}, "read after the broker came")
        assert worker.ready()
        bus.set_available(False)
        with pytest.raises(BrokerUnavailable):
            scene.committed()
        bus.set_available(True)
        scene.write("b")
        await eventually(lambda: len(scene.written()) == 2, "and again")
    assert scene.written() == ["a", "b"]


async def test_a_worker_whose_place_was_taken_stops(bus: MemoryBus, scene: Scene) -> None:
    worker = scene.worker(FunctionHandler(lambda record: _now(scene.echo(record))))
    task = asyncio.create_task(worker.run())
    await eventually(worker.ready, "the first reads")
    thief = scene.worker(FunctionHandler(lambda record: _now(scene.echo(record))))
    async with running(thief):
        with pytest.raises(Fenced):
            await asyncio.wait_for(task, 60)
        scene.write("a")
        await eventually(lambda: scene.committed() == {0: 1}, "the second does the work")
    assert worker.status()["state"] == "failed"


async def test_records_that_retention_removed_stop_the_worker(bus: MemoryBus, scene: Scene) -> None:
    scene.write("a", "b", "c")
    async with running(scene.worker(FunctionHandler(lambda record: _now(scene.echo(record))))):
        await eventually(lambda: scene.committed() == {0: 3}, "committed")
    scene.write("d", "e")
    bus.truncate_before(_input(scene), 4)
    handler = FunctionHandler(lambda record: _now(scene.echo(record)))
    with pytest.raises(OffsetNotRetained, match="@3"):
        await asyncio.wait_for(scene.worker(handler).run(), 60)
    assert handler.handled == []


async def test_a_run_of_dead_letters_stops_the_worker(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        raise DecodeError("all wrong")

    scene.write(*(str(number) for number in range(30)))
    worker = scene.worker(FunctionHandler(handle), settings=WorkerSettings(dead_letter_window=10))
    with pytest.raises(TooManyDeadLetters, match="10 of the last 10"):
        await asyncio.wait_for(worker.run(), 60)


async def test_cancelling_run_stops_the_thread_in_good_order(scene: Scene) -> None:
    worker = scene.worker(FunctionHandler(lambda record: _now(scene.echo(record))))
    task = asyncio.create_task(worker.run())
    await eventually(worker.ready, "reading")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert worker.status()["state"] == "stopped"


async def _now(outcome: Outcome) -> Outcome:
    return outcome


def _input(scene: Scene) -> TopicPartition:
    return TopicPartition(scene.inputs, 0)


async def test_a_slow_commit_is_followed_by_a_new_producer_before_the_next_one() -> None:
    """A late EndTxn of the old producer epoch could end the next transaction: the epoch must rise first."""
    clock = ManualClock()
    bus = MemoryBus(clock, session_timeout_seconds=0.0)
    scene = Scene(bus, "test")
    steps: list[str] = []

    def fault(operation: str, when: str) -> None:
        if when == "before" and operation in {"initialise", "commit"}:
            steps.append(operation)
        if (operation, when) == ("commit", "before") and steps.count("commit") == 1:
            clock.advance(SLOW_END_OF_TRANSACTION_SECONDS + 0.1)

    bus.set_fault(fault)
    async with running(scene.worker(FunctionHandler(lambda record: _now(scene.echo(record))))):
        for number, value in enumerate(("slow", "next", "last"), start=1):
            scene.write(value)
            await eventually(lambda count=number: len(scene.written()) == count, value)
    assert steps == ["initialise", "commit", "initialise", "commit", "commit"]
    assert scene.written() == ["slow", "next", "last"]
