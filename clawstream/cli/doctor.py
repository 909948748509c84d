"""`clawstream doctor`: what is missing, and what to do about it."""

import os
from pathlib import Path

import typer
from rich.table import Table

from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.doctor import machine, system
from clawstream.doctor.finding import Finding, Verdict
from clawstream.settings import read_settings_file
from clawstream.supervisor.settings import load_system_settings

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.MISSING: "red"}


def doctor(config: ConfigOption = None) -> None:
    """Checks this machine and the settings. Exit code 1 when something is missing."""
    findings = examine(optional_config(config))
    table = Table(box=None, show_header=False)
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(finding.subject, finding.verdict.value, finding.detail, style=style if finding.remedy else None)
        if finding.remedy:
            table.add_row("", "", f"-> {finding.remedy}")
    output.print(table)
    if any(finding.verdict is Verdict.MISSING for finding in findings):
        raise typer.Exit(1)


def examine(file: Path | None) -> list[Finding]:
    """All checks, the machine first."""
    settings = load_system_settings(file, os.environ)
    document = read_settings_file(file) if file is not None else {}
    base = file.resolve().parent if file is not None else Path.cwd()
    return [
        machine.check_python(),
        *machine.check_extras(),
        machine.check_java(os.environ),
        machine.check_kafka_jars(os.environ),
        machine.check_disk(settings.data_directory.resolve()),
        machine.check_memory(),
        machine.check_gpu(os.environ),
        *system.check_models(settings, document, base),
        *system.check_ports(settings, document),
        *system.check_broker(settings),
    ]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(doctor)
