"""`clawstream up`, `down` and `logs`."""

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.status import Status

from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output, required_config
from clawstream.clock import Clock, SystemClock
from clawstream.errors import SupervisorError
from clawstream.log import configure_logging
from clawstream.supervisor.control import start_detached, stop, wait_until_ready
from clawstream.supervisor.log_files import LogFollower, tail
from clawstream.supervisor.preflight import refuse_wrong_settings
from clawstream.supervisor.report import ProcessState, SupervisorReport
from clawstream.supervisor.settings import SystemSettings, load_system_settings
from clawstream.supervisor.stopping_words import still_ending
from clawstream.supervisor.supervisor import Supervisor

_FOLLOW_SECONDS = 0.2


class _Changes:
    """Prints a line for every process whose state changed, if it came into one of those that matter."""

    def __init__(self, states: Collection[ProcessState] = frozenset(ProcessState)) -> None:
        self._states = states
        self._seen: dict[str, tuple[ProcessState, str]] = {}

    def __call__(self, report: SupervisorReport) -> None:
        for process in report.processes:
            now = (process.state, process.detail)
            if self._seen.get(process.name) != now:
                self._seen[process.name] = now
                if process.state not in self._states:
                    continue
                errors.print(f"  {process.name:<16} {process.state:<12} {process.detail}".rstrip())


class _Endings:
    """Prints who is told to end and who has ended, and keeps a line about who is still waited for."""

    def __init__(self, line: Status, clock: Clock) -> None:
        self.killed: list[str] = []
        """Names of those that had to be killed."""
        self._line = line
        self._clock = clock
        self._changes = _Changes(frozenset({ProcessState.STOPPING, ProcessState.STOPPED}))

    def __call__(self, report: SupervisorReport) -> None:
        self._changes(report)
        self._line.update(still_ending(report, self._clock.now()) or "stopping")
        self.killed = [process.name for process in report.processes if process.was_killed]


def up(
    config: ConfigOption = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, and log here.")] = False,
    timeout_seconds: Annotated[float, typer.Option("--timeout", help="Seconds to wait until all are ready.")] = 600.0,
) -> None:
    """Starts every process of the file and returns when all are ready. They go on when the terminal closes."""
    file = required_config(config)
    settings = refuse_wrong_settings(file, os.environ)
    if foreground:
        _run(settings, file)
        return
    supervisor = start_detached(settings, file, os.environ)
    errors.print(f"supervisor is pid {supervisor.pid}; logs in {settings.log_directory}")
    try:
        report = wait_until_ready(settings, supervisor, timeout_seconds=timeout_seconds, progress=_Changes())
    except KeyboardInterrupt:
        errors.print("It goes on in the background: `clawstream status`, `clawstream down`.")
        raise typer.Exit(130) from None
    for process in report.processes:
        for name, address in process.addresses.items():
            output.print(f"{process.name} {name}: {address}")


def _run(settings: SystemSettings, file: Path) -> None:
    logger = configure_logging(settings.log, process="supervisor")
    with Supervisor(
        settings, config_file=file, environment=os.environ, clock=SystemClock(), logger=logger
    ) as supervisor:
        supervisor.handle_signals()
        all_well = supervisor.run()
    if not all_well:
        raise typer.Exit(1)


def down(
    config: ConfigOption = None,
    now: Annotated[bool, typer.Option("--now", help="At once: SIGKILL instead of a graceful end.")] = False,
    timeout_seconds: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the end.")] = 120.0,
) -> None:
    """Stops every process, dependents first. What is on the log and in the outbox stays.

    Each has its stop_timeout_seconds (30 by default) to end what it has in hand, and is killed then. Nothing is lost by
    that: what it had in hand is read again at the next start.
    """
    settings = load_system_settings(optional_config(config), os.environ)
    clock = SystemClock()
    try:
        with errors.status("stopping") as line:
            endings = _Endings(line, clock)
            found = stop(settings, clock, at_once=now, timeout_seconds=timeout_seconds, progress=endings)
    except KeyboardInterrupt:
        errors.print("The processes go on ending in the background: `clawstream status`, `clawstream down`.")
        raise typer.Exit(130) from None
    if found:
        killed = f"; {', '.join(endings.killed)} had to be killed, see above" if endings.killed else ""
        output.print(f"all processes are down{killed}; `clawstream up` starts them again")
    else:
        output.print(f"no supervisor runs in {settings.supervisor_directory}")


def logs(
    names: Annotated[list[str] | None, typer.Argument(help="Processes; all without.")] = None,
    config: ConfigOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each file to begin with.")] = 20,
) -> None:
    """Shows what processes printed."""
    settings = load_system_settings(optional_config(config), os.environ)
    files = _log_files(settings.log_directory, names or [])
    followers = {name: LogFollower(file, position_bytes=file.stat().st_size) for name, file in files.items()}
    width = max(len(name) for name in files)
    for name, file in files.items():
        for line in tail(file, lines):
            output.print(f"{name:<{width}} | {line}")
    try:
        while follow:
            for name, follower in followers.items():
                for line in follower.lines():
                    output.print(f"{name:<{width}} | {line}")
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        return


def _log_files(directory: Path, names: list[str]) -> dict[str, Path]:
    known = {file.stem: file for file in sorted(directory.glob("*.log"))}
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        choice = ", ".join(known) or "none yet"
        raise SupervisorError(f"no log of {', '.join(unknown) or 'any process'} in {directory}; there are: {choice}")
    return {name: known[name] for name in names} if names else known


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(up)
    app.command()(down)
    app.command()(logs)
