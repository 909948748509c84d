"""`clawstream trace`: the whole chain behind a turn, a sample, a step or a version."""

import os
from typing import Annotated

import orjson
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clawstream.bus.ranges import Progress as RangeProgress
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.encryption.bus import open_bus
from clawstream.supervisor.settings import load_system_settings
from clawstream.tracing.chain import trace as trace_chain
from clawstream.tracing.tree import chain_tree


def trace(
    identity: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Of an answer, turn, sample, step, next state or score; a version as 7 or POLICY/7, "
            "a step as LINEAGE/step/3.",
        ),
    ],
    config: ConfigOption = None,
    policy: Annotated[
        str | None, typer.Option(help="Whose version a bare number is (default: the TOML file's).")
    ] = None,
    limit: Annotated[int, typer.Option(help="Name so many turns that a version served; all are counted.", min=0)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Shows where something came from and what became of it: turn, next states, votes, hints, samples, step, version,
    and the turns that the version answered. Follows references; where there are none it reads one partition, or all.
    """
    settings = load_system_settings(optional_config(config), os.environ)
    columns = (
        TextColumn("reading {task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True) as progress:

        def begin(name: str) -> RangeProgress:
            line = progress.add_task(name, total=None)
            return lambda done, of: progress.update(line, completed=done, total=of)

        document = trace_chain(
            open_bus(settings.kafka, client_id="trace"),
            settings.kafka.namespace,
            identity,
            policy=policy or settings.policy,
            limit=limit,
            progress=begin,
        )
    if as_json:
        output.print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    else:
        output.print(chain_tree(document))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(trace)
