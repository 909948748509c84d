"""Pid files: a reused pid is never taken for ours. Ports: a free one stays free."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawstream import process_identity
from clawstream.errors import SupervisorError
from clawstream.process_identity import ProcessIdentity, free_ports, is_port_free, read_pid_file, write_pid_file


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which ports it gives to connections")
def test_free_ports_are_none_that_a_connection_is_given() -> None:
    """Else one that connects to somewhere takes it before the server that it was found for."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert not [port for port in ports if first <= port <= last]
    assert all(is_port_free(port) for port in ports)


def test_where_the_system_says_nothing_any_port_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_identity, "_GIVEN_PORTS", tmp_path / "nothing")
    assert len(set(free_ports(5))) == 5


def test_a_host_that_is_not_ours_has_no_free_ports() -> None:
    with pytest.raises(SupervisorError, match=r"203\.0\.113\.1: only 0 of 1"):
        free_ports(1, "203.0.113.1")
