"""`clawstream keys`: the master keys that wrap the keys of sessions."""

import os
from collections.abc import Mapping
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
    """Which master key counts, and how many sessions' keys each one wraps: one that wraps none may be thrown away.

    Exit code 1 when a record of the key topic is damaged.
    """
    kafka, masters = _loaded(config)
    on_log = read_keys(_bus(kafka), kafka.namespace)
    counts = {**({on_log.named: 0} if on_log.named else {}), **on_log.counts()}
    damaged = on_log.damaged(masters)
    if counts:
        table = Table("master key", "wraps", "counts", "in our file", box=None)
        for key_id, count in counts.items():
            ours = "" if not key_id else "yes" if masters.get(key_id) is not None else "no"
            table.add_row(
                key_id or "none: they stand as they are", str(count), "yes" if key_id == on_log.named else "", ours
            )
        output.print(table)
    elif not damaged and not on_log.unknown_name:
        state = "on" if kafka.encryption.sessions else "off"
        output.print(f"no key is on the log yet: kafka.encryption.sessions is {state}")
    if on_log.unknown_name:
        errors.print(
            f"{on_log.unknown_name}: this record names the master key that counts; until `clawstream keys rotate` "
            "names it anew no session gets a key",
            style="red",
        )
    _tell_damaged(damaged)
    if damaged or on_log.unknown_name:
        raise typer.Exit(1)


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

    All processes must have it already: it is a further line of the file that they share. Exit code 1 when the record of
    a key is damaged: all others are wrapped anew.
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
        report = rotation.run(target, leaving=leave or ())
    output.print(f"master key {target.key_id} counts; {report.wrapped} keys of sessions were wrapped anew")
    _tell_damaged(report.damaged)
    if report.damaged:
        raise typer.Exit(1)


def _tell_damaged(damaged: Mapping[str, str]) -> None:
    for problem in damaged.values():
        errors.print(problem, style="red")
    if damaged:
        errors.print(
            f"{len(damaged)} keys of sessions are damaged: what they encrypt can be read by nobody, and who meets it "
            "ends with exit code 2. Forget those sessions: `clawstream forget --session ID`",
            style="red",
        )


def _loaded(config: ConfigOption) -> tuple[KafkaSettings, MasterKeys]:
    kafka = load_system_settings(optional_config(config), os.environ).kafka
    return kafka, MasterKeys(lambda: load_master_keys(kafka.encryption, os.environ))


def _bus(kafka: KafkaSettings) -> KafkaBus:
    return KafkaBus(kafka, client_id="keys", transaction_timeout_seconds=TRANSACTION_TIMEOUT_SECONDS)
