"""The whole gate: gateways on one log, stub engines over HTTP."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest

from clawstream import topics
from clawstream.bus.interface import Consumer, RebalanceCallbacks, Record
from clawstream.bus.memory import MemoryBus
from clawstream.codec import decode_as
from clawstream.engine.client import EngineTimeouts
from clawstream.engine.interface import GenerationChunk, GenerationRequest
from clawstream.errors import WeightsError
from clawstream.topics import topic_definitions
from clawstream.topics_admin import apply_topics
from clawstream.weights.on_log import release, roll_back
from schemas.events import WeightsAppliedEvent
from schemas.events.base import VersionSpan
from schemas.events.weights import EngineState
from services.engine.tiny_model import write_tiny_model
from services.gateway.gate.gate import WeightGate
from services.gateway.gate.settings import GateDeadlines
from tests.fixtures.buses import read_all
from tests.fixtures.gates import NAMESPACE, SETTINGS, GateEngine, running_gate, until, versions
from tests.fixtures.stub_engine import StubAnswer
from tests.fixtures.weights import (
    MOMENT,
    POLICY,
    make_artefact,
    pointer_record,
    removed_record,
    version_record,
    write,
)
from tests.unit.gateway.scripted_engine import known


@pytest.fixture
async def engines() -> AsyncIterator[list[GateEngine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(GateEngine()) for _ in range(2)]


def publish(bus: MemoryBus, root: Path, version: int) -> Path:
    event = make_artefact(root, version)
    write(bus, version_record(event, NAMESPACE), pointer_record(version, NAMESPACE))
    return root / f"version-{version}"


def heartbeats(bus: MemoryBus, engine: str = "engine-0") -> list[WeightsAppliedEvent]:
    topic = topics.full_name(NAMESPACE, topics.WEIGHTS_APPLIED)
    events = [decode_as(record, WeightsAppliedEvent) for record in read_all(bus, topic)]
    return [event for event in events if event.engine == engine]


async def ask(gate: WeightGate, session: str) -> list[VersionSpan]:
    """One answer through the router; the weights of its tokens."""
    async with gate.router.lease(known(session)) as lease:
        request = GenerationRequest(session, [1, 2, 3], {"max_new_tokens": 8})
        async for chunk in lease.engine.generate(request):
            if chunk.finish_reason is not None:
                assert chunk.finish_reason == "stop"
                return chunk.version_spans
    raise AssertionError("the answer had no end")


async def collect(stream: AsyncGenerator[GenerationChunk]) -> list[VersionSpan]:
    """The weights of the tokens of an answer that goes on."""
    chunks = [chunk async for chunk in stream]
    return chunks[-1].version_spans


class StoppableBus(MemoryBus):
    """While `stopped`, the member `gateway-0` is like a process that was stopped: it polls its group no more."""

    def __init__(self) -> None:
        super().__init__(session_timeout_seconds=0.0)
        self._may_poll = threading.Event()
        self._may_poll.set()
        self._is_parked = threading.Event()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._is_parked.clear()
        self._may_poll.clear()
        assert self._is_parked.wait(120)
        try:
            yield
        finally:
            self._may_poll.set()

    def group_consumer(
        self, topics: Sequence[str], *, group: str, instance: str, callbacks: RebalanceCallbacks
    ) -> Consumer:
        consumer = super().group_consumer(topics, group=group, instance=instance, callbacks=callbacks)
        if instance == "gateway-0":
            poll = consumer.consume

            def consume(max_records: int, timeout_seconds: float) -> list[Record]:
                if not self._may_poll.is_set():
                    self._is_parked.set()
                    self._may_poll.wait()
                return poll(max_records, timeout_seconds)

            consumer.consume = consume
        return consumer


def create_topics(bus: MemoryBus) -> None:
    apply_topics(bus.admin(), NAMESPACE, 1, topic_definitions().values())


def memory_bus() -> MemoryBus:
    """A log with all topics."""
    bus = MemoryBus(session_timeout_seconds=0.0)
    create_topics(bus)
    return bus


async def test_base_model_serves_without_any_load(engines: list[GateEngine]) -> None:
    async with running_gate(memory_bus(), engines) as gate:
        await until(gate, lambda: versions(gate) == [0, 0])
        assert [span.weight_version for span in await ask(gate, "session")] == [0]
        assert engines[0].loads() == []


async def test_update_under_load_loses_no_request(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    for engine in engines:
        engine.default_answer = lambda request: StubAnswer(token_seconds=0.002)
    async with running_gate(bus, engines) as gate:
        await until(gate, lambda: versions(gate) == [0, 0])
        stop = asyncio.Event()
        answers: list[list[VersionSpan]] = []

        async def user(number: int) -> None:
            while not stop.is_set():
                answers.append(await ask(gate, f"session-{number}"))

        async with asyncio.TaskGroup() as users:
            for number in range(20):
                users.create_task(user(number))
            for version in (1, 2, 3):
                publish(bus, tmp_path, version)
                await until(gate, lambda version=version: versions(gate) == [version, version])
            stop.set()
        assert {span.weight_version for spans in answers for span in spans} >= {0, 3}
        assert all(spans[-1].end == 4 for spans in answers)
        for engine in engines:
            assert engine.loads() == ["1", "2", "3"]
            assert not engine.paused
        assert all(beat.hold_seconds is None for beat in heartbeats(bus)), "with two engines nobody waits"


async def test_a_single_engine_holds_requests_and_measures_it(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    go_on = asyncio.Event()
    engines[0].load_scripts = [go_on]
    async with running_gate(bus, engines[:1]) as gate:
        await until(gate, lambda: versions(gate) == [0])
        publish(bus, tmp_path, 1)
        await engines[0].load_began.wait()
        asking = asyncio.create_task(ask(gate, "session"))
        await until(gate, lambda: gate._board.longest_wait_seconds() is not None)  # pyright: ignore[reportPrivateUsage]
        assert engines[0].requests == [], "the request waits in the gate, not in the paused engine"
        go_on.set()
        assert [span.weight_version for span in await asking] == [1]
        await until(gate, lambda: heartbeats(bus)[-1].state is EngineState.READY)
        held = heartbeats(bus)[-1].hold_seconds
        assert held is not None
        assert held > 0


async def test_an_answer_outlives_a_load_that_takes_longer_than_its_deadline(
    engines: list[GateEngine], tmp_path: Path
) -> None:
    bus = memory_bus()
    go_on = asyncio.Event()
    engines[0].load_scripts = [go_on]
    begun = asyncio.Event()
    engines[0].enqueue(StubAnswer(gate=begun, gate_after_tokens=1))
    async with running_gate(bus, engines[:1], timeouts=EngineTimeouts(idle_seconds=1.5)) as gate:
        await until(gate, lambda: versions(gate) == [0])
        async with gate.router.lease(known("session")) as lease:
            stream = lease.engine.generate(GenerationRequest("session", [1, 2, 3], {"max_new_tokens": 8}))
            await anext(stream)
            publish(bus, tmp_path, 1)
            await engines[0].load_began.wait()
            begun.set()
            answering = asyncio.create_task(collect(stream))
            beats = len(heartbeats(bus))
            assert gate.is_updating("engine-0")
            await asyncio.wait([answering], timeout=3.2)  # twice its deadline
            assert not answering.done()
            go_on.set()
            assert [span.weight_version for span in await answering] == [0, 1]
        assert len(heartbeats(bus)) > beats
        assert not gate.is_updating("engine-0")


@pytest.mark.parametrize("status", [200, 400, 503])
async def test_failed_update_keeps_the_old_version_and_the_other_engine_moves(
    engines: list[GateEngine], tmp_path: Path, status: int
) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines, settings=SETTINGS.model_copy(update={"retry_seconds": 600.0})) as gate:
        publish(bus, tmp_path, 1)
        await until(gate, lambda: versions(gate) == [1, 1])
        engines[0].load_scripts = [status]
        publish(bus, tmp_path, 2)
        await until(gate, lambda: versions(gate) == [1, 2])
        assert engines[0].loads() == ["1", "2", "1"], "the old version was loaded again explicitly"
        assert engines[0].weight_version == "1"
        status_of = gate.status()["engines"]["engine-0"]
        assert status_of["state"] == EngineState.FAILED
        assert "version 2 was not loaded" in status_of["error"]
        publish(bus, tmp_path, 3)
        await until(gate, lambda: versions(gate) == [3, 3])
        assert gate.status()["engines"]["engine-0"]["error"] == ""


async def test_corrupt_artefact_is_never_loaded(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines) as gate:
        publish(bus, tmp_path, 1)
        await until(gate, lambda: versions(gate) == [1, 1])
        event = make_artefact(tmp_path, 2)
        torn = tmp_path / "version-2" / "model.safetensors"
        whole = torn.read_bytes()
        torn.write_bytes(b"W" + whole[1:])
        write(bus, version_record(event, NAMESPACE), pointer_record(2, NAMESPACE))
        await until(gate, lambda: all("checksum" in e["error"] for e in gate.status()["engines"].values()))
        assert versions(gate) == [1, 1]
        assert [engine.loads() for engine in engines] == [["1"], ["1"]]
        torn.write_bytes(whole)
        await until(gate, lambda: versions(gate) == [2, 2])


async def test_a_version_of_another_model_is_never_loaded(engines: list[GateEngine], tmp_path: Path) -> None:
    """SGLang 0.5.23 ends when a tensor has another shape: one engine after another would."""
    bus = memory_bus()
    base = write_tiny_model(tmp_path / "base")
    engines[0].model_path = str(base)
    async with running_gate(bus, engines[:1]) as gate:
        await until(gate, lambda: versions(gate) == [0])
        for version, model in ((1, base), (2, write_tiny_model(tmp_path / "wider", hidden_size=96))):
            event = make_artefact(tmp_path, version, model)
            write(bus, version_record(event, NAMESPACE), pointer_record(version, NAMESPACE))
            if version == 1:
                await until(gate, lambda: versions(gate) == [1])
        await until(gate, lambda: "does not fit" in gate.status()["engines"]["engine-0"]["error"])
        assert versions(gate) == [1]
        assert engines[0].loads() == ["1"]


async def test_removed_artefact_is_named_and_the_old_version_serves(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines) as gate:
        await until(gate, lambda: versions(gate) == [0, 0])
        write(
            bus,
            version_record(make_artefact(tmp_path, 1), NAMESPACE),
            removed_record(1, NAMESPACE),
            pointer_record(1, NAMESPACE),
        )
        await until(gate, lambda: all("not on the log" in e["error"] for e in gate.status()["engines"].values()))
        assert versions(gate) == [0, 0]


async def test_downgrade_only_by_a_rollback_which_holds_until_it_is_released(
    engines: list[GateEngine], tmp_path: Path
) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines[:1]) as gate:
        publish(bus, tmp_path, 1)
        publish(bus, tmp_path, 2)
        await until(gate, lambda: versions(gate) == [2])
        write(bus, pointer_record(1, NAMESPACE))
        seen = len(heartbeats(bus))
        await until(gate, lambda: len(heartbeats(bus)) > seen + 2)
        assert versions(gate) == [2]
        roll_back(bus, NAMESPACE, POLICY, 1, reason="it swears", now=MOMENT)
        await until(gate, lambda: versions(gate) == [1])
        assert gate.status()["rolled_back"]
        publish(bus, tmp_path, 3)
        seen = len(heartbeats(bus))
        await until(gate, lambda: len(heartbeats(bus)) > seen + 2)
        assert versions(gate) == [1], "training goes on; what it makes waits"
        assert release(bus, NAMESPACE, POLICY) == 3
        await until(gate, lambda: versions(gate) == [3])
        assert engines[0].loads()[-3:] == ["2", "1", "3"]


async def test_a_rollback_names_a_version_that_is_there(tmp_path: Path) -> None:
    bus = memory_bus()
    for version in (1, 2):
        publish(bus, tmp_path, version)
    write(bus, removed_record(1, NAMESPACE))
    with pytest.raises(WeightsError, match=r"version 1 .* removed .* there are: 2"):
        roll_back(bus, NAMESPACE, POLICY, 1, reason="", now=MOMENT)
    with pytest.raises(WeightsError, match="nothing to release"):
        release(bus, NAMESPACE, POLICY)


async def test_an_orphaned_pause_is_ended(engines: list[GateEngine], tmp_path: Path) -> None:
    """Somebody's late command, perhaps of an owner that was replaced long ago."""
    bus = memory_bus()
    async with running_gate(bus, engines[:1]) as gate:
        publish(bus, tmp_path, 1)
        await until(gate, lambda: versions(gate) == [1])
        async with aiohttp.ClientSession() as session:
            await session.post(f"{engines[0].base_url}/pause_generation", json={"mode": "retract"})
        assert [span.weight_version for span in await ask(gate, "session")] == [1]
        assert not engines[0].paused


