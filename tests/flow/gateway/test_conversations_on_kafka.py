"""Conversations over a real Kafka, read back with kafka-python, which shares no code with what wrote it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from kafka import KafkaConsumer as SecondOpinionConsumer
from kafka.structs import TopicPartition as SecondOpinionPartition

from clawstream.bus.kafka import KafkaBus
from clawstream.settings import KafkaSettings
from schemas.events import TurnEvent
from tests.fixtures.broker import short_lived_broker
from tests.fixtures.conversations import assistant, create_topics, running_gateway, until, user

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
    while any((consumer.position(partition) or 0) < ends[partition] for partition in partitions):
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
        await until(lambda: one.conversations.is_ready() and two.conversations.is_ready())
        turns.append(await one.answer([user("begin")], "answer number 0"))
        await two.answer([user("x")], "something unrelated to it")
        await until(lambda: all(gateway.conversations.sees_other_gateways() for gateway in (one, two)))
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


@dataclass(frozen=True)
class Acknowledged:
    session_id: str
    turn_id: str
    parent_turn_id: str | None


def acknowledged(line: str) -> Acknowledged:
    session_id, turn_id, parent = line.split()
    return Acknowledged(session_id, turn_id, None if parent == "None" else parent)


def is_whole(line: str) -> bool:
    """An acknowledgement, not a line of the log and not half a line."""
    return line.startswith("session-") and line.endswith("\n")


def start_chatting(broker: str, namespace: str, directory: Path, *turns: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.flow.gateway.chatting_gateway", broker, namespace, str(directory), *turns]
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": "."},
    )


def chat_until_killed(broker: str, namespace: str, directory: Path, after_turns: int) -> list[Acknowledged]:
    """Kills the process when it acknowledged so many turns. Counts what it said before it died."""
    process = start_chatting(broker, namespace, directory)
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        if is_whole(line):
            lines.append(line)
        if len(lines) == after_turns:
            process.kill()
    assert process.wait() == -signal.SIGKILL, "the process ended by itself"
    return [acknowledged(line) for line in lines]


@pytest.mark.slow
def test_kill_nine_loses_no_acknowledged_turn_and_writes_none_twice(
    broker: str, namespace: str, tmp_path: Path
) -> None:
    kafka_bus(broker, namespace)
    spoken: list[Acknowledged] = []
    for after_turns in (5, 40, 150):
        spoken += chat_until_killed(broker, namespace, tmp_path, after_turns)
    last = start_chatting(broker, namespace, tmp_path, "10")
    output, _ = last.communicate(timeout=120)
    assert last.returncode == 0
    spoken += [acknowledged(line) for line in output.splitlines(keepends=True) if is_whole(line)]

    written = committed_values(broker, f"{namespace}.turns.v1")
    places: dict[str, tuple[int, int]] = {}
    by_session: dict[str, list[str]] = {}
    for partition, found in written.items():
        for offset, value in found:
            turn_id = str(value["turn_id"])
            assert turn_id not in places, f"{turn_id} is on the log twice"
            places[turn_id] = (partition, offset)
            by_session.setdefault(str(value["session_id"]), []).append(turn_id)
    for session_id in {one.session_id for one in spoken}:
        order = [one.turn_id for one in spoken if one.session_id == session_id]
        assert [turn_id for turn_id in by_session[session_id] if turn_id in set(order)] == order

    followed: set[str] = set()
    for found in committed_values(broker, f"{namespace}.next-states.v1").values():
        for _, state in found:
            reference = state["turn_ref"]
            assert isinstance(reference, dict)
            assert (reference["partition"], reference["offset"]) == places[str(state["turn_id"])]
            assert state["next_state_id"] not in followed, "a next state is on the log twice"
            followed.add(str(state["next_state_id"]))
            followed.add(str(state["turn_id"]))
    assert {one.parent_turn_id for one in spoken if one.parent_turn_id is not None} <= followed


@pytest.mark.slow
async def test_a_broker_outage_stops_no_chat_and_loses_nothing(namespace: str, tmp_path: Path) -> None:
    turns: list[TurnEvent] = []
    with short_lived_broker(tmp_path / "kafka") as own_broker:
        bus = kafka_bus(own_broker.bootstrap_servers, namespace)
        async with running_gateway(bus, tmp_path, namespace=namespace) as gateway:
            messages = [user("begin")]
            for number in range(30):
                if number == 10:
                    assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, 60)
                    await asyncio.to_thread(own_broker.kill)
                if number == 25:
                    await asyncio.to_thread(own_broker.start)
                turns.append(await gateway.answer(messages, f"answer number {number}"))
                messages = [*messages, assistant(f"answer number {number}"), user(f"go on {number}")]
            assert await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, 120)
        written = committed_values(own_broker.bootstrap_servers, f"{namespace}.turns.v1")
    assert [turn.parent_turn_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    (in_order,) = [found for found in written.values() if found]
    assert [value["turn_id"] for _, value in in_order] == [turn.turn_id for turn in turns]
