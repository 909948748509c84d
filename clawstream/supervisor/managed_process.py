"""One supervised process: its state, its runs, and how it is started and stopped."""

import contextlib
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from datetime import timedelta
from pathlib import Path

from clawstream.clock import Clock
from clawstream.errors import SupervisorError
from clawstream.log import Logger
from clawstream.process_identity import ProcessIdentity
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS
from clawstream.supervisor.launch import Launch
from clawstream.supervisor.log_files import LogFollower, tail
from clawstream.supervisor.memory_kills import kill_hint, memory_kills
from clawstream.supervisor.readiness import ReadinessProbe
from clawstream.supervisor.report import OVER, RUNNING, TRANSITIONS, ProcessReport, ProcessState
from clawstream.supervisor.restarts import RestartHistory
from clawstream.supervisor.settings import ProcessSpecification, RestartSettings
from clawstream.supervisor.stopping_words import kill_consequence, overdue_words, stopping_words

_STARTING_PROBE_SECONDS = 0.2
_READY_PROBE_SECONDS = 5.0
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Return codes after a SIGKILL: of the process itself, or of what a shell had started."""


class ManagedProcess:
    """Not thread-safe: everything but the readiness probe runs on the supervisor's thread."""

    def __init__(
        self,
        specification: ProcessSpecification,
        plan: Callable[[], Launch],
        *,
        depends_on: frozenset[str],
        log_file: Path,
        restart: RestartSettings,
        clock: Clock,
        logger: Logger,
        wake: Callable[[], None],
    ) -> None:
        """`plan` is called before every start, because a port that was free may be taken since.

        `wake` is called, from any thread, when there is something to `observe` before `next_due_seconds`.
        """
        self.specification = specification
        self.depends_on = depends_on
        self.log_file = log_file
        self.state = ProcessState.WAITING
        self._plan = plan
        self._clock = clock
        self._logger = logger.bind(name=specification.name)
        self._wake = wake
        self._history = RestartHistory(restart)
        self._since = clock.now()
        self._detail = ""
        self._starts = 0
        self._memory_kills: int | None = None
        self._last_exit = ""
        self._why_killed = ""
        self._launch: Launch | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._identity: ProcessIdentity | None = None
        self._probe: ReadinessProbe | None = None
        self._answer: Future[bool] | None = None
        self._started_seconds = 0.0
        self._deadline_seconds = 0.0
        self._next_probe_seconds = 0.0

    @property
    def name(self) -> str:
        """Its name."""
        return self.specification.name

    def is_running(self) -> bool:
        """Whether there is a process."""
        return self.state in RUNNING

    def is_over(self) -> bool:
        """Whether nothing runs and nothing will."""
        return self.state in OVER

    def is_due(self) -> bool:
        """Whether it waits for a start and its delay is over."""
        if self.state is ProcessState.WAITING:
            return True
        return self.state is ProcessState.BACKING_OFF and self._clock.monotonic_seconds() >= self._deadline_seconds

    def next_due_seconds(self) -> float:
        """When, on the monotonic clock, there is something to do although nothing happened; infinity for never."""
        if self.state in (ProcessState.BACKING_OFF, ProcessState.STOPPING):
            return self._deadline_seconds
        if self._child is None or self.specification.is_one_shot or self._answer is not None:
            return math.inf
        return self._next_probe_seconds

    def describe_wait(self, missing: list[str]) -> None:
        """Says what it waits for."""
        self._detail = f"for {', '.join(missing)}" if missing else ""

    def start(self) -> None:
        """Starts the program with its output in the log file. A program that cannot be started is a failed run."""
        launch = self._plan()
        self._launch = launch
        self._starts += 1
        self._memory_kills = memory_kills()
        self._started_seconds = self._clock.monotonic_seconds()
        self._deadline_seconds = self._started_seconds + self.specification.ready_timeout_seconds
        self._next_probe_seconds = self._started_seconds
        self._move(ProcessState.STARTING)
        if launch.ready_file is not None:
            launch.ready_file.unlink(missing_ok=True)
        position = self.log_file.stat().st_size if self.log_file.exists() else 0
        try:
            with self.log_file.open("ab") as output:
                self._child = subprocess.Popen(
                    launch.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=launch.environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._after_exit(f"could not be started: {error}", may_restart=False)
            return
        # Not yet reaped, so the pid is still this child's even if it ended at once.
        self._identity = ProcessIdentity.of(self._child.pid)
        waits = threading.Thread(target=_wake_at_exit, args=(self._child.pid, self._wake), daemon=True)
        waits.start()
        self._probe = ReadinessProbe(launch, LogFollower(self.log_file, position_bytes=position))
        self._logger.info("started", pid=self._child.pid, starts=self._starts)

    def observe(self, executor: Executor) -> None:
        """Notices an exit, collects the last probe's answer and begins the next one."""
        child = self._child
        if child is None:
            return
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            # The group is ended before the leader is reaped, while its id cannot belong to anyone else.
            self.kill()
            self._reap(child.wait())
            return
        if self.state is ProcessState.STOPPING or self.specification.is_one_shot:
            return
        if self._answer is not None and self._answer.done():
            self._take_answer(self._answer.result())
            self._answer = None
        if self._answer is None and self._clock.monotonic_seconds() >= self._next_probe_seconds and self._probe:
            self._answer = executor.submit(self._probe.is_ready)
            self._answer.add_done_callback(lambda _: self._wake())

    def request_stop(self) -> None:
        """SIGTERM to a running process; one that only waits is stopped at once."""
        if self.state in (ProcessState.WAITING, ProcessState.BACKING_OFF):
            self._move(ProcessState.STOPPED)
        elif self.is_running() and self.state is not ProcessState.STOPPING and self._identity is not None:
            seconds = self.specification.stop_timeout_seconds
            self._move(ProcessState.STOPPING, stopping_words(seconds))
            self._deadline_seconds = self._clock.monotonic_seconds() + seconds
            self._logger.info("stopping", seconds=seconds)
            self._identity.signal(signal.SIGTERM)

    def kill_if_overdue(self) -> None:
        """SIGKILL when it did not stop in time."""
        if self.state is ProcessState.STOPPING and self._clock.monotonic_seconds() >= self._deadline_seconds:
            seconds = self.specification.stop_timeout_seconds
            self._logger.warning("did not stop in time, killing", seconds=seconds)
            self._kill_stopping(overdue_words(seconds))

    def kill_at_once(self) -> None:
        """SIGKILL to one that is stopping, for whoever does not want to wait."""
        if self.state is ProcessState.STOPPING and not self._why_killed:
            self._kill_stopping("was killed at once, as asked")

    def _kill_stopping(self, why: str) -> None:
        self._why_killed = why
        self._deadline_seconds = math.inf
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the process and its group."""
        if self._child is not None:
            # An empty group is gone; a group of zombies may not be signalled on some systems.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def report(self) -> ProcessReport:
        """What is known about it now."""
        launch = self._launch
        running = self._identity if self.is_running() else None
        return ProcessReport(
            name=self.name,
            service=self.specification.service.value,
            state=self.state,
            since=self._since,
            detail=self._detail,
            pid=running.pid if running else None,
            create_time=running.create_time if running else None,
            starts=self._starts,
            kill_at=self._since + timedelta(seconds=self.specification.stop_timeout_seconds)
            if self.state is ProcessState.STOPPING
            else None,
            was_killed=bool(self._why_killed) and self.state is ProcessState.STOPPED,
            last_exit=self._last_exit,
            log_file=self.log_file,
            metrics_url=launch.metrics_url if launch else None,
            addresses=launch.addresses if launch else {},
        )

    def fail(self, reason: str) -> None:
        """Gives it up before it ever ran, for example because what it needs has failed."""
        self._move(ProcessState.FAILED, reason)

    def _move(self, state: ProcessState, detail: str = "") -> None:
        if state not in TRANSITIONS[self.state]:
            raise SupervisorError(f"{self.name}: {self.state} cannot become {state}")
        self.state = state
        self._since = self._clock.now()
        self._detail = detail

    def _take_answer(self, is_ready: bool) -> None:
        now = self._clock.monotonic_seconds()
        self._next_probe_seconds = now + (_READY_PROBE_SECONDS if is_ready else _STARTING_PROBE_SECONDS)
        if is_ready and self.state in (ProcessState.STARTING, ProcessState.UNREADY):
            self._move(ProcessState.READY)
            self._logger.info("ready", seconds=round(now - self._started_seconds, 1))
        elif not is_ready and self.state is ProcessState.READY:
            self._move(ProcessState.UNREADY, "it says that it is not ready any more")
            self._logger.warning("not ready any more")
        elif not is_ready and self.state is ProcessState.STARTING and now >= self._deadline_seconds:
            seconds = self.specification.ready_timeout_seconds
            self._detail = f"not ready after {seconds:.0f} seconds; see {self.log_file}"

    def _reap(self, return_code: int) -> None:
        self._child = None
        self._answer = None
        if return_code >= 0:
            how = f"ended with exit code {return_code}"
        else:
            how = f"was ended by signal {-return_code} ({signal.Signals(-return_code).name})"
        if return_code in _KILLED and self.state is not ProcessState.STOPPING:
            how += f" ({kill_hint(self._memory_kills, memory_kills())})"
        self._last_exit = f"{how} at {self._clock.now():%Y-%m-%d %H:%M:%S} UTC"
        if return_code not in _KILLED:
            self._why_killed = ""  # It ended by itself just then.
        if self.state is ProcessState.STOPPING:
            told = f"{self._why_killed}: {kill_consequence(self.specification.service)}" if self._why_killed else ""
            self._move(ProcessState.STOPPED, told)
        elif return_code == 0 and (self.specification.is_one_shot or not self.specification.restart):
            self._move(ProcessState.COMPLETED)
            self._logger.info("completed")
        else:
            self._after_exit(how, may_restart=return_code != EXIT_CODE_WRONG_SETTINGS)

    def _after_exit(self, how: str, *, may_restart: bool) -> None:
        now = self._clock.monotonic_seconds()
        delay_seconds = self._history.delay_after_exit(now - self._started_seconds)
        last_line = next((line.strip() for line in reversed(tail(self.log_file, 20)) if line.strip()), "no output")
        if not may_restart or not self.specification.restart:
            self._move(ProcessState.FAILED, f"{how}: {last_line}")
        elif delay_seconds is None:
            self._move(ProcessState.FAILED, f"crash-looping, {self._history.failures} times; it {how}: {last_line}")
        else:
            self._deadline_seconds = now + delay_seconds
            self._move(ProcessState.BACKING_OFF, f"{how}; next start in {delay_seconds:.1f} seconds")
        self._logger.error(how, state=self.state.value, failures=self._history.failures, last_line=last_line)


def _wake_at_exit(pid: int, wake: Callable[[], None]) -> None:
    """A thread that sleeps until the child ends, and leaves it to be reaped."""
    with contextlib.suppress(ChildProcessError):  # It was reaped before we looked.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wake()
