"""One Apache Kafka node on this machine: started, stopped, killed and restarted over the same durable data.

The folder that a broker is given holds everything about it:

    data/               Kafka's log directory
    broker.json         ports, so that a restart keeps its address
    broker.pid          the process, with its creation time
    broker.log          Kafka's own log (three files of 10 MB)
    console.log         what the Java process itself printed
"""

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import orjson
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from clawstream.broker.installation import deploy_directory, find_java, resolve_kafka_jars
from clawstream.broker.properties import cluster_id_from, render_server_properties
from clawstream.errors import BrokerUnavailable, SupervisorError
from clawstream.ids import IdSource
from clawstream.parent_death import ending_with_parent
from clawstream.process_identity import (
    ProcessIdentity,
    describe_port_owner,
    free_port,
    is_port_free,
    read_pid_file,
    write_pid_file,
)

_START_TIMEOUT_SECONDS = 120.0
"""A small machine under load needs 20; replay of a long log needs more."""
_STOP_GRACE_SECONDS = 30.0
_PROBE_SECONDS = 1.0
_TAIL_LINES = 60
_HEAP_OPTIONS = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC")


class LocalBroker:
    """A broker in a folder. Any process may start it and any other may stop it: the pid file is the only state."""

    def __init__(
        self,
        data_directory: Path,
        port: int | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        ends_with_parent: bool = False,
        advertised_port: int | None = None,
        new_id: IdSource = uuid.uuid4,
    ) -> None:
        """`port`: None keeps the port of the last start, or picks a free one the first time.

        `ends_with_parent`: see `ending_with_parent`. For tests, so that a killed test run leaves no broker behind.
        `advertised_port` is what clients are told when something stands between them and the broker. `new_id` gives the
        cluster's identity when the data directory is formatted.
        """
        self._directory = data_directory.resolve()
        self._requested_port = port
        self._environment = dict(os.environ if environment is None else environment)
        self._ends_with_parent = ends_with_parent
        self._child: subprocess.Popen[bytes] | None = None
        self._advertised_port = advertised_port
        self._new_id = new_id

    @property
    def directory(self) -> Path:
        """The folder that holds everything about this broker."""
        return self._directory

    @property
    def port(self) -> int:
        """The port of the last start. Raises SupervisorError before the first one."""
        ports = self._recorded_ports()
        if ports is None:
            raise SupervisorError(f"{self._directory}: no broker was ever started here")
        return ports[0]

    @property
    def bootstrap_servers(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.port}"

    def running(self) -> ProcessIdentity | None:
        """The broker's process, or None when it does not run."""
        if self._child is not None:
            self._child.poll()  # Reaps an ended child: a zombie would look alive to others.
        return read_pid_file(self._directory / "broker.pid")

    def start(self) -> str:
        """Starts the broker and returns its bootstrap servers once it answers. Harmless when it runs already.

        Raises MissingDependencyError (Java, Maven), SupervisorError (port taken, broker ended) and BrokerUnavailable
        (it runs but does not answer in time).
        """
        if self.running() is None:
            command = self.prepare()
            if self._ends_with_parent:
                command = ending_with_parent(command)
            with (self._directory / "console.log").open("ab") as console:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,  # A Ctrl-C in the terminal is not for the broker.
                )
            write_pid_file(self._directory / "broker.pid", ProcessIdentity.of(self._child.pid))
        self.wait_until_ready(_START_TIMEOUT_SECONDS)
        return self.bootstrap_servers

    def prepare(self) -> list[str]:
        """Everything before the start: dependencies, ports, configuration, formatting. Returns the command to run."""
        java = str(find_java(self._environment).executable)
        classpath = f"{resolve_kafka_jars(self._environment)}/*"
        self._directory.mkdir(parents=True, exist_ok=True)
        port, controller_port = self._choose_ports()
        deploy = deploy_directory()
        properties = self._directory / "server.properties"
        properties.write_text(
            render_server_properties(
                (deploy / "server.properties").read_text(encoding="utf-8"),
                port=port,
                advertised_port=self._advertised_port,
                controller_port=controller_port,
                log_directory=self._directory / "data",
            ),
            encoding="utf-8",
        )
        options = [
            f"-Dlog4j2.configurationFile={deploy / 'log4j2.properties'}",
            f"-Dclawstream.log.directory={self._directory}",
        ]
        if not (self._directory / "data" / "meta.properties").exists():
            self._format([java, "-Xmx256m", *options, "-cp", classpath], properties)
        return [java, *_HEAP_OPTIONS, *options, "-cp", classpath, "kafka.Kafka", str(properties)]

    def become(self) -> NoReturn:
        """Replaces this process by the broker: a supervisor then watches Kafka itself, not a parent of it.

        Raises SupervisorError when the broker runs already, and MissingDependencyError.
        """
        running = self.running()
        if running is not None:
            raise SupervisorError(f"the broker in {self._directory} runs already (pid {running.pid})")
        command = self.prepare()
        write_pid_file(self._directory / "broker.pid", ProcessIdentity.of(os.getpid()))
        os.execve(command[0], command, self._environment)

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Returns when the broker lists topics: an open port is not yet a broker that answers."""
        deadline = time.monotonic() + timeout_seconds
        # Failed attempts are expected here, and librdkafka would print each of them.
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        while True:
            try:
                admin.list_topics(timeout=_PROBE_SECONDS)
            except KafkaException as error:
                if self.running() is None:
                    raise SupervisorError(f"the broker in {self._directory} ended:\n{self._last_words()}") from error
                if time.monotonic() >= deadline:
                    raise BrokerUnavailable(
                        f"the broker at {self.bootstrap_servers} did not answer within {timeout_seconds:.0f} seconds; "
                        f"see {self._directory / 'broker.log'}"
                    ) from error
            else:
                return

    def stop(self, grace_seconds: float = _STOP_GRACE_SECONDS) -> bool:
        """SIGTERM, and SIGKILL after the grace. Returns whether there was a broker to stop."""
        identity = self.running()
        if identity is not None:
            identity.terminate(grace_seconds)
        self._forget()
        return identity is not None

    def kill(self) -> None:
        """SIGKILL: what a crash looks like. Raises SupervisorError when no broker runs."""
        identity = self.running()
        if identity is None:
            raise SupervisorError(f"{self._directory}: there is no running broker to kill")
        identity.signal(signal.SIGKILL)
        identity.wait(10.0)
        self._forget()

    def restart(self) -> str:
        """Stops it if it runs, and starts it on the same port over the same data."""
        self.stop()
        return self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _forget(self) -> None:
        if self._child is not None:
            self._child.wait()
            self._child = None
        (self._directory / "broker.pid").unlink(missing_ok=True)

    def _recorded_ports(self) -> tuple[int, int] | None:
        try:
            content = orjson.loads((self._directory / "broker.json").read_bytes())
        except FileNotFoundError:
            return None
        return int(content["port"]), int(content["controller_port"])

    def _choose_ports(self) -> tuple[int, int]:
        recorded = self._recorded_ports()
        port = self._requested_port or (recorded[0] if recorded else free_port())
        if not is_port_free(port):
            raise SupervisorError(
                f"port {port} is taken by {describe_port_owner(port)}; stop it, or give the broker another port"
            )
        controller_port = recorded[1] if recorded else free_port()
        while controller_port == port or not is_port_free(controller_port):
            controller_port = free_port()
        (self._directory / "broker.json").write_bytes(orjson.dumps({"port": port, "controller_port": controller_port}))
        return port, controller_port

    def _format(self, java: list[str], properties: Path) -> None:
        command = [*java, "kafka.tools.StorageTool", "format", "--standalone"]
        # With "=": an id may begin with a dash, which would else be read as an option.
        command += [f"--cluster-id={cluster_id_from(self._new_id())}", f"--config={properties}"]
        result = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        if result.returncode != 0:
            raise SupervisorError(
                f"Kafka could not format {self._directory / 'data'}:\n{(result.stdout + result.stderr).strip()}"
            )

    def _last_words(self) -> str:
        lines: list[str] = []
        for name in ("broker.log", "console.log"):
            file = self._directory / name
            if file.exists():
                lines += file.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        # Kafka shuts down wordily and prints long stacks: the reason is in the lines that name an error.
        telling = [line for line in lines if re.search(r"ERROR|FATAL|Exception|Error", line) and "\tat " not in line]
        return "\n".join(telling[-5:] or lines) or "it printed nothing"