async def test_an_owner_does_not_end_the_pause_of_its_own_update(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    go_on = asyncio.Event()
    engines[0].load_scripts = [go_on]
    async with running_gate(bus, engines) as gate:
        await until(gate, lambda: versions(gate) == [0, 0])
        publish(bus, tmp_path, 1)
        await engines[0].load_began.wait()
        seen = len(heartbeats(bus, "engine-1"))
        await until(gate, lambda: len(heartbeats(bus, "engine-1")) > seen + 3)
        assert engines[0].paused, "several looks later"
        go_on.set()
        await until(gate, lambda: versions(gate) == [1, 1])
        resumes = [path for path, _ in engines[0].control_calls].count("/continue_generation")
        assert resumes == 2, "one at the beginning of the term and one after the load"


async def test_an_engine_started_without_its_flags_serves_and_is_named(engines: list[GateEngine]) -> None:
    engines[0].incremental = False
    engines[1].weight_version = "default"
    async with running_gate(memory_bus(), engines) as gate:
        await until(gate, lambda: versions(gate) == [0, 0])

        def warnings() -> list[list[str]]:
            return [engine["warnings"] for engine in gate.status()["engines"].values()]

        await until(gate, lambda: warnings()[0] != [])
        assert "--incremental-streaming-output" in warnings()[0][0]
        assert engines[1].loads() == ["0"], "it called its weights `default`: version 0 was loaded by name"
        assert [span.weight_version for span in await ask(gate, "session")] == [0]


async def test_restarted_engine_gets_the_pointers_version_before_traffic(
    engines: list[GateEngine], tmp_path: Path
) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines[:1]) as gate:
        publish(bus, tmp_path, 1)
        await until(gate, lambda: versions(gate) == [1])
        engines[0].is_unreachable = True
        gate.router.report_failure("engine-0")
        assert not gate.router.is_ready()
        engines[0].restart_with_base_weights()
        engines[0].is_unreachable = False
        assert [span.weight_version for span in await ask(gate, "session")] == [1]
        assert engines[0].loads() == ["1", "1"]


