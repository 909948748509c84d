"""One update of one engine: every phase, every failure."""

import asyncio

import pytest

from clawstream.errors import EngineRejected, EngineTimeout, EngineUnavailable, GateDeposed, WeightsError
from services.gateway.gate.settings import GateDeadlines
from services.gateway.gate.update import EngineUpdate, LoadableVersion, UpdateResult
from tests.unit.gateway.scripted_engine import ScriptedEngine

DEADLINES = GateDeadlines(
    verify_seconds=5, pause_seconds=0.02, load_seconds=0.02, resume_seconds=0.02, probe_seconds=0.02
)


def loadable(version: int, error: Exception | None = None) -> LoadableVersion:
    async def directory() -> str:
        if error:
            raise error
        return f"version-{version}"

    return LoadableVersion(version, directory)


async def never() -> None:
    await asyncio.Event().wait()


class Outside:
    """What an update needs from its surroundings."""

    def __init__(self, engine: ScriptedEngine, *, serving: int | None, loads_beside: bool = False) -> None:
        self.engine = engine
        self.may_command = True
        self.refuse: Exception | None = None
        self.update = EngineUpdate(
            engine,  # pyright: ignore[reportArgumentType] - control calls only
            serving=serving,
            loads_beside=loads_beside,
            deadlines=DEADLINES,
            take_out_of_service=self.take_out,
            longest_wait_seconds=lambda: 0.25,
            may_still_command=lambda: self.may_command,
        )

    async def take_out(self, version: int) -> None:
        self.engine.calls.append(f"out for {version}")
        if self.refuse:
            raise self.refuse


async def test_success_goes_through_all_phases_in_order() -> None:
    engine = ScriptedEngine(weight_version=4)
    result = await Outside(engine, serving=4).update.run(loadable(5), [loadable(4)])
    assert result == UpdateResult(5, hold_seconds=0.25)
    assert engine.calls == ["out for 5", "pause retract", "load 5", "ask", "resume"]


async def test_the_artefact_is_read_once_and_before_anybody_is_held() -> None:
    engine = ScriptedEngine(weight_version=4)

    async def directory() -> str:
        engine.calls.append("verify 5")
        return "version-5"

    await Outside(engine, serving=4).update.run(LoadableVersion(5, directory), [loadable(4)])
    assert engine.calls == ["verify 5", "out for 5", "pause retract", "load 5", "ask", "resume"]


async def test_torn_artefact_is_not_loaded_and_the_engine_is_not_touched() -> None:
    engine = ScriptedEngine(weight_version=4)
    result = await Outside(engine, serving=4).update.run(loadable(5, WeightsError("model.safetensors torn")), [])
    assert (result.weight_version, engine.calls) == (4, [])
    assert "torn" in result.error


@pytest.mark.parametrize(
    "failure",
    [
        EngineRejected("success: false", status=200),
        EngineRejected("cannot flush", status=400),
        EngineUnavailable("connection reset"),
        never,
    ],
)
async def test_failed_load_puts_the_old_version_back_explicitly(failure: Exception) -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.script("load", failure)
    result = await Outside(engine, serving=4).update.run(loadable(5), [loadable(4)])
    assert result.weight_version == 4
    assert "version 5 was not loaded" in result.error
    assert engine.calls == ["out for 5", "pause retract", "load 5", "load 4", "ask", "resume"]
    assert not engine.is_paused


async def test_wrong_version_reported_after_a_load_counts_as_failure() -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.reported_version = 4

    async def tell_the_truth() -> None:
        engine.reported_version = ...

    engine.script("ask", None, tell_the_truth)
    result = await Outside(engine, serving=4).update.run(loadable(5), [loadable(4)])
    assert result.weight_version == 4
    assert "reports version 4" in result.error
    assert "load 4" in engine.calls


async def test_no_version_loads_leaves_it_unknown_and_not_paused() -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.script("load", *[EngineUnavailable("down")] * 2)
    result = await Outside(engine, serving=4).update.run(loadable(5), [loadable(4)])
    assert result.weight_version is None
    assert not engine.is_paused


