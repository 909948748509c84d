"""Conversations over a real Kafka, read back with kafka-python, which shares no code with what wrote it."""

import asyncio
from collections import Counter
from pathlib import Path

import orjson
import pytest
from kafka import KafkaConsumer as SecondOpinionConsumer
from kafka import TopicPartition as SecondOpinionPartition

from clawstream.bus.kafka import KafkaBus
from clawstream.settings import KafkaSettings
from schemas.events import TurnEvent
from tests.fixtures.conversations import assistant, create_topics, running_gateway, user

pytestmark = pytest.mark.kafka


def committed_values(bootstrap_servers: str, topic: str) -> dict[int, list[tuple[int, dict[str, object]]]]:
    """Offsets and values of all committed records, by partition."""
    consumer = SecondOpinionConsumer(
        bootstrap_servers=bootstrap_servers, isolation_level="read_committed", enable_auto_commit=False
    )
    partitions = [
        SecondOpinionPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())
    ]
    consumer.assign(partitions)
    ends = consumer.end_offsets(partitions)
    consumer.seek_to_beginning()
    found: dict[int, list[tuple[int, dict[str, object]]]] = {partition.partition: [] for partition in partitions}
    while any(consumer.position(partition) < ends[partition] for partition in partitions):
        for records in consumer.poll(timeout_ms=500).values():
            for record in records:
                found[record.partition].append((record.offset, orjson.loads(record.value)))
    consumer.close()
    return found


def kafka_bus(broker: str, namespace: str) -> KafkaBus:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=broker, namespace=namespace), client_id="test")
    create_topics(bus, namespace)
    return bus


async def test_two_gateways_serve_one_conversation(broker: str, namespace: str, tmp_path: Path) -> None:
    bus = kafka_bus(broker, namespace)
    turns: list[TurnEvent] = []
    async with (
        running_gateway(bus, tmp_path, name="one", namespace=namespace, other_gateway_wait_seconds=5) as one,
        running_gateway(bus, tmp_path, name="two", namespace=namespace, other_gateway_wait_seconds=5) as two,
    ):
        while not (one.conversations.is_ready() and two.conversations.is_ready()):
            await asyncio.sleep(0.02)
        turns.append(await one.answer([user("begin")], "answer number 0"))
        await two.answer([user("x")], "something unrelated to it")
        while not all(gateway.conversations.sees_other_gateways() for gateway in (one, two)):
            await asyncio.sleep(0.02)
        messages = [user("begin")]
        for number in range(1, 7):
            messages = [*messages, assistant(f"answer number {number - 1}"), user(f"go on {number}")]
            turns.append(await (one if number % 2 == 0 else two).answer(messages, f"answer number {number}"))

    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    written = committed_values(broker, f"{namespace}.turns.v1")
    places = {value["turn_id"]: (partition, offset) for partition, found in written.items() for offset, value in found}
    assert Counter(value["turn_id"] for found in written.values() for _, value in found).most_common(1)[0][1] == 1
    states = [value for found in committed_values(broker, f"{namespace}.next-states.v1").values() for _, value in found]
    assert sorted(str(state["turn_id"]) for state in states) == sorted(turn.turn_id for turn in turns[:-1])
    for state in states:
        reference = state["turn_ref"]
        assert isinstance(reference, dict)
        assert (reference["partition"], reference["offset"]) == places[state["turn_id"]]
