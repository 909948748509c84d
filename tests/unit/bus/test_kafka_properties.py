"""What exactly-once rests on is set, for every kind of client, and cannot be overridden."""

import pytest

from clawstream.bus import kafka_properties
from clawstream.errors import SettingsError

BASE = kafka_properties.common("127.0.0.1:9092", "judge-0", {"sasl.username": "judge"})


def test_consumers_read_committed_and_never_jump_or_commit_by_themselves() -> None:
    for properties in (
        kafka_properties.group_consumer(BASE, group="g", instance="i"),
        kafka_properties.reader(BASE),
        kafka_properties.follower(BASE),
    ):
        assert properties["isolation.level"] == "read_committed"
        assert properties["enable.auto.commit"] is False
        assert properties["enable.auto.offset.store"] is False
        assert properties["auto.offset.reset"] == "error"
        assert properties["sasl.username"] == "judge"


def test_who_waits_at_the_end_asks_seldom_and_who_seeks_is_not_held_up() -> None:
    waits = [
        properties["fetch.wait.max.ms"]
        for properties in (kafka_properties.reader(BASE), kafka_properties.follower(BASE))
    ]
    assert waits == [50, 500]


def test_members_are_static_classic_and_cooperative() -> None:
    properties = kafka_properties.group_consumer(BASE, group="g", instance="judge-0")
    assert properties["group.instance.id"] == "judge-0"
    assert properties["group.protocol"] == "classic"
    assert properties["partition.assignment.strategy"] == "cooperative-sticky"


def test_producers_partition_like_java_and_wait_for_all() -> None:
    for properties in (
        kafka_properties.producer(BASE),
        kafka_properties.transactional_producer(BASE, transactional_id="t"),
    ):
        assert properties["partitioner"] == "murmur2_random"
        assert properties["acks"] == "all"
        assert properties["enable.idempotence"] is True
        assert properties["compression.type"] == "zstd"


def test_a_slow_end_of_transaction_is_noticed_before_its_request_can_be_given_up() -> None:
    properties = kafka_properties.transactional_producer(BASE, transactional_id="t")
    assert int(properties["socket.timeout.ms"]) > kafka_properties.SLOW_END_OF_TRANSACTION_SECONDS * 1000
    assert int(properties["transaction.timeout.ms"]) > int(properties["socket.timeout.ms"])


def test_every_forbidden_property_is_named_at_once() -> None:
    wrong = {"isolation.level": "read_uncommitted", "partitioner": "consistent", "sasl.username": "fine"}
    with pytest.raises(SettingsError, match=r"isolation\.level, partitioner cannot be changed"):
        kafka_properties.common("127.0.0.1:9092", "x", wrong)


def test_what_is_not_forbidden_overrides_our_defaults() -> None:
    own = {"max.poll.interval.ms": "600000", "session.timeout.ms": "30000", "linger.ms": "20", "retry.backoff.ms": "50"}
    base = kafka_properties.common("127.0.0.1:9092", "x", own)
    consumer = kafka_properties.group_consumer(base, group="g", instance="i")
    assert (consumer["max.poll.interval.ms"], consumer["session.timeout.ms"]) == ("600000", "30000")
    assert kafka_properties.producer(base)["linger.ms"] == "20"
    assert kafka_properties.transactional_producer(base, transactional_id="t")["retry.backoff.ms"] == "50"
    default = kafka_properties.group_consumer(BASE, group="g", instance="i")
    assert default["max.poll.interval.ms"] == 300_000
