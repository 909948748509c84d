"""Waiting for a supervisor that stops: who waits sees the last report, and tells nobody twice."""

import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream.clock import ManualClock
from clawstream.supervisor import control
from clawstream.supervisor.report import ProcessReport, ProcessState, SupervisorReport, write_report
from clawstream.supervisor.settings import SystemSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class ScriptedSupervisor:
    """Writes its last report and has ended when somebody looks."""

    pid = 7

    def __init__(self, directory: Path, before: ProcessState) -> None:
        self._directory = directory
        self.signals: list[signal.Signals] = []
        self._write(before)

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def wait(self, _: float) -> bool:
        self._write(ProcessState.STOPPED)
        return True

    def _write(self, state: ProcessState) -> None:
        process = ProcessReport(name="trainer", service="trainer", state=state, since=NOW, log_file=Path("x.log"))
        report = SupervisorReport(config_file=Path("c"), supervisor_pid=self.pid, started_at=NOW, processes=[process])
        write_report(self._directory, report)


@pytest.mark.parametrize("before", [ProcessState.READY, ProcessState.STOPPING])
def test_the_last_report_is_seen_and_one_that_stops_already_is_not_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: ProcessState
) -> None:
    settings = SystemSettings(data_directory=tmp_path)
    settings.supervisor_directory.mkdir()
    supervisor = ScriptedSupervisor(settings.supervisor_directory, before)
    monkeypatch.setattr(control, "running_supervisor", lambda _: supervisor)
    seen: list[ProcessState] = []
    assert control.stop(
        settings,
        ManualClock(),
        at_once=False,
        timeout_seconds=60.0,
        progress=lambda report: seen.append(report.processes[0].state),
    )
    assert seen == [ProcessState.STOPPED]
    assert supervisor.signals == ([signal.SIGTERM] if before is ProcessState.READY else [])
