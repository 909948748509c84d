"""The weight gate's election and its log on a real broker."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.settings import KafkaSettings
from clawstream.topics import topic_definitions
from clawstream.topics_admin import apply_topics, wait_until_readable
from tests.fixtures.gates import GateEngine, running_gate, until, versions
from tests.fixtures.weights import make_artefact, pointer_record, version_record

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def publish(bus: KafkaBus, root: Path, version: int, namespace: str) -> None:
    """In a transaction, as the trainer does: its control records take offsets too."""
    producer = bus.transactional_producer(f"{namespace}.trainer.trainer")
    producer.begin()
    producer.produce(version_record(make_artefact(root, version), namespace))
    producer.produce(pointer_record(version, namespace))
    producer.commit()
    producer.close()


async def test_two_gateways_one_owner_and_a_successor(broker: str, namespace: str, tmp_path: Path) -> None:
    settings = KafkaSettings(bootstrap_servers=broker, namespace=namespace)
    buses = [KafkaBus(settings, client_id=f"gateway-{number}") for number in range(2)]
    admin = buses[0].admin()
    apply_topics(admin, namespace, 1, topic_definitions().values())
    admin.close()
    wait_until_readable(buses[0], namespace, topic_definitions().values(), SystemClock(), timeout_seconds=60)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(GateEngine()) for _ in range(2)]
        gates = [AsyncExitStack(), AsyncExitStack()]
        running = [
            await gates[number].enter_async_context(
                running_gate(buses[number], engines, gateway=f"gateway-{number}", namespace=namespace)
            )
            for number in range(2)
        ]
        for gate in running:
            await until(gate, lambda gate=gate: versions(gate) == [0, 0], timeout_seconds=90)
        await asyncio.to_thread(publish, buses[0], tmp_path, 1, namespace)
        for gate in running:
            await until(gate, lambda gate=gate: versions(gate) == [1, 1], timeout_seconds=90)
        assert sorted(gate.is_owner for gate in running) == [False, True]
        assert [engine.loads() for engine in engines] == [["1"], ["1"]]

        owner = next(number for number, gate in enumerate(running) if gate.is_owner)
        await gates[owner].aclose()
        await asyncio.to_thread(publish, buses[0], tmp_path, 2, namespace)
        successor = running[1 - owner]
        assert versions(successor) == [1, 1], "nobody is without an engine while the gate has no owner"
        await until(successor, lambda: versions(successor) == [2, 2], timeout_seconds=90)
        assert successor.is_owner
        assert [engine.loads() for engine in engines] == [["1", "2"], ["1", "2"]]
        await gates[1 - owner].aclose()
