"""`clawstream keys`: the master keys that wrap the keys of sessions."""

import os
from typing import Annotated

import typer
from rich.table import Table

from clawstream.bus.kafka import KafkaBus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.encryption.master_key import MasterKeys, load_master_keys
from clawstream.encryption.rotation import Rotation, read_keys
from clawstream.errors import SettingsError
from clawstream.settings import KafkaSettings
from clawstream.supervisor.settings import load_system_settings

TRANSACTION_TIMEOUT_SECONDS = 10.0
"""What a killed run leaves open keeps readers of the keys waiting for so long."""

app = typer.Typer(help="The master keys that wrap the keys of sessions (docs/encryption.md).", no_args_is_help=True)


@app.command()
def status(config: ConfigOption = None) -> None:
    """Which master key counts, and how many sessions' keys each one wraps: one that wraps none may be thrown away."""
    kafka, masters = _loaded(config)
    on_log = read_keys(_bus(kafka), kafka.namespace)
    counts = {**({on_log.named: 0} if on_log.named else {}), **on_log.counts()}
    if not counts:
        state = "on" if kafka.encryption.sessions else "off"
        output.print(f"no key is on the log yet: kafka.encryption.sessions is {state}")
        return
    table = Table("master key", "wraps", "counts", "in our file", box=None)
    for key_id, count in counts.items():
        ours = "" if not key_id else "yes" if masters.get(key_id) is not None else "no"
        table.add_row(
            key_id or "none: they stand as they are", str(count), "yes" if key_id == on_log.named else "", ours
        )
    output.print(table)


@app.command()
def rotate(
    config: ConfigOption = None,
    to: Annotated[str | None, typer.Option("--to", help="Its id (default: the last one of the file).")] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(help="Id of a master key that is lost: what it wraps stays as it is. May be repeated."),
    ] = None,
) -> None:
    """Makes the newest master key count, and wraps every session's key by it, while everything runs.

    All processes must have it already: it is a further line of the file that they share.
    """
    kafka, masters = _loaded(config)
    target = masters.last if to is None else masters.get(to)
    if target is None:
        raise SettingsError(
            f"master key {to or ''}: this process has {masters.ids}; see kafka.encryption.master_key_file"
        )
    with errors.status("rotating") as line:
        rotation = Rotation(
            _bus(kafka),
            kafka.namespace,
            masters,
            clock=SystemClock(),
            random_bytes=os.urandom,
            progress=lambda what: line.update(f"rotating: {what}"),
        )
        count = rotation.run(target, leaving=leave or ())
    output.print(f"master key {target.key_id} counts; {count} keys of sessions were wrapped anew")


def _loaded(config: ConfigOption) -> tuple[KafkaSettings, MasterKeys]:
    kafka = load_system_settings(optional_config(config), os.environ).kafka
    return kafka, MasterKeys(lambda: load_master_keys(kafka.encryption, os.environ))


def _bus(kafka: KafkaSettings) -> KafkaBus:
    return KafkaBus(kafka, client_id="keys", transaction_timeout_seconds=TRANSACTION_TIMEOUT_SECONDS)
