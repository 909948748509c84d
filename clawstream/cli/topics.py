"""`clawstream topics`: the topics of the log."""

import os
import socket
import uuid
from collections.abc import Collection
from typing import Annotated

import typer
from rich.table import Table

from clawstream.bus.interface import Bus
from clawstream.bus.kafka import KafkaBus
from clawstream.cli.options import ConfigOption
from clawstream.cli.terminal import optional_config, output
from clawstream.clock import SystemClock
from clawstream.deployment import claim_namespace
from clawstream.settings import KafkaSettings
from clawstream.supervisor.settings import load_system_settings
from clawstream.topics import DEPLOYMENT, TopicDefinition, full_name, topic_definitions
from clawstream.topics_admin import ApplyReport, apply_topics, wait_until_readable

_LEADER_TIMEOUT_SECONDS = 60.0

app = typer.Typer(help="The topics of the log.", no_args_is_help=True)


@app.command()
def apply(
    config: ConfigOption = None,
    claim: Annotated[
        bool, typer.Option("--claim", help="Refuse when the topics belong to another data directory, as `up` does.")
    ] = False,
    join: Annotated[
        bool, typer.Option("--join", help="This data directory belongs to the system whose topics these are.")
    ] = False,
) -> None:
    """Creates the topics that are missing and corrects their settings. Run it as often as you like."""
    settings = load_system_settings(optional_config(config), os.environ)
    kafka = settings.kafka
    bus = KafkaBus(kafka, client_id="topics")
    definitions = dict(topic_definitions())
    reports: list[ApplyReport] = []
    if claim or join:
        # Before the others are touched: a system that is refused must not leave its settings on another's topics.
        reports.append(_apply(bus, kafka, [definitions.pop(DEPLOYMENT)]))
        claim_namespace(
            bus,
            kafka.namespace,
            settings.data_directory,
            host=socket.gethostname(),
            now=SystemClock().now(),
            id_source=uuid.uuid4,
            joins=join,
        )
    reports.append(_apply(bus, kafka, definitions.values()))
    created = [name for report in reports for name in report.created]
    updated = {name: changes for report in reports for name, changes in report.updated.items()}
    unchanged = [name for report in reports for name in report.unchanged]
    for name in created:
        output.print(f"created {name}")
    for name, changes in updated.items():
        output.print(f"changed {name}: {', '.join(f'{key}={value}' for key, value in sorted(changes.items()))}")
    output.print(f"{len(created)} created, {len(updated)} changed, {len(unchanged)} unchanged")


def _apply(bus: Bus, kafka: KafkaSettings, definitions: Collection[TopicDefinition]) -> ApplyReport:
    admin = bus.admin()
    try:
        report = apply_topics(admin, kafka.namespace, kafka.replication_factor, definitions)
    finally:
        admin.close()
    wait_until_readable(bus, kafka.namespace, definitions, SystemClock(), timeout_seconds=_LEADER_TIMEOUT_SECONDS)
    return report


@app.command("list")
def list_topics(
    config: ConfigOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also descriptions.")] = False,
) -> None:
    """Lists the topics that the schemas define: needs no broker."""
    settings = load_system_settings(optional_config(config), os.environ)
    table = Table("topic", "key", "partitions", "policy", "written by", "read by", box=None)
    for definition in topic_definitions().values():
        table.add_row(
            full_name(settings.kafka.namespace, definition.topic),
            definition.key,
            str(definition.partitions),
            definition.config.get("cleanup.policy", ""),
            ", ".join(definition.producers),
            ", ".join(definition.consumers),
        )
        if verbose:
            table.add_row(f"  {definition.description}")
    output.print(table)
