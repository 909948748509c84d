"""Single requests to the broker are held, dropped and cut: transactions stay whole, and every input ends once."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaConsumer  # The second opinion.

from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.errors import BusError, MissingDependencyError
from clawstream.process_identity import free_port
from clawstream.worker.outcomes import Outcome
from clawstream.worker.settings import WorkerSettings
from tests.faults.chaos import Chaos
from tests.fixtures.broker import missing, short_lived_broker
from tests.fixtures.buses import create_topic, kafka_bus
from tests.fixtures.kafka_proxy import PATIENCE_SECONDS, ApiKey, Fault, KafkaProxy
from tests.fixtures.workers import FunctionHandler, Scene, eventually, running

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(500)]

INPUTS = 60
PARTITIONS = 4


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaProxy]:
    """In front of a broker that sends every client to it."""
    port = free_port()
    made = KafkaProxy(port)
    directory: Path = tmp_path_factory.mktemp("proxied-kafka")
    broker = short_lived_broker(directory, port, advertised_port=made.port)
    try:
        broker.start()
    except MissingDependencyError as error:
        missing(str(error))
    yield made
    broker.stop()
    made.close()


def committed_values(servers: str, topic: str) -> list[str]:
    """What readers of committed records see now, by partition and offset."""
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=servers,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        group_id=None,
        consumer_timeout_ms=3000,
    )
    try:
        found = sorted((record.partition, record.offset, record.value.decode()) for record in consumer)
        return [value for _, _, value in found]
    finally:
        consumer.close()


@pytest.mark.parametrize("guard", [False, True], ids=["without-the-guard", "with-the-guard"])
def test_a_held_end_of_transaction_tears_the_next_one_unless_the_producer_is_replaced(
    proxy: KafkaProxy, chaos: Chaos, guard: bool
) -> None:
    bus = kafka_bus(proxy.bootstrap_servers, "torn")
    topic = create_topic(bus, f"torn-{uuid.uuid4().hex[:8]}")
    transactional_id = f"id-{topic}"
    producer = bus.transactional_producer(transactional_id)
    held = proxy.add(ApiKey.END_TXN, Fault.HOLD)
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"key", b"A"))
    producer.commit()
    assert held.hit.is_set()
    assert producer.needs_replacement, "a commit that slow must be noticed"

    if guard:
        producer.close()
        producer = bus.transactional_producer(transactional_id)
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"key", b"B, never committed"))
    producer.flush(30)
    held.release()
    if guard:
        producer.abort()
        assert committed_values(proxy.bootstrap_servers, topic) == ["A"]
        chaos.counts.faults_survived += 1
    else:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while committed_values(proxy.bootstrap_servers, topic) != ["A", "B, never committed"]:
            assert time.monotonic() < deadline, "the torn transaction did not show: is the guard still needed?"
        with contextlib.suppress(BusError):
            producer.abort()
    producer.close()


FAULTS = [
    (ApiKey.END_TXN, Fault.CUT),
    (ApiKey.END_TXN, Fault.DROP_ANSWER),
    (ApiKey.TXN_OFFSET_COMMIT, Fault.CUT),
    (ApiKey.TXN_OFFSET_COMMIT, Fault.DROP_ANSWER),
    (ApiKey.ADD_PARTITIONS_TO_TXN, Fault.DROP_ANSWER),
    (ApiKey.ADD_OFFSETS_TO_TXN, Fault.CUT),
    (ApiKey.PRODUCE, Fault.CUT),
    (ApiKey.PRODUCE, Fault.DROP_ANSWER),
    (ApiKey.INIT_PRODUCER_ID, Fault.DROP_ANSWER),
    (ApiKey.HEARTBEAT, Fault.CUT),
    (ApiKey.OFFSET_FETCH, Fault.DELAY),
]


async def test_whatever_request_is_lost_every_input_comes_out_once_and_in_order(
    proxy: KafkaProxy, chaos: Chaos
) -> None:
    scene = Scene(kafka_bus(proxy.bootstrap_servers, "chaos"), f"chaos-{uuid.uuid4().hex[:8]}", partitions=PARTITIONS)

    async def handle(record: Record) -> Outcome:
        await asyncio.sleep(0.001 * (record.offset % 5))
        return scene.echo(record)

    handler = FunctionHandler(handle)
    written: dict[int, list[str]] = {partition: [] for partition in range(PARTITIONS)}
    met: list[str] = []
    async with running(scene.worker(handler, settings=WorkerSettings(max_results_per_transaction=20))):
        for api_key, fault in FAULTS:
            rule = proxy.add(api_key, fault)
            for partition in range(PARTITIONS):
                values = [f"{partition}/{api_key.name}/{fault}/{number}" for number in range(INPUTS // PARTITIONS)]
                await asyncio.to_thread(scene.write, *values, partition=partition)
                written[partition] += values
            total = sum(len(values) for values in written.values())
            await eventually(lambda total=total: sum(scene.committed().values()) >= total, f"{api_key.name} {fault}")
            if rule.hit.is_set():
                met.append(f"{api_key.name} {fault}")
    outputs = await asyncio.to_thread(committed_values, proxy.bootstrap_servers, scene.outputs)
    assert outputs == [value for values in written.values() for value in values]
    assert len(handler.handled) == len(outputs), "an abort must not have an input handled again"
    assert {name.split()[0] for name in met} >= {"END_TXN", "TXN_OFFSET_COMMIT", "ADD_PARTITIONS_TO_TXN", "PRODUCE"}
    chaos.counts.faults_survived += len(met)
    chaos.counts.records_checked += len(outputs)
