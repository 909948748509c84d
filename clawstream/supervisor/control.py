"""Starting a supervisor in the background and stopping it from another process."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from clawstream.clock import Clock
from clawstream.errors import SupervisorError
from clawstream.process_identity import ProcessIdentity
from clawstream.supervisor.leftovers import end_leftovers, leftovers
from clawstream.supervisor.lock import SupervisorLock
from clawstream.supervisor.log_files import tail
from clawstream.supervisor.report import (
    OVER,
    RUNNING,
    SATISFIED,
    ProcessState,
    Progress,
    SupervisorReport,
    no_progress,
    read_report,
    running_supervisor,
)
from clawstream.supervisor.settings import SystemSettings

SUPERVISOR_LOG_NAME = "supervisor.log"
_POLL_SECONDS = 0.1
_TOLD = frozenset({ProcessState.STOPPING, ProcessState.STOPPED})


def start_detached(settings: SystemSettings, config_file: Path, environment: Mapping[str, str]) -> ProcessIdentity:
    """Starts a supervisor that outlives this process and its terminal. Raises SupervisorError when one runs already."""
    directory = settings.supervisor_directory
    running = running_supervisor(directory)
    if running is not None:
        raise SupervisorError(f"{directory} is in use by a supervisor (pid {running.pid}); see `clawstream status`")
    settings.log_directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "clawstream", "up", "--foreground", "--config", str(config_file.resolve())]
    with (settings.log_directory / SUPERVISOR_LOG_NAME).open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    return ProcessIdentity.of(child.pid)


def wait_until_ready(
    settings: SystemSettings, supervisor: ProcessIdentity, *, timeout_seconds: float, progress: Progress
) -> SupervisorReport:
    """Returns when every process is ready or has done its work.

    Raises SupervisorError when one failed, the supervisor ended, or the time is over. The supervisor goes on.
    """
    deadline = time.monotonic() + timeout_seconds
    last: SupervisorReport | None = None
    while True:
        alive = supervisor.is_alive()
        report = _report_of(supervisor, settings.supervisor_directory)
        if report is not None and report != last:
            progress(report)
            last = report
        if report is not None and all(process.state in SATISFIED for process in report.processes):
            return report
        failed = [process for process in report.processes if process.state is ProcessState.FAILED] if report else []
        if failed and report is not None:
            settled = all(process.state in SATISFIED | OVER for process in report.processes)
            if settled or time.monotonic() >= deadline:
                raise SupervisorError("\n".join(f"{process.name} failed: {process.detail}" for process in failed))
        if not alive:
            words = "\n".join(tail(settings.log_directory / SUPERVISOR_LOG_NAME, 15))
            raise SupervisorError(f"the supervisor (pid {supervisor.pid}) ended:\n{words}")
        if time.monotonic() >= deadline:
            waiting = [p.name for p in report.processes if p.state not in SATISFIED] if report else ["the supervisor"]
            raise SupervisorError(
                f"not ready after {timeout_seconds:.0f} seconds: {', '.join(waiting)}; it goes on in the background, "
                "see `clawstream status` and `clawstream logs`"
            )
        time.sleep(_POLL_SECONDS)


def stop(
    settings: SystemSettings, clock: Clock, *, at_once: bool, timeout_seconds: float, progress: Progress = no_progress
) -> bool:
    """Stops the supervisor and everything it runs, or what a killed one left. Returns whether there was anything.

    One that stops already is waited for: told twice, it would kill everything. `progress` sees the last report too.
    Raises SupervisorError when it does not end in time.
    """
    directory = settings.supervisor_directory
    supervisor = running_supervisor(directory)
    if supervisor is None:
        return _end_leftovers(directory, clock, progress)
    if not _is_stopping(_report_of(supervisor, directory)):
        supervisor.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    told_again = False
    while not supervisor.wait(_POLL_SECONDS):
        report = _report_of(supervisor, directory)
        if report is not None:
            progress(report)
        # Two signals in a row could merge into one: the second waits until the first shows.
        if at_once and _is_stopping(report) and not told_again:
            supervisor.signal(signal.SIGTERM)
            told_again = True
        if time.monotonic() >= deadline:
            running = ", ".join(p.name for p in report.processes if p.state in RUNNING) if report is not None else ""
            raise SupervisorError(
                f"the supervisor (pid {supervisor.pid}) still runs after {timeout_seconds:.0f} seconds"
                f"{f', with {running}' if running else ''}; it goes on ending them, `clawstream down` waits for it "
                "again, and `clawstream down --now` ends all at once"
            )
    report = _report_of(supervisor, directory)
    if report is not None:
        progress(report)
    return True


def _report_of(supervisor: ProcessIdentity, directory: Path) -> SupervisorReport | None:
    """What this supervisor wrote; None for what a predecessor left."""
    report = read_report(directory)
    return report if report is not None and report.supervisor_pid == supervisor.pid else None


def _is_stopping(report: SupervisorReport | None) -> bool:
    return report is not None and any(process.state in _TOLD for process in report.processes)


def _end_leftovers(directory: Path, clock: Clock, progress: Progress) -> bool:
    if not leftovers(directory):
        return False
    lock = SupervisorLock(directory)
    try:
        return bool(end_leftovers(directory, clock, progress))
    finally:
        lock.release()
