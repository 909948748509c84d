"""What whoever stops the system is told."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from clawstream.supervisor.report import ProcessReport, ProcessState, SupervisorReport
from clawstream.supervisor.settings import Service
from clawstream.supervisor.stopping_words import kill_consequence, still_ending

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def process(name: str, state: ProcessState, seconds: float | None = None) -> ProcessReport:
    kill_at = None if seconds is None else NOW + timedelta(seconds=seconds)
    return ProcessReport(name=name, service=name, state=state, since=NOW, log_file=Path("x.log"), kill_at=kill_at)


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([process("judge", ProcessState.STOPPED), process("engine", ProcessState.READY)], ""),
        (
            [process("trainer", ProcessState.STOPPING, 12.4), process("judge", ProcessState.STOPPING, 3.0)],
            "waiting for the end of trainer (at most 12 s more), judge (at most 3 s more)",
        ),
        ([process("trainer", ProcessState.STOPPING, -0.1)], "waiting for the end of trainer (being killed)"),
        ([process("trainer", ProcessState.STOPPING)], "waiting for the end of trainer"),
    ],
)
def test_who_is_waited_for_and_for_how_long(processes: list[ProcessReport], words: str) -> None:
    report = SupervisorReport(config_file=Path("c"), supervisor_pid=1, started_at=NOW, processes=processes)
    assert still_ending(report, NOW) == words


@pytest.mark.parametrize("service", list(Service))
def test_of_every_service_it_is_told_what_a_kill_means(service: Service) -> None:
    words = kill_consequence(service)
    assert ("lost" in words) == (service is not Service.COMMAND)
