"""Exactly once over real Kafka: workers are killed, and a client that shares no code with ours reads the result."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable

import pytest
from kafka import KafkaConsumer  # The second opinion.

from clawstream.codec import header
from tests.fixtures.workers import Scene
from tests.flow.worker.conftest import PATIENCE_SECONDS, StartWorker

pytestmark = pytest.mark.kafka

INPUTS_PER_PARTITION = 150
PARTITIONS = 4


class SecondOpinion:
    """kafka-python, reading committed records of one topic as they come."""

    def __init__(self, broker: str, topic: str) -> None:
        self._consumer = KafkaConsumer(
            topic,
            bootstrap_servers=broker,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            group_id=None,
        )
        self.values: dict[int, list[str]] = {number: [] for number in range(PARTITIONS)}

    @property
    def count(self) -> int:
        return sum(len(values) for values in self.values.values())

    def read_until(self, enough: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not enough():
            assert time.monotonic() < deadline, f"not in time: {what}; {self.count} records were read"
            for records in self._consumer.poll(timeout_ms=100).values():
                for record in records:
                    self.values[record.partition].append(record.value.decode())

    def close(self) -> None:
        self._consumer.close()


def write_inputs(scene: Scene) -> dict[int, list[str]]:
    """Every tenth is poison. Returns all values by partition."""
    inputs = {
        partition: [
            f"{'poison/' if number % 10 == 5 else ''}{partition}/{number}" for number in range(INPUTS_PER_PARTITION)
        ]
        for partition in range(PARTITIONS)
    }
    for partition, values in inputs.items():
        scene.write(*values, partition=partition)
    return inputs


def without_poison(inputs: dict[int, list[str]]) -> dict[int, list[str]]:
    return {
        partition: [value for value in values if not value.startswith("poison")] for partition, values in inputs.items()
    }


def test_every_input_comes_out_once_in_order_though_workers_are_killed(
    broker: str, scene: Scene, start_worker: StartWorker
) -> None:
    inputs = write_inputs(scene)
    expected = without_poison(inputs)
    workers = {name: start_worker(name) for name in ("worker-0", "worker-1")}
    outputs = SecondOpinion(broker, scene.outputs)
    for kill_at, name in ((20, "worker-0"), (120, "worker-1"), (220, "worker-0"), (320, "worker-0")):
        outputs.read_until(lambda at=kill_at: outputs.count >= at, f"{kill_at} outputs")
        workers[name].signal(signal.SIGKILL)
        workers[name].wait(120)
        workers[name] = start_worker(name)
    total = sum(len(values) for values in expected.values())
    outputs.read_until(lambda: outputs.count >= total, "all outputs")

    for worker in workers.values():
        worker.wait_until_reading()
        worker.signal(signal.SIGTERM)
    assert [worker.wait(60) for worker in workers.values()] == [0, 0], "a graceful stop"
    assert scene.committed() == dict.fromkeys(range(PARTITIONS), INPUTS_PER_PARTITION)
    assert [*scene.written()] == [value for values in expected.values() for value in values]
    assert outputs.values == expected, "both clients see the same"
    buried = scene.buried()
    poison = Counter(value for values in inputs.values() for value in values if value.startswith("poison"))
    assert Counter((record.value or b"").decode() for record in buried) == poison
    assert {header(record.headers, "dlq.error.type") for record in buried} == {"DecodeError"}
    outputs.close()


def test_a_signal_stops_gracefully_and_a_second_one_at_once(
    broker: str, scene: Scene, start_worker: StartWorker
) -> None:
    scene.write("a", "hang", "b")
    worker = start_worker("worker-0")
    outputs = SecondOpinion(broker, scene.outputs)
    outputs.read_until(lambda: outputs.values[0] == ["a"], "the first output")
    worker.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(1.0)  # It waits for what is under way: two minutes, as these workers are told.
    worker.signal(signal.SIGTERM)
    assert worker.wait(120) == -signal.SIGTERM
    assert scene.committed() == {0: 1}
    assert scene.written() == ["a"]
    outputs.close()


def test_of_two_workers_under_one_name_the_older_ends_with_an_error(scene: Scene, start_worker: StartWorker) -> None:
    scene.write("a")
    older = start_worker("worker-0")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while scene.written() != ["a"]:
        assert time.monotonic() < deadline
    newer = start_worker("worker-0")
    scene.write("b")
    assert older.wait(PATIENCE_SECONDS) == 1
    while scene.written() != ["a", "b"]:
        assert time.monotonic() < deadline
    newer.wait_until_reading()
    newer.signal(signal.SIGTERM)
    assert newer.wait(60) == 0
