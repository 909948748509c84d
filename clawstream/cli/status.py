"""`clawstream status`: is it learning, and if not, why not."""

import os

import typer
from rich.table import Table

from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.supervisor.report import read_report
from clawstream.supervisor.settings import load_system_settings


def status(config: ConfigOption = None) -> None:
    """The processes."""
    settings = load_system_settings(optional_config(config), os.environ)
    report = read_report(settings.supervisor_directory)
    table = Table("process", "state", "pid", "starts", "detail", box=None)
    for process in report.processes if report else []:
        table.add_row(process.name, process.state, str(process.pid), str(process.starts), process.detail)
    output.print(table)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(status)
