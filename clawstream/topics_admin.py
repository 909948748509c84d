"""Makes the broker's topics what their YAML files say. Run it as often as you like."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from clawstream.bus.interface import Admin, Bus, TopicSpecification
from clawstream.clock import Clock
from clawstream.errors import BusError, TopicDefinitionError
from clawstream.topics import TopicDefinition, full_name

_LEADER_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What `apply_topics` did, by full topic name."""

    created: tuple[str, ...]
    """Topics that were missing."""
    updated: dict[str, dict[str, str]]
    """Changed settings of topics that existed."""
    unchanged: tuple[str, ...]
    """Topics that were as defined."""


def apply_topics(
    admin: Admin,
    namespace: str,
    replication_factor: int,
    definitions: Iterable[TopicDefinition],
) -> ApplyReport:
    """Creates missing topics and corrects settings that differ; settings that no file names stay as they are.

    Nothing is changed when any partition count differs: keys would move to other partitions, so that order and
    compaction break. Raises TopicDefinitionError naming every such topic with both numbers, and BrokerUnavailable.
    """
    wanted = {full_name(namespace, definition.topic): definition for definition in definitions}
    existing = admin.describe_topics(list(wanted))
    wrong = [
        f"{name} has {existing[name].partitions} partitions and is defined with {definition.partitions}"
        for name, definition in wanted.items()
        if name in existing and existing[name].partitions != definition.partitions
    ]
    if wrong:
        raise TopicDefinitionError(
            f"{'; '.join(wrong)}. A partition count never changes: restore the definition, or define a new version "
            "of the topic"
        )
    missing = [name for name in wanted if name not in existing]
    admin.create_topics(
        [TopicSpecification(name, wanted[name].partitions, wanted[name].config, replication_factor) for name in missing]
    )
    updated: dict[str, dict[str, str]] = {}
    for name, description in existing.items():
        changes = {key: value for key, value in wanted[name].config.items() if description.config.get(key) != value}
        if changes:
            admin.alter_topic_config(name, changes)
            updated[name] = changes
    return ApplyReport(
        created=tuple(missing),
        updated=updated,
        unchanged=tuple(name for name in existing if name not in updated),
    )


def wait_until_readable(
    bus: Bus, namespace: str, definitions: Iterable[TopicDefinition], clock: Clock, *, timeout_seconds: float
) -> None:
    """Returns when every partition answers a reader.

    A topic that was just created has no leader for a moment; whoever reads it then is told so and would have to try
    again. Raises the last BusError when the time is over.
    """
    deadline_seconds = clock.monotonic_seconds() + timeout_seconds
    admin = bus.admin()
    consumer = bus.reader()
    try:
        for definition in definitions:
            name = full_name(namespace, definition.topic)
            while True:
                try:
                    for partition in admin.partitions(name):
                        consumer.watermarks(partition)
                    break
                except BusError:
                    if clock.monotonic_seconds() >= deadline_seconds:
                        raise
                    time.sleep(_LEADER_POLL_SECONDS)
    finally:
        consumer.close()
        admin.close()