async def test_reported_failure_of_a_healthy_engine_is_forgiven(engines: list[GateEngine]) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines) as owner, running_gate(bus, engines, gateway="gateway-1") as other:
        for gate in (owner, other):
            await until(gate, lambda gate=gate: versions(gate) == [0, 0])
            gate.router.report_failure("engine-1")
            assert versions(gate)[1] is None
            await until(gate, lambda gate=gate: versions(gate) == [0, 0])


async def test_two_gateways_one_owner(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines) as first, running_gate(bus, engines, gateway="gateway-1") as second:
        publish(bus, tmp_path, 1)
        for gate in (first, second):
            await until(gate, lambda gate=gate: versions(gate) == [1, 1])
        assert (first.is_owner, second.is_owner) == (True, False)
        assert {beat.gate_owner for beat in heartbeats(bus)} == {"gateway-0"}
        assert [engine.loads() for engine in engines] == [["1"], ["1"]]
        assert [span.weight_version for span in await ask(second, "session")] == [1]


async def test_next_owner_unpauses_and_finishes_what_a_dead_one_left(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = StoppableBus()
    create_topics(bus)
    engine = engines[0]
    engine.load_scripts = [asyncio.Event()]  # the first load never ends
    patient = SETTINGS.model_copy(update={"deadlines": GateDeadlines(load_seconds=600)})
    async with (
        running_gate(bus, engines[:1], settings=patient) as dead,
        running_gate(bus, engines[:1], gateway="gateway-1") as successor,
    ):
        await until(successor, lambda: versions(successor) == [0])
        publish(bus, tmp_path, 1)
        await engine.load_began.wait()
        assert engine.paused
        term = dead._term  # pyright: ignore[reportPrivateUsage]
        with bus.stopped():
            bus.expel("test.weight-gate", "gateway-0")
            await until(successor, lambda: versions(successor) == [1])
            assert successor.is_owner
            assert not engine.paused
            assert term is not None
            beats = heartbeats(bus)
            first_of_successor = next(index for index, beat in enumerate(beats) if beat.gate_owner == "gateway-1")
            assert beats[first_of_successor - 1].state is EngineState.UPDATING
            assert beats[first_of_successor].gate_epoch > beats[first_of_successor - 1].gate_epoch
            await until(dead, lambda: versions(dead) == [1])


async def test_an_owner_that_does_not_know_it_was_replaced_stops_by_the_log(
    engines: list[GateEngine], tmp_path: Path
) -> None:
    bus = StoppableBus()
    create_topics(bus)
    slow = SETTINGS.model_copy(update={"heartbeat_seconds": 600.0, "heartbeat_expiry_seconds": 1200.0})
    async with (
        running_gate(bus, engines, settings=slow) as zombie,
        running_gate(bus, engines, gateway="gateway-1") as successor,
    ):
        await until(successor, lambda: versions(successor) == [0, 0])
        owner = zombie._owner  # pyright: ignore[reportPrivateUsage]
        assert owner is not None
        with bus.stopped():
            bus.expel("test.weight-gate", "gateway-0")
            await until(zombie, lambda: zombie._board.newest_term[1] == "gateway-1")  # pyright: ignore[reportPrivateUsage]
            assert zombie.is_owner, "its next heartbeat is far away, and nobody has told it"
            publish(bus, tmp_path, 1)
            await until(successor, lambda: versions(successor) == [1, 1])
            await until(zombie, lambda: owner.was_lost)
            assert [engine.loads() for engine in engines] == [["1"], ["1"]]


async def test_graceful_hand_over_in_mid_update_leaves_nothing_paused(
    engines: list[GateEngine], tmp_path: Path
) -> None:
    bus = memory_bus()
    engines[0].load_scripts = [asyncio.Event()]
    patient = SETTINGS.model_copy(update={"deadlines": GateDeadlines(load_seconds=600)})
    async with running_gate(bus, engines[:1], settings=patient):
        publish(bus, tmp_path, 1)
        await engines[0].load_began.wait()
        assert engines[0].paused
    assert not engines[0].paused
    async with running_gate(bus, engines[:1], gateway="gateway-1") as successor:
        await until(successor, lambda: versions(successor) == [1])


async def test_gateways_restart_without_loading_again(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    async with running_gate(bus, engines) as gate:
        publish(bus, tmp_path, 1)
        await until(gate, lambda: versions(gate) == [1, 1])
    async with running_gate(bus, engines) as gate:
        await until(gate, lambda: versions(gate) == [1, 1])
    assert [engine.loads() for engine in engines] == [["1"], ["1"]]


async def test_broker_outage_stops_no_request(engines: list[GateEngine], tmp_path: Path) -> None:
    bus = memory_bus()
    short = SETTINGS.model_copy(update={"heartbeat_expiry_seconds": 0.3})
    async with (
        running_gate(bus, engines, settings=short) as owner,
        running_gate(bus, engines, gateway="gateway-1", settings=short) as other,
    ):
        publish(bus, tmp_path, 1)
        for gate in (owner, other):
            await until(gate, lambda gate=gate: versions(gate) == [1, 1])
        bus.set_available(False)
        end = asyncio.get_running_loop().time() + 1.0  # three times the life of a heartbeat
        while asyncio.get_running_loop().time() < end:
            for gate in (owner, other):
                assert [span.weight_version for span in await ask(gate, "session")] == [1]
        bus.set_available(True)
        publish(bus, tmp_path, 2)
        for gate in (owner, other):
            await until(gate, lambda gate=gate: versions(gate) == [2, 2])
