"""`clawstream status` of a system that is down: told first, in plain words, and without asking its broker."""

from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from clawstream.cli import app
from clawstream.supervisor.report import ProcessReport, ProcessState, SupervisorReport, write_report

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The file of a system that `clawstream down` has ended. Nobody listens where its broker was."""
    file = tmp_path / "clawstream.toml"
    file.write_text('data_directory = "data"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n')
    processes = [
        ProcessReport(
            name=name, service=name, state=ProcessState.STOPPED, since=NOW, log_file=tmp_path / name, detail=detail
        )
        for name, detail in (("broker", ""), ("trainer", "did not end within 30 seconds, and was killed"))
    ]
    directory = tmp_path / "data" / "supervisor"
    directory.mkdir(parents=True)
    report = SupervisorReport(config_file=file, supervisor_pid=1, started_at=NOW, processes=processes)
    write_report(directory, report)
    return file


def test_it_says_so_first_and_how_to_start(stopped: Path) -> None:
    result = CliRunner().invoke(app, ["status", "--config", str(stopped)])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[0] == (
        "The system is down: all its processes have ended, the last one at 2026-01-01 00:00:00 UTC. Start it with "
        f"`clawstream up --config {stopped}`"
    )
    assert any("(stopped)" in line and "and was killed" in line for line in lines)
    assert lines[-1] == "Learning: no. Nothing runs."
    assert "cannot be read" not in result.output


def test_programs_are_told_too(stopped: Path) -> None:
    result = CliRunner().invoke(app, ["status", "--json", "--config", str(stopped)])
    assert result.exit_code == 1
    assert orjson.loads(result.stdout)["supervisor_pid"] is None
