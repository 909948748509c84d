"""A supervisor of processes that just run has nothing to do, and yet sees at once what happens to them."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from clawstream.clock import SystemClock
from clawstream.log import get_logger
from clawstream.supervisor import managed_process, supervisor
from clawstream.supervisor.launch import Launch
from clawstream.supervisor.log_files import LogFollower
from clawstream.supervisor.readiness import ReadinessProbe
from clawstream.supervisor.report import ProcessReport, ProcessState, read_report
from clawstream.supervisor.settings import load_system_settings
from clawstream.supervisor.supervisor import Supervisor
from tests.fixtures.system import wait_for

NEVER_SECONDS = 1e6


class Running:
    """A supervisor of two processes, the second of which needs the first, on a thread of its own."""

    def __init__(self, directory: Path) -> None:
        command = f'command = ["{sys.executable}", "-c", "import signal; signal.pause()"]'
        file = directory / "clawstream.toml"
        file.write_text(
            'data_directory = "data"\n[restart]\nfirst_delay_seconds = 0.0\n'
            f'[[processes]]\nname = "first"\nservice = "command"\n{command}\n'
            f'[[processes]]\nname = "second"\nservice = "command"\n{command}\ndepends_on = ["first"]\n'
        )
        settings = load_system_settings(file, os.environ)
        self.directory = settings.supervisor_directory
        self.supervisor = Supervisor(
            settings, config_file=file, environment=os.environ, clock=SystemClock(), logger=get_logger()
        )
        self.thread = threading.Thread(target=self.supervisor.run)
        self.thread.start()

    def process(self, name: str) -> ProcessReport:
        report = read_report(self.directory)
        assert report is not None
        return next(process for process in report.processes if process.name == name)

    def is_ready(self) -> bool:
        report = read_report(self.directory)
        return report is not None and all(each.state is ProcessState.READY for each in report.processes)

    def close(self) -> None:
        self.supervisor.request_stop()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.supervisor.close()


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever due: whatever is seen was told."""
    monkeypatch.setattr(supervisor, "_ROTATION_SECONDS", NEVER_SECONDS)
    monkeypatch.setattr(managed_process, "_READY_PROBE_SECONDS", NEVER_SECONDS)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.close()


@pytest.mark.usefixtures("asleep")
def test_ends_and_stops_are_seen_without_looking(running: Running) -> None:
    wait_for(running.is_ready, "both are ready")
    identity = running.process("first").identity
    assert identity is not None
    identity.signal(signal.SIGKILL)
    wait_for(lambda: running.process("first").starts == 2 and running.is_ready(), "it runs again")
    running.close()
    assert [running.process(name).state for name in ("first", "second")] == [ProcessState.STOPPED] * 2


def test_it_wakes_only_for_what_is_due(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(running.is_ready, "both are ready")
    rotations, wakes = 0, 0
    enough = threading.Event()

    def rotate(_: Path) -> bool:
        nonlocal rotations
        rotations += 1
        if rotations == 4:  # Of two files each.
            enough.set()
        return False

    tick = running.supervisor._tick  # pyright: ignore[reportPrivateUsage] - what costs is how often it looks

    def counted() -> None:
        nonlocal wakes
        wakes += 1
        tick()

    monkeypatch.setattr(supervisor, "rotate", rotate)
    monkeypatch.setattr(running.supervisor, "_tick", counted)
    assert enough.wait(60)
    assert wakes <= 2 + 2 * 3, "two rotations, and for each process a probe, its answer and a rounding of the clock"


def test_a_probe_makes_its_client_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = 0
    client = httpx.Client

    def counted(**options: object) -> httpx.Client:
        nonlocal made
        made += 1
        return client(**options)  # pyright: ignore[reportArgumentType] - passed on as they come

    monkeypatch.setattr(httpx, "Client", counted)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    launch = Launch(command=[], environment={}, ready_url=f"http://127.0.0.1:{server.server_port}/readyz")
    probe = ReadinessProbe(launch, LogFollower(tmp_path / "log", position_bytes=0))
    assert [probe.is_ready() for _ in range(3)] == [True] * 3
    server.shutdown()
    server.server_close()
    assert not probe.is_ready(), "no connection is kept"
    assert made == 1
