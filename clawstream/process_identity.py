"""Which process is ours: pid files that survive a reused pid, and who holds a port.

A pid alone is not an identity: the kernel hands it out again. A pid file therefore also holds the process's creation
time, and a process that does not match it is never signalled.
"""

import random
import signal
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import psutil

from clawstream.errors import SupervisorError

_CREATION_TOLERANCE_SECONDS = 1.0
"""psutil derives the creation time from the boot time, which moves a little when the clock is set."""
_POLL_SECONDS = 0.02
_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: first and last port that it gives to who asks for any."""
_FIRST_PORT = 10_000
"""Below it well-known services are more likely."""
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process on this machine, told apart from a later one with the same pid."""

    pid: int
    """Process id."""
    create_time: float
    """When the kernel created it, in seconds since 1970."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The identity of a running process. Raises SupervisorError when there is none."""
        try:
            return cls(pid=pid, create_time=psutil.Process(pid).create_time())
        except psutil.NoSuchProcess as error:
            raise SupervisorError(f"process {pid} ended before it could be identified") from error

    def is_alive(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.create_time) > _CREATION_TOLERANCE_SECONDS:
                return False
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal if this very process still runs, else does nothing."""
        if not self.is_alive():
            return
        try:
            psutil.Process(self.pid).send_signal(number)
        except psutil.NoSuchProcess:
            return

    def wait(self, timeout_seconds: float) -> bool:
        """Whether the process ended within the time."""
        deadline = time.monotonic() + timeout_seconds
        while self.is_alive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def terminate(self, grace_seconds: float) -> bool:
        """SIGTERM, then SIGKILL when it still runs after `grace_seconds`. Whether that was needed.

        Raises SupervisorError when it fails.
        """
        self.signal(signal.SIGTERM)
        if self.wait(grace_seconds):
            return False
        self.signal(signal.SIGKILL)
        if not self.wait(10.0):
            raise SupervisorError(f"process {self.pid} did not end after SIGKILL; it hangs in the kernel")
        return True


def write_pid_file(file: Path, identity: ProcessIdentity) -> None:
    """Writes the identity whole or not at all."""
    temporary = file.with_suffix(file.suffix + ".new")
    temporary.write_bytes(orjson.dumps(asdict(identity)))
    temporary.replace(file)


def read_pid_file(file: Path) -> ProcessIdentity | None:
    """The process that a pid file names if it still runs; None without a file, or when its process is gone."""
    try:
        content = orjson.loads(file.read_bytes())
        identity = ProcessIdentity(pid=int(content["pid"]), create_time=float(content["create_time"]))
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise SupervisorError(f"{file}: not a pid file of ours ({error}); remove it if no process uses it") from error
    return identity if identity.is_alive() else None


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on now. Another server may take it before its user does."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of `host`, all different, that nobody listens on now.

    None that the system gives to whoever connects to somewhere: such a one is taken again within seconds on a busy
    machine. Where the system doesn't say which those are, any that it has to give.
    """
    choice, ports = random.SystemRandom(), list[int]()
    kept = _ports_never_given()
    for _ in range(_MAX_DRAWS):
        if len(ports) == count:
            break
        port = choice.choice(kept) if kept else _given_port(host)
        if port not in ports and is_port_free(port, host):
            ports.append(port)
    if len(ports) < count:
        raise SupervisorError(f"{host}: only {len(ports)} of {count} ports were free in {_MAX_DRAWS} tries")
    return ports


def _ports_never_given() -> range:
    try:
        first = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return range(0)
    return range(_FIRST_PORT, first)


def _given_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def describe_port_owner(port: int) -> str:
    """Who listens on a TCP port, for people: `pid 123 (java)`, or `an unknown process` where the system won't say."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "an unknown process (not permitted to look)"
    for connection in connections:
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port and connection.pid:
            try:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()})"
            except psutil.NoSuchProcess:
                break
    return "an unknown process"
