"""`clawstream topics`: the topics of the log."""

import os
from typing import Annotated

import typer
from rich.table import Table

from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.supervisor.settings import load_system_settings
from clawstream.topics import full_name, topic_definitions

app = typer.Typer(help="The topics of the log.", no_args_is_help=True)


@app.command("list")
def list_topics(
    config: ConfigOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also descriptions.")] = False,
) -> None:
    """Lists the topics that the schemas define: needs no broker."""
    settings = load_system_settings(optional_config(config), os.environ)
    table = Table("topic", "key", "partitions", "policy", "written by", "read by", box=None)
    for definition in topic_definitions().values():
        table.add_row(
            full_name(settings.kafka.namespace, definition.topic),
            definition.key,
            str(definition.partitions),
            definition.config.get("cleanup.policy", ""),
            ", ".join(definition.producers),
            ", ".join(definition.consumers),
        )
        if verbose:
            table.add_row(f"  {definition.description}")
    output.print(table)
