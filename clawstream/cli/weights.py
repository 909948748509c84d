"""`clawstream weights`: published versions, and going back to one."""

import os
from collections import defaultdict
from typing import Annotated

import typer
from rich.table import Table

from clawstream.bus.kafka import KafkaBus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.clock import SystemClock
from clawstream.supervisor.settings import SystemSettings, load_system_settings
from clawstream.weights.on_log import WeightsOnLog, read_heartbeats, read_weights, release, roll_back

app = typer.Typer(help="Published weights, and going back to an older version.", no_args_is_help=True)


@app.command("list")
def list_versions(config: ConfigOption = None) -> None:
    """Lists the published versions, which one should be in service, and which engines serve them."""
    settings, bus = _open(config)
    namespace, policy = settings.kafka.namespace, settings.policy
    found = read_weights(bus, namespace, policy)
    now = SystemClock().now()
    engines: dict[int | None, list[str]] = defaultdict(list)
    for beat in read_heartbeats(bus, namespace, policy):
        engines[beat.weight_version].append(beat.engine if beat.expires_at > now else f"({beat.engine}, expired)")
    if not found.versions:
        output.print(f"no version of policy {policy!r} is on the log ({namespace}.*); the TOML file names the policy")
        return
    table = Table("version", "based on", "published", "should be served", "engines", "files", box=None)
    for number, event in found.versions.items():
        table.add_row(
            str(number),
            "" if event.base_version is None else str(event.base_version),
            event.published_at.strftime("%Y-%m-%d %H:%M:%S"),
            _mark(number, found),
            ", ".join(engines.pop(number, [])),
            event.artefact_uri,
        )
    output.print(table)
    for number, names in engines.items():
        output.print(f"version {'unknown' if number is None else number} is on {', '.join(names)}")
    rollback = found.pointer.rollback
    if rollback is not None:
        reason = f" ({rollback.reason})" if rollback.reason else ""
        output.print(
            f"Rolled back to version {rollback.weight_version}{reason}: it is held until `clawstream weights release`."
        )


@app.command()
def rollback(
    version: Annotated[int, typer.Argument(help="The published version to go back to.", min=0)],
    config: ConfigOption = None,
    reason: Annotated[str, typer.Option(help="Why, for people.")] = "",
) -> None:
    """Puts an older version into service and holds it there, whatever is trained meanwhile, until it is released."""
    settings, bus = _open(config)
    roll_back(bus, settings.kafka.namespace, settings.policy, version, reason=reason, now=SystemClock().now())
    output.print(f"Version {version} goes into service now and is held; `clawstream weights release` ends that.")


@app.command("release")
def release_rollback(config: ConfigOption = None) -> None:
    """Ends a rollback: the newest trained version goes into service again."""
    settings, bus = _open(config)
    newest = release(bus, settings.kafka.namespace, settings.policy)
    output.print(f"Version {newest or 0} goes into service now, and every version that is trained after it.")


def _open(config: ConfigOption) -> tuple[SystemSettings, KafkaBus]:
    settings = load_system_settings(optional_config(config), os.environ)
    return settings, KafkaBus(settings.kafka, client_id="weights")


def _mark(number: int, found: WeightsOnLog) -> str:
    if number == found.pointer.version:
        return "yes, held" if found.pointer.rollback is not None else "yes"
    return "after the release" if number == found.pointer.trained_version else ""
