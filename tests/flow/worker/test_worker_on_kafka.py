"""The worker in this process over real Kafka: what the bus in memory cannot prove."""

import asyncio
import random

import pytest

from clawstream.bus.interface import Record, TopicPartition
from clawstream.codec import header
from clawstream.worker.outcomes import Outcome
from clawstream.worker.settings import WorkerSettings
from tests.fixtures.buses import kafka_bus
from tests.fixtures.workers import FunctionHandler, Scene, eventually, running, text

pytestmark = pytest.mark.kafka


async def test_outputs_come_in_the_order_of_inputs(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        await asyncio.sleep(0.001 * (record.offset % 5))
        return scene.echo(record)

    for partition in range(4):
        scene.write(*(f"{partition}/{number}" for number in range(100)), partition=partition)
    async with running(scene.worker(FunctionHandler(handle))):
        await eventually(lambda: scene.committed() == dict.fromkeys(range(4), 100), "all committed")
    assert scene.written() == [f"{partition}/{number}" for partition in range(4) for number in range(100)]


async def test_an_output_that_the_broker_refuses_makes_a_dead_letter_and_the_others_are_written_once(
    broker: str, namespace: str
) -> None:
    scene = Scene(kafka_bus(broker, namespace), namespace, output_limit="2000")

    async def handle(record: Record) -> Outcome:
        # Hardly compressible: the broker's limit is on what is compressed.
        suffix = random.Random(1).randbytes(10_000).hex()
        return scene.echo(record, suffix if text(record) == "big" else "")

    scene.write("a", "big", "b")
    handler = FunctionHandler(handle)
    async with running(scene.worker(handler)):
        await eventually(lambda: scene.committed() == {0: 3}, "committed")
    assert scene.written() == ["a", "b"]
    assert handler.handled == ["a", "big", "b"], "nothing is handled again"
    assert [(record.value, header(record.headers, "dlq.reason")) for record in scene.buried()] == [(b"big", "oversize")]


async def test_work_moves_to_a_second_worker_and_back_without_loss(scene: Scene) -> None:
    async def handle(record: Record) -> Outcome:
        await asyncio.sleep(0.002)
        return scene.echo(record)

    first = scene.worker(FunctionHandler(handle), name="worker-0", settings=WorkerSettings(max_in_flight=8))
    second_handler = FunctionHandler(handle)
    second = scene.worker(second_handler, name="worker-1", settings=WorkerSettings(max_in_flight=8))
    for partition in range(4):
        scene.write(*(f"{partition}/{number}" for number in range(200)), partition=partition)
    async with running(first):
        await eventually(lambda: len(scene.written()) > 50, "the first works")
        async with running(second):
            await eventually(lambda: len(second.status().get("partitions", [])) == 2, "the second has its share")
            await eventually(lambda: scene.committed() == dict.fromkeys(range(4), 200), "all committed")
    assert second_handler.assigned
    assert scene.written() == [f"{partition}/{number}" for partition in range(4) for number in range(200)]


async def test_the_handler_is_told_what_was_committed(scene: Scene) -> None:
    scene.write("a", "b", partition=2)
    handler = FunctionHandler(lambda record: _echo(scene, record))
    async with running(scene.worker(handler)):
        await eventually(lambda: scene.committed() == {2: 2}, "committed")
    again = FunctionHandler(lambda record: _echo(scene, record))
    async with running(scene.worker(again)):
        await eventually(lambda: bool(again.assigned), "assigned")
    assert again.assigned[0][TopicPartition(scene.inputs, 2)] == 2
    assert again.assigned[0][TopicPartition(scene.inputs, 0)] is None
    assert again.handled == []


async def _echo(scene: Scene, record: Record) -> Outcome:
    return scene.echo(record)
