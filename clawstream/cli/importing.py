"""`clawstream import`: chat logs that something else wrote become turns and next states."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from clawstream.blobs import BlobStore
from clawstream.bus.interface import Bus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.encryption.bus import open_bus
from clawstream.engine.client import HttpEngineClient
from clawstream.engine.pool import EnginePool
from clawstream.errors import MissingDependencyError
from clawstream.importing.importer import Importer, ImportReport
from clawstream.importing.reading import LogFormat, log_files, read_conversations
from clawstream.importing.scoring import ImportRules, TurnScorer
from clawstream.rendering.interface import ChatRenderer
from clawstream.supervisor.settings import load_system_settings


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(name="import")(import_logs)


def import_logs(
    logs: Annotated[list[Path], typer.Argument(help="Files, or folders of *.jsonl.")],
    engine: Annotated[list[str], typer.Option(help="Base URL of an engine that serves the policy; may be repeated.")],
    model: Annotated[Path, typer.Option(help="The policy's directory: its tokenizer and chat template.")],
    config: ConfigOption = None,
    log_format: Annotated[LogFormat, typer.Option("--format", "-f", help="How they are written.")] = LogFormat.OPENAI,
    principal: Annotated[str, typer.Option(help="Of conversations whose log does not say whose they are.")] = (
        "imported"
    ),
    policy: Annotated[str, typer.Option(help="Whose turns they are to be.")] = "default",
    renderer: Annotated[str, typer.Option(help="As gateway.renderer.")] = "auto",
    trainable: Annotated[
        bool, typer.Option("--trainable", help="Let judge, teacher and trainer learn from them (off-policy).")
    ] = False,
    blobs: Annotated[str, typer.Option(help="As gateway.conversations.blob_store_url.")] = ".clawstream/blobs",
    concurrent: Annotated[int, typer.Option(help="Conversations that are scored at a time.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Imports chat logs: every answer becomes a turn, with log-probs that the engine scores, and a next state.

    Run it as often as you like: what was imported is passed over, and a run that was killed is continued.
    Imported answers were not sampled from the policy. They are served history (for replay, judging and evaluation by
    hand) and are trained only with --trainable: then as reward-weighted imitation, which is off-policy.
    """
    kafka = load_system_settings(optional_config(config), os.environ).kafka
    files = log_files(logs)
    report = asyncio.run(
        _run(
            files,
            log_format,
            open_bus(kafka, client_id="import", renews_keys=True),
            kafka.namespace,
            engine,
            ImportRules(policy, principal, trainable),
            _renderer(model, renderer),
            BlobStore(str(Path(blobs).resolve()) if "://" not in blobs else blobs, encrypts=kafka.encryption.sessions),
            concurrent,
        )
    )
    if as_json:
        output.print(orjson.dumps(as_document(report), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(report)


def as_document(report: ImportReport) -> dict[str, Any]:
    """The report for programs."""
    return {
        "conversations": report.conversations,
        "turns": report.turns,
        "next_states": report.next_states,
        "already_imported": report.already,
        "skipped": dict(report.skipped),
        "untrainable_turns": dict(report.untrainable),
        "problems": report.problems,
    }


async def _run(
    files: Sequence[Path],
    log_format: LogFormat,
    bus: Bus,
    namespace: str,
    urls: Sequence[str],
    rules: ImportRules,
    renderer: ChatRenderer,
    blobs: BlobStore,
    concurrent: int,
) -> ImportReport:
    clock = SystemClock()
    size = renderer.vocabulary_size
    engines = EnginePool(
        [HttpEngineClient(f"engine-{number}", url, vocabulary_size=size) for number, url in enumerate(urls)]
    )
    importer = Importer(
        bus,
        namespace,
        TurnScorer(rules, renderer, engines, blobs, clock),
        principal=rules.principal,
        concurrent=concurrent,
        clock=clock,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as progress:
            bar = progress.add_task("importing", total=sum(file.stat().st_size for file in files))
            read = 0

            def on_bytes(so_far: int) -> None:
                nonlocal read
                read = so_far

            return await importer.run(
                read_conversations(files, log_format, on_bytes),
                lambda _: progress.update(bar, completed=read, description=f"importing: {importer.report.turns} turns"),
            )
    finally:
        await engines.close()


def _renderer(directory: Path, family: str) -> ChatRenderer:
    try:
        from clawstream.rendering.renderer import load_renderer
    except ImportError as error:
        raise MissingDependencyError(
            f"rendering needs the packages of the gateway: pip install 'clawstream[gateway]' ({error})"
        ) from error
    return load_renderer(directory, family)


def _print(report: ImportReport) -> None:
    table = Table("what", "how many", box=None)
    table.add_row("conversations imported", str(report.conversations))
    table.add_row("turns", str(report.turns))
    table.add_row("next states", str(report.next_states))
    table.add_row("imported before", str(report.already))
    for reason, count in sorted(report.skipped.items()):
        table.add_row(f"skipped: {reason}", str(count))
    for reason, count in sorted(report.untrainable.items()):
        table.add_row(f"turns not to be trained: {reason}", str(count))
    output.print(table)
    for problem in report.problems:
        errors.print(problem, style="yellow")
