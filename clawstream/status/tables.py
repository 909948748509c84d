"""A snapshot as tables for a terminal."""

from collections.abc import Iterator

from rich.table import Table

from clawstream.durations import duration
from clawstream.status.snapshot import LogSnapshot, Snapshot
from clawstream.topics import topic_definitions

_REASONS = {
    "clawstream_turns_untrainable_total": ("turns not trainable", "reason"),
    "clawstream_worker_inputs_total": ("worker inputs", "reason"),
    "clawstream_samples_dropped_total": ("samples dropped", "reason"),
    "clawstream_dead_letters_total": ("dead letters", "reason"),
    "clawstream_gateway_errors_total": ("gateway errors", "code"),
}


def tables(snapshot: Snapshot) -> Iterator[Table]:
    """One table per question, those without an answer left out."""
    if snapshot.report is not None:
        yield _processes(snapshot)
    if snapshot.log is not None:
        yield _flow(snapshot.log)
        if snapshot.log.engines:
            yield _engines(snapshot.log)
        if snapshot.log.steps:
            yield _steps(snapshot)
    reasons = _reasons(snapshot)
    if reasons.row_count:
        yield reasons


def _processes(snapshot: Snapshot) -> Table:
    table = Table(
        "process", "state", "for", "pid", "starts", "detail", box=None, title="Processes", title_justify="left"
    )
    orphans = {process.name for process in snapshot.orphans}
    vanished = {process.name for process in snapshot.vanished}
    for process in snapshot.report.processes if snapshot.report else []:
        state = process.state.value if snapshot.supervisor_pid is not None else f"({process.state.value})"
        if process.name in orphans | vanished:
            state = "orphan" if process.name in orphans else "gone"
        table.add_row(
            process.name,
            state,
            duration((snapshot.taken_at - process.since).total_seconds()),
            str(process.pid or ""),
            str(process.starts),
            process.detail or process.last_exit,
        )
    return table


def _flow(log: LogSnapshot) -> Table:
    table = Table("topic", "records <=", "reader", "unresolved", "oldest", box=None, title="Log", title_justify="left")
    lags = {lag.topic: lag for lag in log.lags}
    order = [topic for topic in topic_definitions() if log.offsets.get(topic) or topic in lags]
    for topic in order:
        lag = lags.get(topic)
        if lag is None:
            table.add_row(topic, str(log.offsets[topic]), "", "", "")
            continue
        count = f"{'>= ' if lag.is_lower_bound else ''}{lag.records}"
        oldest = "" if lag.oldest_seconds is None else duration(lag.oldest_seconds)
        table.add_row(topic, str(log.offsets[topic]), lag.stage, count, oldest)
    return table


def _engines(log: LogSnapshot) -> Table:
    held = "" if log.rollback_reason is None else ", held by a rollback"
    title = f"Weights: version {log.pointer_version} should be in service{held}, {log.newest_version} is the newest"
    table = Table("engine", "state", "serves", "moving to", "detail", box=None, title=title, title_justify="left")
    for engine in log.engines:
        table.add_row(
            engine.engine,
            "expired" if engine.is_expired else engine.state.value,
            "unknown" if engine.weight_version is None else str(engine.weight_version),
            "" if engine.target_version is None else str(engine.target_version),
            engine.error,
        )
    return table


def _steps(snapshot: Snapshot) -> Table:
    have, need = snapshot.total("clawstream_batch_have"), snapshot.total("clawstream_batch_need")
    waiting = "" if have is None or need is None else f"; the next has {have:.0f} of {need:.0f} effective samples"
    table = Table(
        *("step", "version", "samples", "reward", "age", "closed by", "took", "ago", "dropped", "guards"),
        box=None,
        title=f"Last steps{waiting}",
        title_justify="left",
    )
    for step in snapshot.log.steps if snapshot.log else []:
        table.add_row(
            str(step.step),
            str(step.weight_version) if step.weight_version is not None else f"none ({step.unchanged_reason})",
            str(step.samples),
            "" if step.mean_reward is None else f"{step.mean_reward:+.2f}",
            "" if step.mean_age is None else f"{step.mean_age:.1f}",
            step.closed_by,
            duration(step.seconds),
            duration((snapshot.taken_at - step.finished_at).total_seconds()),
            ", ".join(f"{reason} {count}" for reason, count in sorted(step.drops.items())),
            "; ".join(step.guards),
        )
    return table


def _reasons(snapshot: Snapshot) -> Table:
    table = Table("what", "reason", "count", box=None, title="Drops and skips", title_justify="left")
    for metric, (what, label) in _REASONS.items():
        for reason, count in sorted(snapshot.by_label(metric, label).items()):
            if reason:
                table.add_row(what, reason, f"{count:.0f}")
    return table
