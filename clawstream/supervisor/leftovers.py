"""What a supervisor that was killed left running: its last report says which processes were its own."""

from pathlib import Path

from clawstream.supervisor.report import ProcessReport, read_report

_GRACE_SECONDS = 10.0


def leftovers(directory: Path) -> list[ProcessReport]:
    """Processes of the last report that still run, dependents last. For when no supervisor runs in `directory`."""
    report = read_report(directory)
    return [process for process in (report.processes if report else []) if is_alive(process)]


def is_alive(process: ProcessReport) -> bool:
    """Whether the very process that was reported still runs: its pid alone may be another's by now."""
    return process.identity is not None and process.identity.is_alive()


def end_leftovers(directory: Path) -> list[str]:
    """Ends them, dependents first, and returns their names. Raises SupervisorError when one does not end.

    Whoever calls it holds the directory's lock.
    """
    found = leftovers(directory)
    for process in reversed(found):
        assert process.identity is not None
        process.identity.terminate(_GRACE_SECONDS)
    return [process.name for process in found]
