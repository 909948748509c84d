"""`clawstream doctor`: what is missing, and what to do about it."""

import os
from pathlib import Path

import psutil
import typer
from rich.table import Table

from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.doctor import machine, system
from clawstream.doctor.finding import Finding, Verdict
from clawstream.memory_need import MemoryNeed
from clawstream.supervisor.preflight import Preflight
from clawstream.supervisor.report import running_supervisor
from clawstream.supervisor.settings import Service, SystemSettings, load_system_settings

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
    preflight = Preflight(file, os.environ) if file is not None else None
    settings = load_system_settings(None, os.environ) if preflight is None else preflight.system
    findings = [
        machine.check_python(),
        *machine.check_extras(),
        machine.check_java(os.environ),
        machine.check_kafka_jars(os.environ),
        machine.check_gpu(os.environ),
        *(system.check_settings(preflight) if preflight is not None else []),
    ]
    if settings is None:
        return findings
    return [
        *findings,
        machine.check_disk(settings.data_directory.resolve()),
        machine.check_memory(_needs(preflight, settings), available_bytes=psutil.virtual_memory().available),
        *system.check_broker(settings),
    ]


def _needs(preflight: Preflight | None, settings: SystemSettings) -> dict[str, MemoryNeed]:
    """What is still to be taken: nothing of a system that runs, and a trainer with a GPU takes the GPU's."""
    if preflight is None or running_supervisor(settings.supervisor_directory) is not None:
        return {}
    trainers = {process.name for process in settings.processes if process.service is Service.TRAINER}
    has_gpu = machine.has_gpu(os.environ)
    return {name: need for name, need in preflight.memory_needs().items() if not (has_gpu and name in trainers)}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(doctor)
