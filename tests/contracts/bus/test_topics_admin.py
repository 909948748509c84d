"""`clawstream topics apply` on both buses: idempotent, corrects settings, never changes a partition count."""

import pytest

from clawstream.bus.interface import Bus, TopicSpecification
from clawstream.errors import TopicDefinitionError
from clawstream.topics import TURNS, WEIGHTS, topic_definitions
from clawstream.topics_admin import apply_topics

DEFINITIONS = list(topic_definitions().values())


def test_everything_is_created_once_and_the_second_time_nothing_changes(bus: Bus, namespace: str) -> None:
    admin = bus.admin()
    first = apply_topics(admin, namespace, 1, DEFINITIONS)
    assert sorted(first.created) == sorted(f"{namespace}.{definition.topic}" for definition in DEFINITIONS)
    second = apply_topics(admin, namespace, 1, DEFINITIONS)
    assert (second.created, second.updated) == ((), {})
    assert sorted(second.unchanged) == sorted(first.created)
    turns = admin.describe_topics([f"{namespace}.{TURNS}"])[f"{namespace}.{TURNS}"]
    assert turns.partitions == 12
    assert turns.config["max.message.bytes"] == "4194304"
    admin.close()


def test_a_changed_setting_is_corrected_and_others_are_left_alone(bus: Bus, namespace: str) -> None:
    name = f"{namespace}.{WEIGHTS}"
    admin = bus.admin()
    apply_topics(admin, namespace, 1, DEFINITIONS)
    admin.alter_topic_config(name, {"segment.ms": "60000", "flush.ms": "12345"})
    report = apply_topics(admin, namespace, 1, DEFINITIONS)
    assert report.updated == {name: {"segment.ms": "21600000"}}
    config = admin.describe_topics([name])[name].config
    assert (config["segment.ms"], config["flush.ms"]) == ("21600000", "12345")
    admin.close()


def test_another_partition_count_is_refused_with_both_numbers_and_nothing_is_done(bus: Bus, namespace: str) -> None:
    name = f"{namespace}.{TURNS}"
    admin = bus.admin()
    admin.create_topics([TopicSpecification(name, 5)])
    with pytest.raises(TopicDefinitionError, match=f"{name} has 5 partitions and is defined with 12"):
        apply_topics(admin, namespace, 1, DEFINITIONS)
    others = [f"{namespace}.{definition.topic}" for definition in DEFINITIONS if definition.topic != TURNS]
    assert admin.describe_topics(others) == {}
    admin.close()
