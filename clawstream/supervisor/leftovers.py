"""What a supervisor that was killed left running: its last report says which processes were its own."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from clawstream.clock import Clock
from clawstream.supervisor.report import (
    ProcessReport,
    ProcessState,
    Progress,
    SupervisorReport,
    no_progress,
    read_report,
)
from clawstream.supervisor.settings import Service
from clawstream.supervisor.stopping_words import kill_consequence, overdue_words, stopping_words

_GRACE_SECONDS = 10.0


def leftovers(directory: Path) -> list[ProcessReport]:
    """Processes of the last report that still run, dependents last. For when no supervisor runs in `directory`."""
    report = read_report(directory)
    return [process for process in (report.processes if report else []) if is_alive(process)]


def is_alive(process: ProcessReport) -> bool:
    """Whether the very process that was reported still runs: its pid alone may be another's by now."""
    return process.identity is not None and process.identity.is_alive()


def end_leftovers(
    directory: Path, clock: Clock, progress: Progress = no_progress, *, grace_seconds: float = _GRACE_SECONDS
) -> list[str]:
    """Ends them, dependents first, and returns their names. `progress` sees them as of a supervisor that stops them.

    Whoever calls it holds the directory's lock. Raises SupervisorError when one does not end.
    """
    report = read_report(directory)
    found = leftovers(directory)
    for process in reversed(found):
        assert report is not None
        assert process.identity is not None
        now = clock.now()
        kill_at = now + timedelta(seconds=grace_seconds)
        words = stopping_words(grace_seconds)
        report = _with(report, process, state=ProcessState.STOPPING, since=now, detail=words, kill_at=kill_at)
        progress(report)
        was_killed = process.identity.terminate(grace_seconds)
        words = f"{overdue_words(grace_seconds)}: {kill_consequence(Service(process.service))}" if was_killed else ""
        report = _with(
            report,
            process,
            state=ProcessState.STOPPED,
            since=clock.now(),
            detail=words,
            was_killed=was_killed,
            kill_at=None,
            pid=None,
            create_time=None,
        )
        progress(report)
    return [process.name for process in found]


def _with(report: SupervisorReport, process: ProcessReport, **changes: Any) -> SupervisorReport:
    """The report with one process changed."""
    return report.model_copy(
        update={
            "processes": [
                each.model_copy(update=changes) if each.name == process.name else each for each in report.processes
            ]
        }
    )
