"""`clawstream export` and `clawstream restore`: topics as Parquet files, and back."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from clawstream.bus.kafka import KafkaBus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import errors, optional_config, output
from clawstream.clock import SystemClock
from clawstream.encryption.master_key import MasterKeys, load_master_keys
from clawstream.errors import SettingsError
from clawstream.settings import KafkaSettings
from clawstream.supervisor.settings import load_system_settings
from clawstream.topics import DEPLOYMENT, SESSION_KEYS, topic_definitions


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(export)
    app.command()(restore)


def export(
    to: Annotated[Path, typer.Option(help="A folder that is empty or does not exist.")],
    topic: Annotated[
        list[str] | None,
        typer.Option(help="Such as turns.v1; may be repeated (default: all but session-keys.v1 and deployment.v1)."),
    ] = None,
    config: ConfigOption = None,
    file_megabytes: Annotated[int, typer.Option(help="Content of one file, before compression.", min=1)] = 256,
) -> None:
    """Exports topics to Parquet, up to their present end: keys, headers, values, timestamps and offsets.

    Arrays in blobs and archived batches are files of their own: copy those folders too. What is encrypted stays so, and
    its keys stay on the log: an archive that held both could be read whatever is forgotten later.
    """
    from clawstream.archives.export import export_topics

    kafka = _kafka(config)
    topics = _known(topic or []) or [each for each in topic_definitions() if each not in (SESSION_KEYS, DEPLOYMENT)]
    with _progress() as progress:
        bar = progress.add_task("exporting", total=None)
        manifest = export_topics(
            KafkaBus(kafka, client_id="export"),
            kafka.namespace,
            topics,
            to,
            SystemClock(),
            file_bytes=file_megabytes * 1024 * 1024,
            progress=lambda done, of: progress.update(bar, completed=done, total=of),
        )
    table = Table("topic", "records", "files", box=None)
    for each in manifest.topics:
        table.add_row(each.topic, str(each.rows), str(sum(len(one.files) for one in each.partitions)))
    output.print(table)
    output.print(str(to))


def restore(
    directory: Annotated[Path, typer.Argument(help="A folder that `clawstream export` made.")],
    topic: Annotated[list[str] | None, typer.Option(help="Such as turns.v1; may be repeated (default: all).")] = None,
    config: ConfigOption = None,
    offsets: Annotated[
        Path | None, typer.Option(help="Where to write down new offsets (default: offsets-NAMESPACE beside it).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a restore that was interrupted.")] = False,
    new_timestamps: Annotated[
        bool, typer.Option("--new-timestamps", help="Of this moment, so that retention begins anew.")
    ] = False,
    append: Annotated[bool, typer.Option("--append", help="Write after whatever the topics hold.")] = False,
    dangling_references: Annotated[
        bool, typer.Option("--dangling-references", help="Also without topics that the restored ones refer to.")
    ] = False,
) -> None:
    """Restores an archive to the (empty) topics of this namespace: same keys, partitions, headers, values, timestamps.

    Offsets are new: where each record went is written down, and what refers to records by offset is translated.
    Records older than their topic's retention are removed again by the broker.
    """
    from clawstream.archives.restore import Restorer

    if resume and append:
        raise SettingsError("--resume and --append exclude each other")
    kafka = _kafka(config)
    places = offsets or directory.resolve().with_name(f"{directory.resolve().name}-offsets-{kafka.namespace}")
    with _progress() as progress:
        bar = progress.add_task("restoring", total=None)
        report = Restorer(
            KafkaBus(kafka, client_id="restore"),
            kafka.namespace,
            directory,
            offsets_directory=places,
            resume=resume,
            append=append,
            new_timestamps=new_timestamps,
            dangling_references=dangling_references,
            now_milliseconds=int(SystemClock().now().timestamp() * 1000),
            masters=MasterKeys(lambda: load_master_keys(kafka.encryption, os.environ)),
            progress=lambda done, of: progress.update(bar, completed=done, total=of),
        ).run(_known(topic or []))
    table = Table("topic", "records written", "were there already", box=None)
    for name, count in report.written.items():
        table.add_row(name, str(count), str(report.already[name]))
    output.print(table)
    output.print(f"old and new offsets: {places}")
    if report.dangling:
        errors.print(
            f"{report.dangling} references lead nowhere: what they refer to is not in the archive", style="yellow"
        )
    if report.passed_over:
        errors.print(
            f"{report.passed_over} records of the archive say which master key counted then, and were passed over: "
            "the one that counts here stays",
            style="yellow",
        )
    if report.keys_warning:
        errors.print(report.keys_warning, style="yellow")
    if report.expired:
        errors.print(
            f"{report.expired} records are older than their topic's retention, and the broker will remove them again: "
            "--new-timestamps gives them the present time",
            style="yellow",
        )


def _known(topics: list[str]) -> list[str]:
    unknown = sorted(set(topics) - topic_definitions().keys())
    if unknown:
        raise SettingsError(f"there is no topic {', '.join(unknown)}; `clawstream topics list` shows those there are")
    return list(dict.fromkeys(topics))


def _kafka(config: ConfigOption) -> KafkaSettings:
    return load_system_settings(optional_config(config), os.environ).kafka


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True)
