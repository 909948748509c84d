"""`clawstream audit`: proves from the log that nothing was lost and nothing was counted twice."""

import os
import time
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.progress import Progress

from clawstream.audit.archives import sha256_of_url
from clawstream.audit.report import as_document, checks_table, counts_table, summary
from clawstream.audit.run import AuditReport, audit
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.errors import MissingDependencyError
from clawstream.settings import KafkaSettings
from clawstream.supervisor.settings import load_system_settings

_PAUSE_SECONDS = 0.1


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("audit")(audit_command)


def audit_command(
    config: ConfigOption = None,
    without_archives: Annotated[
        bool, typer.Option("--without-archives", help="On a machine that cannot see the trainer's batches.")
    ] = False,
    examples: Annotated[int, typer.Option(help="Violations to keep of each check.", min=1)] = 10,
    directory: Annotated[
        Path | None, typer.Option(help="Where the scratch file goes: about 300 bytes a record (default: /tmp).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Checks the whole log: every input has one end, and everything trained and served can be accounted for.

    Reads with a client of its own, next to a running system. Exit code 1 when a promise is broken.
    """
    kafka = load_system_settings(optional_config(config), os.environ).kafka
    report = run(kafka, without_archives=without_archives, max_examples=examples, directory=directory)
    if as_json:
        output.print(orjson.dumps(as_document(report), option=orjson.OPT_INDENT_2).decode())
    else:
        output.print(checks_table(report))
        output.print()
        output.print(counts_table(report))
        output.print()
        output.print(summary(report), style=None if report.holds else "red")
    if not report.holds:
        raise typer.Exit(1)


def run(kafka: KafkaSettings, *, without_archives: bool, max_examples: int, directory: Path | None) -> AuditReport:
    """Audits the log behind these settings. Raises MissingDependencyError without kafka-python."""
    try:
        from clawstream.audit.kafka_log import KafkaLog
    except ImportError as error:
        raise MissingDependencyError(f"{error}: pip install 'clawstream[audit]'") from error
    log = KafkaLog(kafka.bootstrap_servers, kafka.namespace)
    try:
        with Progress(console=errors, transient=True) as progress:
            bar = progress.add_task("reading", total=None)
            return audit(
                log,
                checksum=None if without_archives else sha256_of_url,
                max_examples=max_examples,
                directory=directory,
                pause=lambda: time.sleep(_PAUSE_SECONDS),
                progress=lambda doing, done, of: progress.update(bar, description=doing, completed=done, total=of),
            )
    finally:
        log.close()
