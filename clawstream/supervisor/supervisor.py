"""The supervisor's loop: start what can start, watch what runs, stop in the opposite order.

It is one thread, which sleeps until something happens (a process ends, a probe answers, somebody wants a stop) or is
due. Only what waits for others runs elsewhere: readiness probes, and a thread for each process that waits for its end.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from clawstream.clock import Clock
from clawstream.errors import SupervisorError
from clawstream.log import Logger
from clawstream.process_identity import free_port, is_port_free
from clawstream.settings import read_settings_file
from clawstream.supervisor.launch import Launch, plan_launch
from clawstream.supervisor.leftovers import end_leftovers
from clawstream.supervisor.lock import SupervisorLock
from clawstream.supervisor.log_files import rotate
from clawstream.supervisor.managed_process import ManagedProcess
from clawstream.supervisor.report import (
    SATISFIED,
    ProcessState,
    SupervisorReport,
    write_report,
)
from clawstream.supervisor.settings import ProcessSpecification, SystemSettings, dependencies

_SHORTEST_SLEEP_SECONDS = 0.02
"""Something may be due that has to wait for others: it must not keep a processor busy."""
_ROTATION_SECONDS = 2.0
_REFUSED_SECONDS = 2.0
"""How long after a refusal the report is tried again."""


class Supervisor:
    """Runs the processes of one file until it is told to stop or all of them are over."""

    def __init__(
        self,
        settings: SystemSettings,
        *,
        config_file: Path,
        environment: Mapping[str, str],
        clock: Clock,
        logger: Logger,
    ) -> None:
        """Takes the lock and ends what a killed predecessor left running. Raises SupervisorError."""
        if not settings.processes:
            raise SupervisorError(f"{config_file}: there is no [[processes]] entry, so there is nothing to run")
        self._settings = settings
        self._config_file = config_file.resolve()
        self._environment = dict(environment)
        self._clock = clock
        self._logger = logger
        self._document: Mapping[str, Any] = read_settings_file(config_file)
        self._lock = SupervisorLock(settings.supervisor_directory)
        settings.log_directory.mkdir(parents=True, exist_ok=True)
        # Two processes of a name must never run.
        left = end_leftovers(settings.supervisor_directory, clock)
        if left:
            logger.warning("ended the processes of a supervisor that was killed", names=left)
        self._started_at = clock.now()
        self._stop = threading.Event()
        self._stop_at_once = threading.Event()
        self._wake = SimpleQueue[None]()
        """Something happened. A queue of this kind, because a signal handler may fill it while its thread waits."""
        self._written: SupervisorReport | None = None
        self._ports: dict[str, int] = {}
        self._next_rotation_seconds = 0.0
        self._next_report_seconds = 0.0
        self._executor = ThreadPoolExecutor(max_workers=len(settings.processes), thread_name_prefix="probe")
        self._processes = {process.name: self._managed(process) for process in settings.processes}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> bool:
        """Until stopped or all over. Returns whether no process failed."""
        while True:
            before = self._states()
            self._tick()
            if all(process.is_over() for process in self._processes.values()):
                break
            if self._states() == before:  # Else others may be waiting for just that.
                self._sleep()
        self._publish()
        return all(process.state is not ProcessState.FAILED for process in self._processes.values())

    def request_stop(self) -> None:
        """The first time: gracefully, dependents first. The second time: at once. Safe in a signal handler."""
        if self._stop.is_set():
            self._stop_at_once.set()
        self._stop.set()
        self._woken()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT ask for a stop. A closed terminal (SIGHUP) changes nothing."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: self.request_stop())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def close(self) -> None:
        """Ends whatever still runs and gives the lock back."""
        for process in self._processes.values():
            process.kill()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._lock.release()

    def _tick(self) -> None:
        for process in self._processes.values():
            process.observe(self._executor)
        if self._stop.is_set():
            self._advance_stop()
        else:
            self._start_what_can()
        self._rotate_logs()
        self._publish()

    def _states(self) -> list[ProcessState]:
        return [process.state for process in self._processes.values()]

    def _woken(self) -> None:
        self._wake.put(None)

    def _sleep(self) -> None:
        """Until something happened or is due."""
        due = min(process.next_due_seconds() for process in self._processes.values())
        seconds = min(due, self._next_rotation_seconds) - self._clock.monotonic_seconds()
        with contextlib.suppress(Empty):
            self._wake.get(timeout=max(_SHORTEST_SLEEP_SECONDS, seconds))
            while True:  # What happened before the next look is seen by it.
                self._wake.get_nowait()

    def _start_what_can(self) -> None:
        for process in self._processes.values():
            if not process.is_due():
                continue
            needed = [self._processes[name] for name in sorted(process.depends_on)]
            failed = [other.name for other in needed if other.state is ProcessState.FAILED]
            missing = [other.name for other in needed if other.state not in SATISFIED]
            if process.state is ProcessState.WAITING and failed:
                process.fail(f"needs {', '.join(failed)}, which failed")
            elif process.state is ProcessState.WAITING and missing:
                process.describe_wait(missing)
            else:
                process.start()

    def _advance_stop(self) -> None:
        for process in self._processes.values():
            dependents = [other for other in self._processes.values() if process.name in other.depends_on]
            if self._stop_at_once.is_set():
                process.request_stop()
                process.kill_at_once()
            elif not any(other.is_running() for other in dependents):
                process.request_stop()
                process.kill_if_overdue()

    def _managed(self, specification: ProcessSpecification) -> ManagedProcess:
        def plan() -> Launch:
            return plan_launch(
                specification,
                self._settings,
                self._document,
                config_file=self._config_file,
                python=sys.executable,
                environment=self._environment,
                operations_port=self._operations_port(specification.name),
            )

        return ManagedProcess(
            specification,
            plan,
            depends_on=dependencies(specification, self._settings.processes),
            log_file=self._settings.log_directory / f"{specification.name}.log",
            restart=self._settings.restart,
            clock=self._clock,
            logger=self._logger,
            wake=self._woken,
        )

    def _operations_port(self, name: str) -> int:
        """The same port over restarts, as long as nobody else took it."""
        port = self._ports.get(name)
        if port is None or not is_port_free(port):
            port = free_port()
        self._ports[name] = port
        return port

    def _rotate_logs(self) -> None:
        now = self._clock.monotonic_seconds()
        if now < self._next_rotation_seconds:
            return
        self._next_rotation_seconds = now + _ROTATION_SECONDS
        for file in self._settings.log_directory.glob("*.log"):
            try:
                rotate(file)
            except OSError as error:
                self._disk_refused(error)

    def _publish(self) -> None:
        report = SupervisorReport(
            config_file=self._config_file,
            supervisor_pid=os.getpid(),
            started_at=self._started_at,
            processes=[process.report() for process in self._processes.values()],
        )
        if report == self._written or self._clock.monotonic_seconds() < self._next_report_seconds:
            return
        try:
            write_report(self._settings.supervisor_directory, report)
        except OSError as error:
            self._next_report_seconds = self._clock.monotonic_seconds() + _REFUSED_SECONDS
            self._disk_refused(error)
        else:
            self._written = report

    def _disk_refused(self, error: OSError) -> None:
        """A full disk must not end the supervisor, whose end is the end of all: what it writes can wait."""
        self._logger.error("the disk refuses what the supervisor writes; trying again", error=str(error))
