"""Pid files: a reused pid is never taken for ours."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream.errors import SupervisorError
from clawstream.process_identity import ProcessIdentity, read_pid_file, write_pid_file


def test_a_process_with_the_same_pid_but_another_birth_is_not_ours(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        identity = ProcessIdentity.of(stranger.pid)
        earlier = ProcessIdentity(stranger.pid, identity.create_time - 100.0)
        write_pid_file(tmp_path / "pid", earlier)
        assert read_pid_file(tmp_path / "pid") is None
        earlier.signal(signal.SIGKILL)
        earlier.terminate(0.1)
        assert identity.is_alive(), "a stranger was killed"
        write_pid_file(tmp_path / "pid", identity)
        assert read_pid_file(tmp_path / "pid") == identity
        stranger.communicate(b"\n")
    assert not identity.is_alive()
    assert read_pid_file(tmp_path / "pid") is None


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not ProcessIdentity.of(child.pid).is_alive()
    child.wait()


def test_terminate_kills_what_ignores_the_first_signal() -> None:
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        ProcessIdentity.of(stubborn.pid).terminate(0.2)
        assert stubborn.wait() == -signal.SIGKILL


def test_a_foreign_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text("hello")
    with pytest.raises(SupervisorError, match="not a pid file of ours"):
        read_pid_file(tmp_path / "pid")
