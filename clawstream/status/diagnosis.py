"""Is it learning, and if not, why not. Pure: a snapshot in, sentences out.

The data flow is a chain, so the first link that has nothing behind it is the answer; what follows it is silent for the
same reason.
"""

from dataclasses import dataclass

from clawstream.status.snapshot import LogSnapshot, Snapshot, StageLag
from clawstream.supervisor.report import SATISFIED, ProcessState, SupervisorReport
from clawstream.supervisor.settings import Service
from clawstream.topics import NEXT_STATES, SAMPLES, SCORES, TURNS
from schemas.events.weights import EngineState

_HOLD = ": hold,"
"""In the words of a guard that allowed no update."""
_TROUBLED = frozenset({ProcessState.FAILED, ProcessState.BACKING_OFF, ProcessState.UNREADY})


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer."""

    is_learning: bool
    """Whether a step has changed the weights and nothing stands in the way of the next one."""
    headline: str
    """The answer in one sentence."""
    notes: tuple[str, ...]
    """What else somebody should know."""


def diagnose(snapshot: Snapshot) -> Diagnosis:
    """The first broken link, or what was learned."""
    notes = _notes(snapshot)
    troubles = _process_troubles(snapshot)
    log = snapshot.log
    if snapshot.report is not None and snapshot.is_down:
        return Diagnosis(False, _down(snapshot, snapshot.report), (*troubles, *_log_of_a_system_that_is_down(snapshot)))
    if log is None:
        return Diagnosis(False, _unreadable(snapshot), (*troubles, *notes))
    missing_link = _missing_link(snapshot, log)
    if missing_link is not None:
        return Diagnosis(False, missing_link, (*troubles, *notes))
    if troubles:
        return Diagnosis(False, troubles[0], (*troubles[1:], *notes))
    return _learned(log, notes)


def _down(snapshot: Snapshot, report: SupervisorReport) -> str:
    if snapshot.vanished:
        how = "its supervisor was killed, as when the machine is switched off, and nothing of it runs any more"
    else:
        ended = max((process.since for process in report.processes), default=report.started_at)
        how = f"all its processes have ended, the last one at {ended:%Y-%m-%d %H:%M:%S} UTC"
    return f"the system is down: {how}. Start it with `clawstream up --config {report.config_file}`"


def _log_of_a_system_that_is_down(snapshot: Snapshot) -> tuple[str, ...]:
    if snapshot.log is None:
        return (f"the log cannot be read: {snapshot.log_problem}",) if snapshot.log_problem else ()
    said = diagnose(snapshot.model_copy(update={"report": None}))
    return (f"the log has a broker of its own, and says: {said.headline}", *said.notes)


def _unreadable(snapshot: Snapshot) -> str:
    if snapshot.report is None and snapshot.supervisor_pid is None:
        return (
            f"no system runs here, and none was started in this data_directory yet: {snapshot.log_problem}. Start it "
            "with `clawstream up`; if it runs elsewhere, kafka.bootstrap_servers must name its broker"
        )
    told = f"the log cannot be read: {snapshot.log_problem}"
    for process in snapshot.report.processes if snapshot.report is not None else []:
        if process.service == Service.BROKER and process.state not in SATISFIED:
            return f"{process.name} is {process.state}, so {told}"
    return told


def _missing_link(snapshot: Snapshot, log: LogSnapshot) -> str | None:
    """Why no step has been made yet, or None when there are steps."""
    lags = {lag.stage: lag for lag in log.lags}
    if not log.offsets[TURNS]:
        return f"no turn has been recorded yet: {_how_to_talk(snapshot)}"
    if not log.offsets[NEXT_STATES]:
        return (
            "there are turns, and nobody has reacted to one yet: a turn is judged when the next message of its "
            "conversation arrives, on explicit feedback, or when its session ends"
        )
    if not log.offsets[SCORES]:
        return _stuck("judge", "next states, and no score", lags["judge"], snapshot)
    if not log.offsets[SAMPLES]:
        return _stuck("teacher", "scores, and no sample", lags["teacher"], snapshot)
    if not log.steps_read:
        return f"there are samples, and no step yet: {_batch(snapshot, lags['trainer'])}"
    return None


def _how_to_talk(snapshot: Snapshot) -> str:
    for process in snapshot.report.processes if snapshot.report else []:
        if "openai" in process.addresses:
            return f"point a client at {process.addresses['openai']}"
    return "point a client at the gateway"


def _stuck(stage: str, what: str, lag: StageLag, snapshot: Snapshot) -> str:
    if lag.records:
        return f"there are {what} yet: the {stage} has {_lag_text(lag)} before it; see `clawstream logs {stage}`"
    skipped = _skips(snapshot, stage)
    return f"there are {what}: the {stage} resolved all of them without an output{skipped}"


def _skips(snapshot: Snapshot, stage: str) -> str:
    processes = {p.name for p in snapshot.report.processes if p.service == stage} if snapshot.report else set[str]()
    counts: dict[str, float] = {}
    for sample in snapshot.metrics:
        if sample.name == "clawstream_worker_inputs_total" and sample.process in processes:
            key = sample.labels.get("reason") or sample.labels.get("result", "")
            counts[key] = counts.get(key, 0.0) + sample.value
    told = ", ".join(f"{reason}: {count:.0f}" for reason, count in sorted(counts.items()) if count)
    return f" ({told})" if told else ""


def _batch(snapshot: Snapshot, lag: StageLag) -> str:
    have, need = snapshot.total("clawstream_batch_have"), snapshot.total("clawstream_batch_need")
    if have is not None and need and have >= need:
        return f"the batch is full ({have:.0f} of {need:.0f} effective samples), and its step is being trained"
    if have is not None and need:
        return f"{have:.0f} of {need:.0f} effective samples of the next batch are there"
    return f"the trainer's metrics cannot be read; it has {_lag_text(lag)} before it"


def _lag_text(lag: StageLag) -> str:
    if not lag.records:
        return "nothing"
    more = "at least " if lag.is_lower_bound else ""
    age = f", the oldest {lag.oldest_seconds:.0f} s old" if lag.oldest_seconds is not None else ""
    return f"{more}{lag.records} record{'s' if lag.records > 1 else ''}{age}"


def _learned(log: LogSnapshot, notes: tuple[str, ...]) -> Diagnosis:
    changed = [step for step in log.steps if step.weight_version is not None]
    if not changed:
        reasons = sorted({step.unchanged_reason or "unknown" for step in log.steps})
        holders = sorted({words for step in log.steps for words in step.guards if _HOLD in words})
        told = f" ({'; '.join(holders)})" if holders else ""
        return Diagnosis(False, f"the last {len(log.steps)} steps changed no weight: {', '.join(reasons)}{told}", notes)
    last = changed[-1]
    watched = [engine for engine in log.engines if not engine.is_expired]
    if not watched:
        return Diagnosis(
            False,
            f"version {last.weight_version} was made, and no gateway moves it into service: no engine has a heartbeat",
            notes,
        )
    serving = [engine for engine in watched if engine.weight_version == log.pointer_version]
    failed = [engine for engine in watched if engine.state in (EngineState.FAILED, EngineState.UNREACHABLE)]
    if not serving and failed:
        told = "; ".join(f"{engine.engine}: {engine.error or engine.state.value}" for engine in failed)
        return Diagnosis(False, f"version {log.pointer_version} is in service on no engine: {told}", notes)
    return Diagnosis(
        True,
        f"step {last.step} made version {last.weight_version}; version {log.pointer_version} should be in service and "
        f"is on {len(serving)} of {len(watched)} engines",
        notes,
    )


def _process_troubles(snapshot: Snapshot) -> tuple[str, ...]:
    if snapshot.report is not None and snapshot.is_down:
        failed = [process for process in snapshot.report.processes if process.state is ProcessState.FAILED]
        return tuple(f"{process.name} had failed before: {process.detail or process.last_exit}" for process in failed)
    if snapshot.report is None or snapshot.supervisor_pid is None:
        return tuple(
            f"{process.name} is gone: it ended after its supervisor was killed" for process in snapshot.vanished
        )
    return tuple(
        f"{process.name} is {process.state}: {process.detail or process.last_exit}"
        for process in snapshot.report.processes
        if process.state in _TROUBLED
    )


def _notes(snapshot: Snapshot) -> tuple[str, ...]:
    notes: list[str] = []
    if snapshot.orphans or snapshot.vanished:
        notes.append(_killed_supervisor(snapshot))
    if snapshot.silent:
        notes.append(f"no metrics from {', '.join(snapshot.silent)}")
    unrecorded = snapshot.total("clawstream_turns_unrecorded_total")
    if unrecorded:
        notes.append(f"{unrecorded:.0f} turns were served and not recorded: the outbox was full")
    dropped = snapshot.total("clawstream_outbox_entries_dropped_total")
    if dropped:
        notes.append(f"{dropped:.0f} turns or next states were dropped: the log takes no record that large")
    dead = snapshot.total("clawstream_dead_letters_total")
    if dead:
        notes.append(f"{dead:.0f} records went to a dead-letter topic")
    if snapshot.log is not None and snapshot.log.drops:
        reason, count = max(snapshot.log.drops.items(), key=lambda item: item[1])
        total = sum(snapshot.log.drops.values())
        steps = snapshot.log.steps_read
        notes.append(f"the trainer dropped {total} samples in the last {steps} steps, {count} of them as {reason}")
    if snapshot.log is not None and snapshot.log.rollback_reason is not None:
        reason = f" ({snapshot.log.rollback_reason})" if snapshot.log.rollback_reason else ""
        notes.append(
            f"version {snapshot.log.pointer_version} is held by a rollback{reason}: nothing newer goes into service "
            "until `clawstream weights release`"
        )
    notes += _guard_notes(snapshot.log) if snapshot.log is not None else []
    for engine in snapshot.log.engines if snapshot.log else []:
        if engine.error:
            notes.append(f"engine {engine.engine}: {engine.error}")
    return tuple(notes)


def _killed_supervisor(snapshot: Snapshot) -> str:
    told = ["the supervisor was killed"]
    if snapshot.orphans:
        running = ", ".join(f"{process.name} (pid {process.pid})" for process in snapshot.orphans)
        told.append(f"{running} still run, and nobody starts them again when they end")
    if snapshot.vanished:
        told.append(f"{', '.join(process.name for process in snapshot.vanished)} ended since")
    return f"{'; '.join(told)}: `clawstream up` ends what is left and starts everything, `clawstream down` ends it"


def _guard_notes(log: LogSnapshot) -> list[str]:
    notes: list[str] = []
    if log.guard_actions:
        counts = ", ".join(f"{what} {count} times" for what, count in sorted(log.guard_actions.items()))
        newest = [words for step in log.steps for words in step.guards]
        last = f"; the last: {newest[-1]}" if newest else ""
        notes.append(f"guards acted in the last {log.steps_read} steps: {counts}{last}")
    held = [step.step for step in log.steps if any(_HOLD in words for words in step.guards)]
    if held and held[-1] == log.steps[-1].step:
        notes.append(f"a guard held step {held[-1]}: nothing is learned until what it measures is within its limits")
    return notes
