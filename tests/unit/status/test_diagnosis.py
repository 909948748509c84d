"""Is it learning, and if not, why not: the first broken link is the answer."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from clawstream.status.diagnosis import diagnose
from clawstream.status.log_reading import told
from clawstream.status.snapshot import EngineVersion, LogSnapshot, MetricSample, Snapshot, StageLag, Step
from clawstream.supervisor.report import ProcessReport, ProcessState, SupervisorReport
from clawstream.topics import NEXT_STATES, SAMPLES, SCORES, TURNS, topic_definitions
from schemas.events.train_step import GuardAction
from schemas.events.weights import EngineState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def lag(stage: str, topic: str, records: int = 0) -> StageLag:
    oldest = 30.0 if records else None
    return StageLag(stage=stage, topic=topic, records=records, is_lower_bound=False, oldest_seconds=oldest)


def step(number: int, version: int | None = 1, unchanged: str = "") -> Step:
    return Step(
        step=number,
        base_version=0,
        weight_version=version,
        unchanged_reason=unchanged,
        closed_by="count",
        samples=16,
        drops={},
        mean_reward=0.5,
        mean_age=0.0,
        seconds=3.0,
        finished_at=NOW - timedelta(minutes=1),
    )


def engine(version: int | None = 1, **fields: Any) -> EngineVersion:
    values = {"state": EngineState.READY, "target_version": None, "is_expired": False, "error": "", **fields}
    return EngineVersion(engine="engine-1", weight_version=version, **values)


def log(lags: dict[str, int] | None = None, **fields: Any) -> LogSnapshot:
    waiting = lags or {}
    values: dict[str, Any] = {
        "offsets": dict.fromkeys(topic_definitions(), 5),
        "lags": [
            lag("judge", NEXT_STATES, waiting.get("judge", 0)),
            lag("teacher", SCORES, waiting.get("teacher", 0)),
            lag("trainer", SAMPLES, waiting.get("trainer", 0)),
        ],
        "pointer_version": 1,
        "newest_version": 1,
        "engines": [engine()],
        "steps": [step(1)],
        "drops": {},
        "steps_read": 1,
        **fields,
    }
    return LogSnapshot(**values)


def process(name: str, state: ProcessState = ProcessState.READY, **fields: Any) -> ProcessReport:
    return ProcessReport(name=name, service=name, state=state, since=NOW, log_file=Path("x.log"), **fields)


def snapshot(
    what: LogSnapshot | None, *processes: ProcessReport, metrics: list[MetricSample] | None = None
) -> Snapshot:
    report = SupervisorReport(config_file=Path("c"), supervisor_pid=1, started_at=NOW, processes=list(processes))
    problem = "" if what else "127.0.0.1:9092 refused"
    return Snapshot(taken_at=NOW, supervisor_pid=1, report=report, log=what, log_problem=problem, metrics=metrics or [])


def stopped(what: LogSnapshot | None, *processes: ProcessReport, problem: str = "") -> Snapshot:
    """What `clawstream down` leaves."""
    return snapshot(what, *processes).model_copy(update={"supervisor_pid": None, "log_problem": problem})


def without(*topics: str) -> dict[str, int]:
    return {topic: 0 if topic in topics else 5 for topic in topic_definitions()}


def test_a_whole_chain_is_learning() -> None:
    diagnosis = diagnose(snapshot(log()))
    assert diagnosis.is_learning
    assert "step 1 made version 1" in diagnosis.headline
    assert "1 of 1 engines" in diagnosis.headline


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (None, "127.0.0.1:9092 refused"),
        (log(offsets=without(TURNS, NEXT_STATES, SCORES, SAMPLES)), "no turn has been recorded"),
        (log(offsets=without(NEXT_STATES, SCORES, SAMPLES)), "nobody has reacted"),
        (log({"judge": 3}, offsets=without(SCORES, SAMPLES)), "the judge has 3 records, the oldest 30 s old"),
        (log(offsets=without(SCORES, SAMPLES)), "the judge resolved all of them without an output"),
        (log({"teacher": 1}, offsets=without(SAMPLES)), "the teacher has 1 record,"),
        (log(steps=[], steps_read=0), "no step yet"),
        (log(steps=[step(1, None, "zero_advantage")]), "changed no weight: zero_advantage"),
        (log(engines=[engine(is_expired=True)]), "no engine has a heartbeat"),
        (log(engines=[engine(0, state=EngineState.FAILED, error="checksum")]), "no engine: engine-1: checksum"),
    ],
)
def test_the_first_broken_link_is_the_answer(what: LogSnapshot | None, words: str) -> None:
    diagnosis = diagnose(snapshot(what))
    assert not diagnosis.is_learning
    assert words in diagnosis.headline


@pytest.mark.parametrize("problem", ["", "127.0.0.1:9092 refused"])
def test_a_system_that_is_down_is_no_error_of_the_log(problem: str) -> None:
    trainer = process("trainer", ProcessState.STOPPED, detail="did not end within 30 seconds, and was killed")
    engine = process("engine", ProcessState.FAILED, detail="no such model")
    diagnosis = diagnose(stopped(None, trainer, engine, problem=problem))
    assert diagnosis.headline == (
        "the system is down: all its processes have ended, the last one at 2026-01-01 00:00:00 UTC. Start it with "
        "`clawstream up --config c`"
    )
    assert not diagnosis.is_learning
    log_notes = [f"the log cannot be read: {problem}"] if problem else []
    assert list(diagnosis.notes) == ["engine had failed before: no such model", *log_notes]


def test_what_the_log_says_of_a_system_that_is_down_comes_after_that() -> None:
    diagnosis = diagnose(stopped(log(drops={"too_old": 7}), process("trainer", ProcessState.STOPPED)))
    assert diagnosis.headline.startswith("the system is down")
    assert not diagnosis.is_learning
    assert "step 1 made version 1" in diagnosis.notes[0]
    assert "7 of them as too_old" in diagnosis.notes[1]


def test_a_system_that_was_switched_off_is_down() -> None:
    process_before = process("trainer", pid=1, create_time=1.0)
    diagnosis = diagnose(stopped(None, process_before))
    assert diagnosis.headline.startswith("the system is down: its supervisor was killed")
    assert "clawstream up --config c" in diagnosis.headline


def test_orphans_are_no_system_that_is_down() -> None:
    orphan = process("trainer", pid=1, create_time=1.0)
    left = stopped(log(), orphan).model_copy(update={"alive": ["trainer"]})
    assert not left.is_down
    assert "step 1 made version 1" in diagnose(left).headline


def test_where_nothing_was_ever_started_the_way_to_start_is_told() -> None:
    nothing = stopped(None, problem="127.0.0.1:9092 refused").model_copy(update={"report": None})
    assert diagnose(nothing).headline == (
        "no system runs here, and none was started in this data_directory yet: 127.0.0.1:9092 refused. Start it with "
        "`clawstream up`; if it runs elsewhere, kafka.bootstrap_servers must name its broker"
    )


@pytest.mark.parametrize("state", [ProcessState.STARTING, ProcessState.STOPPING])
def test_a_broker_on_its_way_is_named_before_the_log(state: ProcessState) -> None:
    headline = diagnose(snapshot(None, process("broker", state))).headline
    assert headline == f"broker is {state}, so the log cannot be read: 127.0.0.1:9092 refused"


def test_have_and_need_of_the_first_batch() -> None:
    metrics = [
        MetricSample(process="trainer", name=f"clawstream_batch_{name}", labels={}, value=value)
        for name, value in (("have", 12), ("need", 16))
    ]
    diagnosis = diagnose(snapshot(log(steps=[], steps_read=0), metrics=metrics))
    assert "12 of 16 effective samples" in diagnosis.headline


def test_a_worker_that_skips_everything_says_why() -> None:
    metrics = [
        MetricSample(
            process="judge",
            name="clawstream_worker_inputs_total",
            labels={"result": "skipped", "reason": "session_end"},
            value=4,
        )
    ]
    what = log(offsets=without(SCORES, SAMPLES))
    assert "session_end: 4" in diagnose(snapshot(what, process("judge"), metrics=metrics)).headline


def test_a_failed_process_stands_in_the_way_although_there_were_steps() -> None:
    diagnosis = diagnose(snapshot(log(), process("trainer", ProcessState.FAILED, detail="crash-looping, 8 times")))
    assert not diagnosis.is_learning
    assert diagnosis.headline == "trainer is failed: crash-looping, 8 times"


def test_the_address_to_talk_to_is_told() -> None:
    what = log(offsets=without(TURNS))
    gateway = process("gateway", addresses={"openai": "http://127.0.0.1:8000/v1"})
    assert "point a client at http://127.0.0.1:8000/v1" in diagnose(snapshot(what, gateway)).headline


def test_the_largest_reason_for_drops_is_noted() -> None:
    diagnosis = diagnose(snapshot(log(drops={"too_old": 7, "superseded": 2})))
    assert any("dropped 9 samples in the last 1 steps, 7 of them as too_old" in note for note in diagnosis.notes)


HELD = "shift: hold, shift_mean_abs 0.75 above 0.5"


def test_steps_that_a_guard_held_say_which_and_why() -> None:
    held = step(1, None, "held").model_copy(update={"guards": [HELD]})
    diagnosis = diagnose(snapshot(log(steps=[held], guard_actions={"shift: hold": 1})))
    assert not diagnosis.is_learning
    assert f"changed no weight: held ({HELD})" in diagnosis.headline


def test_what_guards_did_is_told_while_learning() -> None:
    steps = [step(1), step(2, None, "held").model_copy(update={"guards": [HELD]})]
    diagnosis = diagnose(snapshot(log(steps=steps, steps_read=9, guard_actions={"shift: hold": 1, "signal: alert": 3})))
    assert diagnosis.is_learning
    words = "\n".join(diagnosis.notes)
    assert "the last 9 steps: shift: hold 1 times, signal: alert 3 times" in words
    assert HELD in words
    assert "a guard held step 2" in words


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (
            GuardAction(guard="shift", action="hold", measurement="shift_mean_abs", value=0.75, limit=0.5),
            HELD,
        ),
        (
            GuardAction(guard="shift", action="drop", measurement="age_mean", value=9, limit=4, samples=2),
            "shift: drop, age_mean 9 above 4, 2 samples",
        ),
        (
            GuardAction(guard="exploration", action="decay", knob="entropy_coefficient", before=0.001, after=0.0009),
            "exploration: decay, entropy_coefficient 0.001 -> 0.0009",
        ),
    ],
)
def test_an_action_in_words(action: GuardAction, words: str) -> None:
    assert told(action) == words


@pytest.mark.parametrize(
    ("have", "told_of_batch"), [(2, "2 of 16 effective samples of the next batch"), (18, "its step is being trained")]
)
def test_before_the_first_step_the_batch_fills_or_is_trained(have: float, told_of_batch: str) -> None:
    metrics = [
        MetricSample(process="trainer", name=f"clawstream_batch_{name}", labels={}, value=value)
        for name, value in (("have", have), ("need", 16.0))
    ]
    found = diagnose(snapshot(log(steps=[], steps_read=0), process("trainer"), metrics=metrics))
    assert not found.is_learning
    assert told_of_batch in found.headline
