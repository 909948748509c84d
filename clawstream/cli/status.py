"""`clawstream status`: is it learning, and if not, why not."""

import os
from typing import Annotated

import typer

from clawstream.bus.kafka import KafkaBus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.clock import SystemClock
from clawstream.status.collect import take_snapshot
from clawstream.status.diagnosis import diagnose
from clawstream.status.tables import tables
from clawstream.supervisor.settings import load_system_settings


def status(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole snapshot, for programs.")] = False,
) -> None:
    """Is it learning, and if not, why not: processes, log, engines, last steps, drops. Exit code 1 when it is not."""
    settings = load_system_settings(optional_config(config), os.environ)
    snapshot = take_snapshot(settings, KafkaBus(settings.kafka, client_id="status"), SystemClock())
    diagnosis = diagnose(snapshot)
    if as_json:
        output.print(snapshot.model_dump_json(indent=2))
    else:
        if snapshot.is_down:
            output.print(f"{diagnosis.headline[0].upper()}{diagnosis.headline[1:]}\n")
        for table in tables(snapshot):
            output.print(table)
            output.print()
        why = "Nothing runs." if snapshot.is_down else diagnosis.headline
        output.print(f"Learning: {'yes' if diagnosis.is_learning else 'no'}. {why}")
        for note in diagnosis.notes:
            output.print(f"  - {note}")
    if not diagnosis.is_learning:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(status)
