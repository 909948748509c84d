"""A pause ends with the assignment it belongs to, also when the partition comes back."""

import pytest

from clawstream.bus.interface import Bus, Consumer, TopicPartition
from tests.fixtures.buses import (
    PATIENCE_ROUNDS,
    Rebalances,
    consume_count,
    create_topic,
    kafka_bus,
    write_each,
)

PARTITIONS = 4

pytestmark = pytest.mark.kafka


def _join(bus: Bus, topic: str, group: str, instance: str) -> tuple[Consumer, Rebalances]:
    rebalances = Rebalances()
    return bus.group_consumer([topic], group=group, instance=instance, callbacks=rebalances.callbacks()), rebalances


def _poll_until_held(polled: list[Consumer], held: Rebalances, count: int) -> None:
    for _ in range(PATIENCE_ROUNDS):
        if len(held.held) == count:
            return
        for consumer in polled:
            consumer.consume(100, 0.1)
    raise AssertionError(held.events)


def test_a_paused_partition_that_left_and_came_back_is_read(broker: str, namespace: str) -> None:
    bus = kafka_bus(broker, namespace)
    topic = create_topic(bus, f"{namespace}.paused.v1", PARTITIONS)
    first, first_held = _join(bus, topic, f"{namespace}.g", "i-0")
    _poll_until_held([first], first_held, PARTITIONS)
    first.pause(first.assignment())
    second, second_held = _join(bus, topic, f"{namespace}.g", "i-1")
    _poll_until_held([first, second], second_held, PARTITIONS // 2)
    left = set(second_held.held)
    second.close()
    # The group keeps a static member's place for the session timeout; then the partitions come back.
    _poll_until_held([first], first_held, PARTITIONS)
    write_each(bus, topic, {partition: [b"value"] for partition in range(PARTITIONS)})
    came = {record.topic_partition for record in consume_count(first, len(left))}
    assert came == left, "what stayed is still paused"
    first.resume(sorted({TopicPartition(topic, each) for each in range(PARTITIONS)} - left))
    assert len(consume_count(first, PARTITIONS - len(left))) == PARTITIONS - len(left)
    first.close()
