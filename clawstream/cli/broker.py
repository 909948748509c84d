"""`clawstream broker`: Apache Kafka on this machine, without Docker."""

import os
from pathlib import Path
from typing import Annotated

import typer

from clawstream.broker import LocalBroker
from clawstream.broker.installation import resolve_kafka_jars
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.errors import SettingsError
from clawstream.supervisor.settings import load_system_settings

app = typer.Typer(help="Apache Kafka on this machine, without Docker.", no_args_is_help=True)

DirectoryOption = Annotated[
    Path | None,
    typer.Option("--data-directory", "-d", help="Where it keeps everything (default: kafka in data_directory)."),
]
PortOption = Annotated[
    int | None, typer.Option("--port", "-p", min=1, max=65535, help="Port (default: kafka.bootstrap_servers).")
]


def broker_of(config: Path | None, directory: Path | None, port: int | None) -> LocalBroker:
    """The broker that options and settings mean. Raises SettingsError when the log is on another machine."""
    settings = load_system_settings(optional_config(config), os.environ)
    if port is None:
        port = local_port(settings.kafka.bootstrap_servers)
    return LocalBroker(directory or settings.broker_directory, port)


def local_port(bootstrap_servers: str) -> int:
    """The port of a single loopback address. Raises SettingsError for anything else."""
    host, _, port = bootstrap_servers.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        raise SettingsError(
            f"kafka.bootstrap_servers: a broker on this machine listens on 127.0.0.1:PORT, not on {bootstrap_servers!r}"
        )
    return int(port)


@app.command()
def up(config: ConfigOption = None, data_directory: DirectoryOption = None, port: PortOption = None) -> None:
    """Starts the broker in the background, and returns when it answers. Harmless when it runs already."""
    broker = broker_of(config, data_directory, port)
    before = broker.running()
    if before is None:
        errors.print(f"starting Apache Kafka in {broker.directory} ...")
    address = broker.start()
    identity = broker.running()
    state = "was running already" if before is not None else "is up"
    output.print(f"Apache Kafka {state} at {address} (pid {identity.pid if identity else 'unknown'})")


@app.command()
def run(config: ConfigOption = None, data_directory: DirectoryOption = None, port: PortOption = None) -> None:
    """Becomes the broker: for supervisors. Ends when the broker ends."""
    broker = broker_of(config, data_directory, port)
    broker.become()


@app.command()
def down(config: ConfigOption = None, data_directory: DirectoryOption = None) -> None:
    """Stops the broker. Its data stays."""
    broker = broker_of(config, data_directory, None)
    stopped = broker.stop()
    output.print(f"Apache Kafka in {broker.directory} {'is down' if stopped else 'was not running'}")


@app.command()
def status(config: ConfigOption = None, data_directory: DirectoryOption = None) -> None:
    """Says whether the broker runs. Exit code 1 when it does not."""
    broker = broker_of(config, data_directory, None)
    identity = broker.running()
    if identity is None:
        output.print(f"Apache Kafka in {broker.directory} is not running")
        raise typer.Exit(1)
    broker.wait_until_ready(10.0)
    output.print(f"Apache Kafka answers at {broker.bootstrap_servers} (pid {identity.pid}), data in {broker.directory}")


@app.command()
def fetch() -> None:
    """Fetches Kafka's jars, so that later starts need neither Maven nor network."""
    errors.print("fetching Apache Kafka (54 MB, once) ...")
    output.print(str(resolve_kafka_jars(os.environ)))