async def test_engine_that_never_pauses_serves_on() -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.script("pause", never)
    result = await Outside(engine, serving=4).update.run(loadable(5), [loadable(4)])
    assert result.weight_version == 4
    assert "pausing took longer than 0.02 s" in result.error
    assert "load 5" not in engine.calls
    assert engine.calls[-2:] == ["resume", "ask"]


@pytest.mark.parametrize(
    ("phase", "serves", "words"),
    [
        ("verify", 4, "verifying the artefact took longer than"),
        ("pause", 4, "pausing took longer than"),
        ("load", 4, "loading took longer than"),
        ("ask", 4, "asking for the version took longer than"),
        ("resume", 5, "resuming took longer than"),
    ],
)
async def test_every_phase_has_a_deadline_and_the_engine_goes_on(phase: str, serves: int, words: str) -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.script(phase, never)
    outside = Outside(engine, serving=4)
    target = loadable(5)
    if phase == "verify":

        async def stuck() -> str:
            await never()
            return ""

        outside.update._deadlines = DEADLINES.model_copy(update={"verify_seconds": 0.02})  # pyright: ignore[reportPrivateUsage]
        target = LoadableVersion(5, stuck)
    result = await outside.update.run(target, [loadable(4)])
    assert result.weight_version == serves
    assert words in result.error
    assert result.may_be_paused is (phase == "resume")
    assert engine.is_paused is (phase == "resume")


async def test_unconfirmed_resume_is_reported() -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.script("resume", EngineTimeout("silent"))
    result = await Outside(engine, serving=4).update.run(loadable(5), [loadable(4)])
    assert result.may_be_paused
    assert result.weight_version == 5
    assert "may still be paused" in result.error


async def test_an_engine_without_a_version_gets_an_older_one_when_the_target_is_torn() -> None:
    engine = ScriptedEngine(weight_version=0)
    result = await Outside(engine, serving=None).update.run(loadable(5, WeightsError("torn")), [loadable(4)])
    assert (result.weight_version, engine.weight_version) == (4, 4)


async def test_engine_that_loads_beside_is_never_paused_nor_taken_out() -> None:
    engine = ScriptedEngine(weight_version=4)
    result = await Outside(engine, serving=4, loads_beside=True).update.run(loadable(5), [loadable(4)])
    assert result == UpdateResult(5, hold_seconds=None)
    assert engine.calls == ["load 5", "ask"]


async def test_engine_that_loads_beside_is_taken_out_when_its_load_fails() -> None:
    engine = ScriptedEngine(weight_version=4)
    engine.script("load", EngineRejected("no", status=200))
    result = await Outside(engine, serving=4, loads_beside=True).update.run(loadable(5), [loadable(4)])
    assert result.weight_version == 4
    assert engine.calls == ["load 5", "out for 5", "load 4", "ask"]


async def test_deposed_before_the_pause_touches_nothing() -> None:
    engine = ScriptedEngine(weight_version=4)
    outside = Outside(engine, serving=4)
    outside.refuse = GateDeposed("gateway-1 took over")
    with pytest.raises(GateDeposed):
        await outside.update.run(loadable(5), [loadable(4)])
    assert engine.calls == ["out for 5"]


@pytest.mark.parametrize(("may_command", "is_paused"), [(True, False), (False, True)])
async def test_cancelled_update_resumes_only_while_it_may_command(may_command: bool, is_paused: bool) -> None:
    engine = ScriptedEngine(weight_version=4)
    loading = asyncio.Event()

    async def hang() -> None:
        loading.set()
        await never()

    engine.script("load", hang)
    outside = Outside(engine, serving=4)
    outside.update._deadlines = GateDeadlines()  # pyright: ignore[reportPrivateUsage] - the load must not time out
    task = asyncio.create_task(outside.update.run(loadable(5), [loadable(4)]))
    await loading.wait()
    outside.may_command = may_command
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.is_paused is is_paused
