"""The command line over a real broker: up, topics, status, doctor, down."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawstream.broker import LocalBroker
from clawstream.process_identity import free_port
from clawstream.supervisor.report import running_supervisor

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.kafka


class CommandLine:
    """A folder with a TOML file that runs a broker and makes topics."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        (directory / "clawstream.toml").write_text(
            f"""
            data_directory = "data"
            [kafka]
            bootstrap_servers = "127.0.0.1:{self.port}"
            [[processes]]
            name = "log"
            service = "broker"
            [[processes]]
            name = "topics"
            service = "topics"
            """
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "clawstream", *arguments]
        return subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=240, check=False
        )


@pytest.fixture
def clawstream(tmp_path: Path, local_broker: LocalBroker) -> Iterator[CommandLine]:
    """The shared broker is asked for so that a lack of Java is reported once."""
    instance = CommandLine(tmp_path)
    yield instance
    if running_supervisor(tmp_path / "data" / "supervisor") is not None:
        instance("down", "--now")


def test_up_status_doctor_down(clawstream: CommandLine) -> None:
    before = clawstream("status")
    assert before.returncode == 1
    assert "Learning: no. no system runs here, and none was started in this data_directory yet" in before.stdout
    assert f"127.0.0.1:{clawstream.port}: Connection refused" in clawstream("doctor").stdout

    up = clawstream("up")
    assert up.returncode == 0, up.stderr
    assert "topics           completed" in up.stderr
    status = clawstream("status")
    assert "Learning: no. no turn has been recorded yet" in status.stdout
    again = clawstream("topics", "apply")
    assert again.stdout.strip().startswith("0 created, 0 changed"), again.stdout + again.stderr
    assert f"127.0.0.1:{clawstream.port} answers" in clawstream("doctor").stdout

    down = clawstream("down")
    assert down.returncode == 0, down.stderr
    broker = LocalBroker(clawstream.directory / "data" / "kafka")
    assert broker.running() is None
    after = clawstream("status")
    assert after.returncode == 1
    assert after.stdout.startswith("The system is down: all its processes have ended")
    assert f"`clawstream up --config {(clawstream.directory / 'clawstream.toml').resolve()}`" in after.stdout
    assert "log cannot be read" not in after.stdout


def test_broker_commands(clawstream: CommandLine) -> None:
    assert clawstream("broker", "status").returncode == 1
    up = clawstream("broker", "up")
    assert f"is up at 127.0.0.1:{clawstream.port}" in up.stdout, up.stderr
    assert "was running already" in clawstream("broker", "up").stdout
    assert f"answers at 127.0.0.1:{clawstream.port}" in clawstream("broker", "status").stdout
    other = clawstream("broker", "up", "--data-directory", "other")
    assert other.returncode == 1
    assert f"port {clawstream.port} is taken by pid" in other.stderr
    assert "is down" in clawstream("broker", "down").stdout
    assert "was not running" in clawstream("broker", "down").stdout
