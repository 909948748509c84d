"""Replays: run, report, list. `clawstream replay` runs `python -m services.judge.replay`."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer
import uvloop
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clawstream.bus.interface import Bus
from clawstream.bus.ranges import OffsetRange
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.dead_letters.selection import moment
from clawstream.durable_files import replace_file
from clawstream.encryption.bus import open_bus
from clawstream.errors import ClawstreamError, ReplayError, SettingsError
from clawstream.log import configure_logging
from clawstream.metrics import Metrics
from clawstream.settings import LogSettings, load_settings
from clawstream.settling import settle
from clawstream.worker_process import stop_on_signals
from services.judge.chosen_spec import chosen_spec
from services.judge.promotion.decisions import read_decisions
from services.judge.replay.bounded_run import is_complete
from services.judge.replay.call_store import CallStore
from services.judge.replay.comparison import Comparison, compare
from services.judge.replay.handler import ReplayHandler
from services.judge.replay.ledger import ReplayLedger
from services.judge.replay.plan import ReplayDirectory, ReplayPlan, check_same, replay_names
from services.judge.replay.planning import make_plan
from services.judge.replay.report import html_report, json_report, tables
from services.judge.replay.run import run_replay
from services.judge.settings import JudgeSettings
from services.judge.specs import completed
from services.judge.wiring import backend_factory

app = typer.Typer(
    name="clawstream replay",
    help="Judge history again under another spec.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
EXIT_CODE_INCOMPLETE = 3
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
NameArgument = Annotated[str, typer.Argument(help="As `list` shows it.")]
_SHOWN = 20


@app.command()
def run(
    config: ConfigOption = None,
    spec: Annotated[Path | None, typer.Option(help="A TOML file with the fields of a judge spec.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="FIELD=VALUE over the file, or over the spec that counts.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of this replay (default: the spec's hash). Known: continued.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Inputs of then or later: 2h, 7d ago, or ISO 8601.")] = None,
    until: Annotated[str | None, typer.Option(help="Inputs before: 2h, 7d ago, or ISO 8601.")] = None,
    offsets: Annotated[list[str] | None, typer.Option(help="PARTITION:FIRST-END instead; may be repeated.")] = None,
    worker: Annotated[str, typer.Option(help="Another one for each process that shares the replay.")] = "replay-0",
    as_json: JsonOption = False,
) -> None:
    """Judges history again under another spec, beside the scores that count, and says how the two differ.

    The same command continues what was interrupted, whatever interrupted it. Exit code 3: not everything is done.
    """
    settings = _settings(config)
    clock = SystemClock()
    bus = open_bus(settings.kafka, client_id=worker)
    namespace = settings.kafka.namespace
    decisions = read_decisions(bus, namespace, completed(settings.spec))
    wanted = chosen_spec(decisions.spec, spec, change or ())
    directory = ReplayDirectory(_root(settings), name or wanted.spec_hash)
    plan = directory.load()
    if plan is None:
        now = clock.now()
        plan = make_plan(
            bus,
            namespace=namespace,
            name=name or wanted.spec_hash,
            spec=wanted,
            baseline_epoch=decisions.epoch,
            now=now,
            since=None if since is None else moment(since, now),
            until=None if until is None else moment(until, now),
            offsets=_offset_ranges(offsets) if offsets else None,
        )
        directory.save(plan)
    else:
        if spec is not None or change:
            check_same(plan, spec=wanted, namespace=namespace)
        errors.print(f"continuing replay {plan.name!r} of {plan.created_at:%Y-%m-%d %H:%M}, within its own bounds")
    logger = configure_logging(LogSettings(level="warning"), process=worker)
    store = CallStore(directory.path / "calls.sqlite")
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=errors,
        ) as progress:
            line = progress.add_task("reading the ledger", total=None, detail="")
            store.catch_up(
                bus,
                namespace,
                plan.oldest_milliseconds,
                lambda done, of: progress.update(line, completed=done, total=of),
            )
            progress.reset(line, description=f"replay {plan.name}", total=None)
            started = clock.monotonic_seconds()

            def show(done: int, total: int, handler: ReplayHandler, ledger: ReplayLedger) -> None:
                scored = handler.results["scored"] + handler.results["deadline"]
                rate = scored / max(clock.monotonic_seconds() - started, 1e-9)
                detail = f"{scored} scored, {rate:.1f}/s, {ledger.paid} calls paid, {ledger.reused} free"
                progress.update(line, completed=done, total=total, detail=detail)

            async def judge() -> bool:
                settle()
                async with stop_on_signals() as stop:
                    return await run_replay(
                        plan,
                        bus,
                        store,
                        settings,
                        backend_factory(settings, os.environ).make,
                        worker_name=worker,
                        stop=stop,
                        clock=clock,
                        metrics=Metrics(),
                        logger=logger,
                        progress=show,
                    )

            is_done = uvloop.run(judge())
        if not is_done:
            errors.print("stopped before the end; the same command continues it")
            raise typer.Exit(EXIT_CODE_INCOMPLETE)
        _show(_report(bus, plan, store, directory), directory, as_json)
    finally:
        store.close()


@app.command()
def report(name: NameArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Compares a replay with the scores that counted when it was made, again; also one that is not complete."""
    settings = _settings(config)
    directory = ReplayDirectory(_root(settings), name)
    plan = _known(directory, name)
    bus = open_bus(settings.kafka, client_id="replay-report")
    store = CallStore(directory.path / "calls.sqlite")
    try:
        store.catch_up(bus, plan.namespace, plan.oldest_milliseconds)
        _show(_report(bus, plan, store, directory), directory, as_json)
    finally:
        store.close()


