"""`clawstream report`: whom the policy learns from, and whether the judge rewards what people want."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from clawstream.bus.interface import Bus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.clock import SystemClock
from clawstream.dead_letters.selection import moment
from clawstream.encryption.bus import open_bus
from clawstream.errors import SettingsError
from clawstream.reports.drift import drift
from clawstream.reports.evaluation_file import read_evaluation
from clawstream.reports.judge_gap import judge_gap
from clawstream.reports.tables import drift_tables, judge_tables
from clawstream.reports.window import Window, events_within
from clawstream.supervisor.settings import SystemSettings, load_system_settings
from clawstream.topics import SCORES, TRAIN_STEPS, TURNS, full_name

app = typer.Typer(help="Gaps that no single step shows.", no_args_is_help=True)

SinceOption = Annotated[str, typer.Option(help="From then on: 30m, 2h, 7d ago, or ISO 8601.")]
UntilOption = Annotated[str | None, typer.Option(help="Before then; now by default.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command(name="drift")
def drift_command(
    config: ConfigOption = None,
    since: SinceOption = "7d",
    until: UntilOption = None,
    groups: Annotated[int, typer.Option(help="Show at most so many groups of each kind.", min=1)] = 12,
    as_json: JsonOption = False,
) -> None:
    """Served against trained answers by user, length, temperature and version: whom does the policy learn from?"""
    settings, window = _settings(config), _window(since, until)
    topics = [full_name(settings.kafka.namespace, topic) for topic in (TURNS, TRAIN_STEPS)]
    report = drift(settings.policy, events_within(_bus(settings), topics, window))
    if as_json:
        _print_json({"window": asdict(window), "headline": report.headline, **asdict(report)})
        return
    counts = f"{report.served} main answers served ({report.trainable} trainable), {report.trained} trained"
    output.print(f"{window}: {counts}")
    for table in drift_tables(report, most_groups=groups):
        output.print()
        output.print(table)
    output.print()
    output.print(f"Drift: {report.headline}.")


@app.command()
def judge(
    config: ConfigOption = None,
    since: SinceOption = "7d",
    until: UntilOption = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="A report.json of `clawstream eval`: held-out truth by version.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The judge against explicit evidence on the same turns, and against held-out questions: does it reward rightly?"""
    settings, window = _settings(config), _window(since, until)
    truth = None if evaluation is None else read_evaluation(evaluation)
    names = (SCORES,) if truth is None else (SCORES, TURNS)  # only versions need the turns, which are large
    topics = [full_name(settings.kafka.namespace, topic) for topic in names]
    report = judge_gap(events_within(_bus(settings), topics, window), truth)
    if as_json:
        _print_json({"window": asdict(window), "headline": report.headline, **asdict(report)})
        return
    output.print(f"{window}: {report.overall.judged} judged turns, {report.failed} scores failed")
    for table in judge_tables(report):
        output.print()
        output.print(table)
    output.print()
    output.print(f"Judge: {report.headline}.")


def _settings(config: ConfigOption) -> SystemSettings:
    return load_system_settings(optional_config(config), os.environ)


def _bus(settings: SystemSettings) -> Bus:
    return open_bus(settings.kafka, client_id="report")


def _window(since: str, until: str | None) -> Window:
    now = SystemClock().now()
    window = Window(moment(since, now), now if until is None else moment(until, now))
    if window.since >= window.until:
        raise SettingsError(f"--since {window.since} is not before --until {window.until}")
    return window


def _print_json(document: dict[str, Any]) -> None:
    output.print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
