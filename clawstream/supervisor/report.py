"""What the supervisor writes down about its processes, for `status`, `logs` and `down` in other processes."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from clawstream.durable_files import replace_file
from clawstream.errors import SupervisorError
from clawstream.process_identity import ProcessIdentity, read_pid_file

REPORT_NAME = "report.json"
PID_NAME = "supervisor.pid"


class ProcessState(StrEnum):
    """Where a process is in its life."""

    WAITING = "waiting"
    """For those it depends on."""
    STARTING = "starting"
    """It runs and is not ready yet."""
    READY = "ready"
    """It runs and says that it is ready."""
    UNREADY = "unready"
    """It runs, was ready, and now says that it is not."""
    BACKING_OFF = "backing-off"
    """It ended; it is started again soon."""
    FAILED = "failed"
    """It ended and is not started again: crash-looping, or wrongly configured."""
    COMPLETED = "completed"
    """It did its work and ended."""
    STOPPING = "stopping"
    """It was told to stop."""
    STOPPED = "stopped"
    """It was told to stop, and did."""


_ALIVE = {ProcessState.STARTING, ProcessState.READY, ProcessState.UNREADY}
_ENDED = {ProcessState.BACKING_OFF, ProcessState.FAILED, ProcessState.COMPLETED}

TRANSITIONS: Mapping[ProcessState, frozenset[ProcessState]] = {
    ProcessState.WAITING: frozenset({ProcessState.STARTING, ProcessState.STOPPED, ProcessState.FAILED}),
    ProcessState.STARTING: frozenset({ProcessState.READY, ProcessState.STOPPING, *_ENDED}),
    ProcessState.READY: frozenset({ProcessState.UNREADY, ProcessState.STOPPING, *_ENDED}),
    ProcessState.UNREADY: frozenset({ProcessState.READY, ProcessState.STOPPING, *_ENDED}),
    ProcessState.BACKING_OFF: frozenset({ProcessState.STARTING, ProcessState.STOPPED, ProcessState.FAILED}),
    ProcessState.FAILED: frozenset(),
    ProcessState.COMPLETED: frozenset(),
    ProcessState.STOPPING: frozenset({ProcessState.STOPPED}),
    ProcessState.STOPPED: frozenset(),
}
"""Which state may follow which."""

SATISFIED = frozenset({ProcessState.READY, ProcessState.UNREADY, ProcessState.COMPLETED})
"""States in which those that depend on a process may start."""
OVER = frozenset({ProcessState.FAILED, ProcessState.COMPLETED, ProcessState.STOPPED})
"""States in which nothing runs and nothing will."""
RUNNING = frozenset({*_ALIVE, ProcessState.STOPPING})
"""States with a process."""


class ProcessReport(BaseModel):
    """One process."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Its name."""
    service: str
    """What it is."""
    state: ProcessState
    """Where it is in its life."""
    since: AwareDatetime
    """When it came into this state."""
    detail: str = ""
    """Why, for people."""
    pid: int | None = None
    """Process id while it runs."""
    create_time: float | None = None
    """The kernel's creation time of that pid, in seconds since 1970."""
    starts: int = 0
    """How often it was started."""
    kill_at: AwareDatetime | None = None
    """When it is killed if it still runs then; null while nobody wants it to end."""
    was_killed: bool = False
    """Whether it was told to stop, and had to be killed. `detail` says what that means."""
    last_exit: str = ""
    """How it last ended, for people; empty when it never did."""
    log_file: Path
    """Its output."""
    metrics_url: str | None = None
    """Where Prometheus reads."""
    addresses: dict[str, str] = {}
    """What people may want to call: name to URL."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """The process itself, while it runs."""
        if self.pid is None or self.create_time is None:
            return None
        return ProcessIdentity(self.pid, self.create_time)


class SupervisorReport(BaseModel):
    """All processes of one supervisor."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    config_file: Path
    """The TOML file that it runs."""
    supervisor_pid: int
    """Its process id."""
    started_at: AwareDatetime
    """When it started."""
    processes: list[ProcessReport]
    """In the order of the file."""


Progress = Callable[[SupervisorReport], None]
"""Called again and again with the newest report while somebody waits."""


def no_progress(_: SupervisorReport) -> None:
    """Nobody watches."""


def write_report(directory: Path, report: SupervisorReport) -> None:
    """Replaces the report: a reader sees the old one or the new one."""
    replace_file(directory / REPORT_NAME, report.model_dump_json(indent=2).encode())


def read_report(directory: Path) -> SupervisorReport | None:
    """The last report of a supervisor, which may have ended since; None when there was none."""
    file = directory / REPORT_NAME
    try:
        return SupervisorReport.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise SupervisorError(f"{file}: not a supervisor's report: {error}") from error


def running_supervisor(directory: Path) -> ProcessIdentity | None:
    """The supervisor that uses this directory now, or None."""
    return read_pid_file(directory / PID_NAME)