@app.command("list")
def list_replays(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Lists the replays of this machine."""
    settings = _settings(config)
    bus = open_bus(settings.kafka, client_id="replay-list")
    rows: list[dict[str, object]] = []
    for name in replay_names(_root(settings)):
        plan = _known(ReplayDirectory(_root(settings), name), name)
        rows.append(
            {
                "name": plan.name,
                "replay_id": plan.replay_id,
                "spec_hash": plan.spec.spec_hash,
                "created_at": plan.created_at.isoformat(),
                "offsets": sum(end - start for start, end in plan.bounds.values()),
                "complete": is_complete(bus, plan.group, plan.ranges),
            }
        )
    if as_json:
        output.print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    for row in rows:
        state = "complete" if row["complete"] else "not complete"
        output.print(f"{row['name']}  spec {row['spec_hash']}  {row['created_at']}  {row['offsets']} offsets  {state}")


def _settings(config: Path | None) -> JudgeSettings:
    return load_settings(JudgeSettings, section="judge", file=optional_config(config), environment=os.environ)


def _root(settings: JudgeSettings) -> Path:
    return settings.data_directory / "replays"


def _known(directory: ReplayDirectory, name: str) -> ReplayPlan:
    plan = directory.load()
    if plan is None:
        raise ReplayError(
            f"there is no replay {name!r} in {directory.path.parent}; `clawstream replay list` shows them"
        )
    return plan


def _report(bus: Bus, plan: ReplayPlan, store: CallStore, directory: ReplayDirectory) -> Comparison:
    comparison = compare(bus, plan, store, directory.path / "comparison.sqlite", worst=_SHOWN)
    replace_file(directory.path / "report.json", json_report(comparison))
    replace_file(directory.path / "report.html", html_report(comparison).encode())
    return comparison


def _show(comparison: Comparison, directory: ReplayDirectory, as_json: bool) -> None:
    if as_json:
        output.print(json_report(comparison).decode())
        return
    for table in tables(comparison):
        output.print(table)
        output.print()
    output.print(f"{directory.path / 'report.json'}\n{directory.path / 'report.html'}")
    output.print(f"To let it count: clawstream judge promote --replay {comparison.name}")


def _offset_ranges(texts: list[str]) -> dict[int, OffsetRange]:
    ranges: dict[int, OffsetRange] = {}
    for text in texts:
        found = re.fullmatch(r"(\d+):(\d+)-(\d+)", text)
        if found is None:
            raise SettingsError(f"{text!r} is no range of offsets: write PARTITION:FIRST-END, the end not included")
        ranges[int(found[1])] = (int(found[2]), int(found[3]))
    return ranges


def main() -> None:
    """Runs a command. What went wrong on purpose is told without a stack."""
    try:
        app(prog_name="clawstream replay")
    except ClawstreamError as error:
        errors.print(str(error), style="red")
        sys.exit(2 if isinstance(error, SettingsError) else 1)


if __name__ == "__main__":
    main()
