"""`clawstream dlq`: what a stage could not handle, why, and sending it back once the cause is mended."""

import base64
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import orjson
import typer
from rich.progress import Progress
from rich.table import Table

from clawstream.bus.kafka import KafkaBus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.dead_letters.letter import Letter, counts
from clawstream.dead_letters.reading import ValueReader, read_letters
from clawstream.dead_letters.redrive import Redriver, RedriveReport
from clawstream.dead_letters.selection import Selection, moment
from clawstream.encryption.bus import open_bus
from clawstream.errors import OffsetNotRetained, SettingsError
from clawstream.settings import KafkaSettings
from clawstream.stages import STAGES, Stage
from clawstream.supervisor.settings import load_system_settings

app = typer.Typer(help="Dead letters: what a stage could not handle.", no_args_is_help=True)

StageOption = Annotated[list[str] | None, typer.Option("--stage", "-s", help=f"One of {', '.join(STAGES)}.")]
ReasonOption = Annotated[list[str] | None, typer.Option("--reason", "-r", help="Such as undecodable or deadline.")]
SinceOption = Annotated[str | None, typer.Option(help="Buried then or later: 30m, 2h, 7d ago, or ISO 8601.")]
UntilOption = Annotated[str | None, typer.Option(help="Buried before: 30m, 2h, 7d ago, or ISO 8601.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_letters(
    config: ConfigOption = None,
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that were sent back.")] = False,
    limit: Annotated[int, typer.Option(help="Show the newest so many.", min=1)] = 50,
    as_json: JsonOption = False,
) -> None:
    """Lists dead letters that wait, oldest first, and counts all by stage and reason."""
    kafka = _kafka(config)
    selection = _selection((), reason, since, until)
    found = selection.of(read_letters(_bus(kafka), kafka.namespace, _stages(stage)))
    shown = [letter for letter in found if everything or letter.redriven_at is None]
    if as_json:
        _print_json([as_document(letter) for letter in shown[-limit:]])
        return
    output.print(_counts_table(found))
    if shown:
        output.print()
        output.print(_letters_table(shown[-limit:]))
    if len(shown) > limit:
        output.print(f"{len(shown) - limit} older ones are not shown: --limit")


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="As `list` shows it: judge/3@17.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows one dead letter whole: where it was, why it is here, its headers and its value."""
    kafka = _kafka(config)
    bus = open_bus(kafka, client_id="dlq")
    (letter,) = _named([name], read_letters(bus, kafka.namespace, [_stage_of(name)]))
    values = ValueReader(bus)
    try:
        value, problem = values.start(letter).result().value, ""
    except OffsetNotRetained as error:
        value, problem = None, str(error)
    finally:
        values.close()
    if as_json:
        _print_json({**as_document(letter), **_content(letter, value), "problem": problem})
        return
    table = Table(box=None, show_header=False)
    for field, content in as_document(letter).items():
        table.add_row(field, "" if content is None else str(content))
    for header, content in letter.record.headers:
        table.add_row(f"header {header}", content.decode(errors="replace"))
    output.print(table)
    output.print()
    output.print(problem or _readable(value))


@app.command()
def redrive(
    names: Annotated[list[str] | None, typer.Argument(help="Letters as `list` shows them: judge/3@17.")] = None,
    config: ConfigOption = None,
    stage: StageOption = None,
    reason: ReasonOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="All that wait, of the stages named.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be sent back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Sends dead letters back to the topic they came from, each once. Exit code 1 when one of them cannot be.

    Key, value, headers and partition stay; a header counts how often it was sent back. The stage handles it like any
    other input, after what came since: mend the cause first.
    """
    selection = _selection(names or (), reason, since, until)
    if selection.is_empty and not everything:
        raise SettingsError("say which: names, --reason, --since, --until, or --all (with --stage)")
    kafka = _kafka(config)
    bus, clock = _bus(kafka), SystemClock()
    stages = list(dict.fromkeys(_stage_of(name) for name in names or ())) or _stages(stage)
    if names:
        _named(names, read_letters(bus, kafka.namespace, stages))
    reports: dict[str, RedriveReport] = {}
    for each in stages:
        redriver = Redriver(bus, kafka.namespace, each, clock=clock)
        if dry_run:
            reports[each.name] = redriver.preview(selection)
            continue
        with Progress(console=errors, transient=True) as progress:
            bar = progress.add_task(f"sending back: {each.name}", total=None)
            reports[each.name] = redriver.run(
                selection, lambda done, of, bar=bar, progress=progress: progress.update(bar, completed=done, total=of)
            )
    if as_json:
        _print_json({"dry_run": dry_run, "stages": {name: _report(report) for name, report in reports.items()}})
    else:
        _print_reports(reports, dry_run)
    if any(report.refused for report in reports.values()):
        raise typer.Exit(1)


def as_document(letter: Letter) -> dict[str, Any]:
    """What is known of a letter, for programs."""
    return {
        "letter": letter.name,
        "stage": letter.stage.name,
        "reason": letter.reason,
        "error_type": letter.error_type,
        "error_message": letter.error_message,
        "attempts": letter.attempts,
        "buried_at": letter.buried_at.isoformat(),
        "origin": None if letter.origin is None else str(letter.origin),
        "key": None if letter.record.key is None else letter.record.key.decode(errors="replace"),
        "value_bytes": letter.value_bytes,
        "value_omitted": letter.is_value_omitted,
        "redrives": letter.redrives,
        "redriven_at": None if letter.redriven_at is None else letter.redriven_at.isoformat(),
        "copies": letter.copies,
    }


def _kafka(config: ConfigOption) -> KafkaSettings:
    return load_system_settings(optional_config(config), os.environ).kafka


def _bus(kafka: KafkaSettings) -> KafkaBus:
    """Decrypts nothing: what is sent back are the bytes that came."""
    return KafkaBus(kafka, client_id="dlq")


def _stages(names: Sequence[str] | None) -> list[Stage]:
    return [_stage(name) for name in names] if names else list(STAGES.values())


def _stage(name: str) -> Stage:
    if name not in STAGES:
        raise SettingsError(f"there is no stage {name!r}: {', '.join(STAGES)}")
    return STAGES[name]


def _stage_of(letter_name: str) -> Stage:
    return _stage(letter_name.partition("/")[0])


def _named(names: Sequence[str], letters: Sequence[Letter]) -> list[Letter]:
    by_name = {letter.name: letter for letter in letters}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SettingsError(
            f"no such dead letter: {', '.join(missing)}; `clawstream dlq list --all` shows those there are"
        )
    return [by_name[name] for name in names]


def _selection(names: Sequence[str], reasons: Sequence[str] | None, since: str | None, until: str | None) -> Selection:
    now = SystemClock().now()
    return Selection(
        names=names,
        reasons=reasons or (),
        since=None if since is None else moment(since, now),
        until=None if until is None else moment(until, now),
    )


def _counts_table(letters: Sequence[Letter]) -> Table:
    table = Table("stage", "reason", "wait", "sent back", box=None)
    for (stage, reason), (waiting, redriven) in sorted(counts(letters).items()):
        table.add_row(stage, reason, str(waiting), str(redriven))
    if not letters:
        table.add_row("", "no dead letters", "0", "0")
    return table


def _letters_table(letters: Sequence[Letter]) -> Table:
    table = Table("letter", "buried", "reason", "key", "state", "error", box=None)
    for letter in letters:
        key = "" if letter.record.key is None else letter.record.key.decode(errors="replace")
        sent = (
            _minute(letter.redriven_at)
            if letter.redriven_at
            else (f"{letter.redrives} times" if letter.redrives else "")
        )
        table.add_row(letter.name, _minute(letter.buried_at), letter.reason, key, sent, letter.error_message)
    return table


def _print_reports(reports: Mapping[str, RedriveReport], dry_run: bool) -> None:
    table = Table("stage", "would be sent back" if dry_run else "sent back", "were already", "refused", box=None)
    for name, report in reports.items():
        table.add_row(name, str(len(report.redriven)), str(len(report.already)), str(len(report.refused)))
    output.print(table)
    for report in reports.values():
        for letter, problem in report.refused:
            errors.print(f"{letter.name}: {problem}", style="red")


def _report(report: RedriveReport) -> dict[str, Any]:
    return {
        "redriven": [letter.name for letter in report.redriven],
        "already_redriven": [letter.name for letter in report.already],
        "refused": [{"letter": letter.name, "problem": problem} for letter, problem in report.refused],
    }


def _content(letter: Letter, value: bytes | None) -> dict[str, Any]:
    headers = [[name, content.decode(errors="replace")] for name, content in letter.record.headers]
    if value is None:
        return {"headers": headers, "value": None}
    try:
        return {"headers": headers, "value": value.decode()}
    except UnicodeDecodeError:
        return {"headers": headers, "value_base64": base64.b64encode(value).decode()}


def _readable(value: bytes | None) -> str:
    if value is None:
        return "(no value)"
    try:
        return orjson.dumps(orjson.loads(value), option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONDecodeError:
        return value.decode(errors="backslashreplace")


def _minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}"


def _print_json(document: object) -> None:
    output.print(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
