"""`clawstream up`, `down` and `logs` over real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clawstream.process_identity import ProcessIdentity
from clawstream.supervisor.report import ProcessReport, ProcessState, read_report, running_supervisor

ROOT = Path(__file__).parents[3]
STUB = ROOT / "tests" / "fixtures" / "stub_process.py"


class System:
    """A folder with a TOML file, and the command line on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "clawstream.toml"
        self.journal = directory / "journal"
        self.state_directory = directory / "data" / "supervisor"

    def write(self, *processes: str, restart: str = "first_delay_seconds = 0.05") -> None:
        entries = "\n".join(f"[[processes]]\n{process}" for process in processes)
        self.file.write_text(f'data_directory = "data"\n[restart]\n{restart}\n{entries}\n')

    def stub(self, name: str, *options: str, extra: str = "") -> str:
        command = [sys.executable, str(STUB), name, str(self.journal), *options]
        return f'name = "{name}"\nservice = "command"\ncommand = {command}\n{extra}'

    def clawstream(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "clawstream", arguments[0], "--config", str(self.file), *arguments[1:]]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result

    def process(self, name: str) -> ProcessReport:
        report = read_report(self.state_directory)
        assert report is not None
        return next(process for process in report.processes if process.name == name)

    def supervisor(self) -> ProcessIdentity:
        identity = running_supervisor(self.state_directory)
        assert identity is not None
        return identity

    def notes(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def events(self) -> list[str]:
        """The journal without pids."""
        return [" ".join(line.split()[:2]) for line in self.notes()]


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The condition's value as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
    return value


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    instance = System(tmp_path)
    yield instance
    if instance.file.exists() and running_supervisor(instance.state_directory) is not None:
        instance.clawstream("down", "--now")


def test_starts_in_order_detaches_and_stops_in_the_opposite_order(system: System) -> None:
    ready = 'ready = { log_pattern = "serves" }'
    system.write(
        system.stub("gateway", extra=f'depends_on = ["engine"]\n{ready}'),
        system.stub("engine", extra=f'depends_on = ["log"]\n{ready}'),
        system.stub("log", extra=ready),
    )
    system.clawstream("up")
    assert system.events() == ["log start", "engine start", "gateway start"]
    assert os.getsid(system.supervisor().pid) != os.getsid(0), "it would end with the terminal"
    shown = system.clawstream("logs", "engine").stdout
    assert shown == "engine | engine serves\n"
    system.clawstream("down")
    assert system.events()[3:] == ["gateway stop", "engine stop", "log stop"]
    assert running_supervisor(system.state_directory) is None
    assert "no supervisor runs" in system.clawstream("down").stdout


def test_a_killed_process_is_started_again(system: System) -> None:
    system.write(system.stub("judge"))
    system.clawstream("up")
    first = system.process("judge").identity
    assert first is not None
    first.signal(signal.SIGKILL)
    eventually(lambda: system.process("judge").starts == 2 and system.process("judge").state is ProcessState.READY)
    second = system.process("judge")
    assert second.identity is not None
    assert second.identity != first
    assert second.identity.is_alive()
    assert "(SIGKILL) (" in second.last_exit, "a hint at memory, for nobody here sent it"
    assert "memory" in second.last_exit
    eventually(lambda: system.events() == ["judge start", "judge start"])


def test_a_crash_loop_is_reported_and_ends(system: System) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    system.write(
        f'name = "engine"\nservice = "command"\ncommand = {command}\nready = {{ log_pattern = "never" }}',
        system.stub("gateway", extra='depends_on = ["engine"]'),
        restart="first_delay_seconds = 0.01\nlargest_failure_count = 3",
    )
    result = system.clawstream("up", check=False)
    assert result.returncode == 1
    assert "engine failed: crash-looping, 3 times; it ended with exit code 1: no such model" in result.stderr
    assert "gateway failed: needs engine, which failed" in result.stderr
    assert system.process("engine").starts == 3
    assert system.notes() == []


def test_wrong_settings_are_not_tried_again(system: System) -> None:
    command = [sys.executable, "-c", "import sys; sys.stderr.write('batch_size: too small'); sys.exit(2)"]
    system.write(f'name = "trainer"\nservice = "command"\ncommand = {command}\nready = {{ log_pattern = "never" }}')
    result = system.clawstream("up", check=False)
    assert "trainer failed: ended with exit code 2: batch_size: too small" in result.stderr
    assert system.process("trainer").starts == 1


def test_a_program_that_does_not_exist_is_named(system: System) -> None:
    system.write('name = "sglang"\nservice = "command"\ncommand = ["/no/such/program"]')
    result = system.clawstream("up", check=False)
    assert result.returncode == 1
    assert "sglang failed: could not be started" in result.stderr
    assert "/no/such/program" in result.stderr


def test_a_second_supervisor_is_refused_with_pid_and_path(system: System) -> None:
    system.write(system.stub("judge"))
    system.clawstream("up")
    for arguments in (("up",), ("up", "--foreground")):
        result = system.clawstream(*arguments, check=False)
        assert result.returncode == 1
        assert f"pid {system.supervisor().pid}" in result.stderr
        assert str(system.state_directory) in result.stderr
    assert len(system.notes()) == 1


def test_what_a_killed_supervisor_left_is_ended_first(system: System) -> None:
    system.write(system.stub("judge"))
    system.clawstream("up")
    orphan = system.process("judge").identity
    supervisor = system.supervisor()
    supervisor.signal(signal.SIGKILL)
    assert supervisor.wait(120)
    assert orphan is not None
    assert orphan.is_alive(), "processes outlive a killed supervisor"
    system.clawstream("up")
    assert not orphan.is_alive()
    assert system.events() == ["judge start", "judge stop", "judge start"]


def test_what_a_killed_supervisor_left_is_told_apart_and_ended(system: System) -> None:
    system.write(system.stub("judge"), system.stub("teacher"))
    system.clawstream("up")
    judge, teacher = (system.process(name).identity for name in ("judge", "teacher"))
    assert judge is not None
    assert teacher is not None
    supervisor = system.supervisor()
    supervisor.signal(signal.SIGKILL)
    assert supervisor.wait(30)
    teacher.signal(signal.SIGKILL)
    assert teacher.wait(30)
    status = system.clawstream("status", check=False)
    states = {tuple(line.split()[:2]) for line in status.stdout.splitlines()}
    assert {("judge", "orphan"), ("teacher", "gone")} <= states
    assert f"judge (pid {judge.pid}) still run" in status.stdout
    assert "all processes are down" in system.clawstream("down").stdout
    assert not judge.is_alive()
    assert "no supervisor runs" in system.clawstream("down").stdout


def test_wrong_settings_of_a_service_start_nothing(system: System) -> None:
    system.write(system.stub("log"), 'name = "trainer"\nservice = "trainer"\noverrides = { batch_size = 0 }')
    for arguments in (("up",), ("up", "--foreground")):
        result = system.clawstream(*arguments, check=False)
        assert result.returncode == 2
        assert "2 wrong value(s); nothing was started" in result.stderr
        assert "trainer.model: Field required (trainer)" in result.stderr
        assert "trainer.batch_size: " in result.stderr
    assert system.notes() == []
    assert not system.state_directory.exists()


def test_down_now_does_not_wait_for_the_stubborn(system: System) -> None:
    system.write(system.stub("trainer", "stubborn", extra="stop_timeout_seconds = 1000.0"))
    system.clawstream("up")
    identity = system.process("trainer").identity
    eventually(lambda: system.notes())
    down = system.clawstream("down", "--now")
    assert identity is not None
    assert not identity.is_alive()
    assert "was killed at once, as asked" in down.stderr


def test_the_stubborn_is_killed_after_its_time(system: System) -> None:
    system.write(system.stub("trainer", "stubborn", extra="stop_timeout_seconds = 0.2"))
    system.clawstream("up")
    eventually(lambda: system.notes())
    down = system.clawstream("down")
    assert system.events() == ["trainer start", "trainer stop"]
    assert "SIGKILL" in system.process("trainer").last_exit
    assert "told to end; killed if it still runs after 0.2 seconds" in down.stderr
    assert "did not end within 0.2 seconds, and was killed: what that means" in down.stderr
    assert "trainer had to be killed" in down.stdout
    status = system.clawstream("status", check=False)
    assert status.stdout.startswith("The system is down: all its processes have ended")
    assert "and was killed: what that means" in status.stdout


def test_who_is_told_twice_to_stop_still_waits(system: System) -> None:
    """The second `down` waits for what the first one began: nothing is killed because somebody lost patience."""
    system.write(system.stub("trainer", "slow", extra="stop_timeout_seconds = 1000.0"))
    system.clawstream("up")
    eventually(lambda: system.notes())
    assert "still runs after 0 seconds, with trainer" in system.clawstream("down", "--timeout", "0", check=False).stderr
    eventually(lambda: "trainer stop" in system.events())
    assert system.clawstream("down", "--timeout", "0", check=False).returncode == 1
    identity = system.process("trainer").identity
    assert identity is not None
    identity.signal(signal.SIGUSR1)
    assert "killed" not in system.clawstream("down").stdout
    assert system.events() == ["trainer start", "trainer stop", "trainer end"]


def test_children_end_with_the_process_that_started_them(system: System) -> None:
    system.write(system.stub("engine", "child"))
    system.clawstream("up")
    eventually(lambda: len(system.notes()) == 2)
    child = ProcessIdentity.of(int(system.notes()[0].split()[2]))
    leader = system.process("engine").identity
    assert leader is not None
    leader.signal(signal.SIGKILL)
    assert child.wait(120), "a child of a crashed process was left running"


def test_readiness_by_file_ignores_that_of_an_earlier_run(system: System) -> None:
    marker = system.directory / "ready"
    marker.touch()
    command = [sys.executable, "-c", f"open({str(marker)!r}, 'x'); import signal; signal.pause()"]
    system.write(f'name = "other"\nservice = "command"\ncommand = {command}\nready = {{ file = "ready" }}')
    system.clawstream("up")
    assert system.process("other").state is ProcessState.READY
    assert marker.exists()
