"""A process that stands still while others take over, and a broker that is away: nothing lost, nothing twice."""

import asyncio
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clawstream.audit.kafka_log import KafkaLog
from clawstream.broker import LocalBroker
from clawstream.bus.interface import Record
from clawstream.crash_points.point import ALLOWED, CRASH_AT, SIGNAL
from clawstream.worker.outcomes import Outcome
from clawstream.worker.settings import WorkerSettings
from tests.faults.chaos import Chaos
from tests.fixtures.buses import kafka_bus
from tests.fixtures.judged_history import write_next_states
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.workers import FunctionHandler, Scene, eventually, running

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(500)]

PATIENCE_SECONDS = 240.0
PARTITIONS = 4
INPUTS = 200


def wait_until(condition: Callable[[], bool], what: str, *processes: ServiceProcess) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        for each in processes:
            assert each.process.poll() is None, f"{what}: a process ended:\n{each.text()[-4000:]}"
        assert time.monotonic() < deadline, f"in vain: {what}\n" + "\n".join(each.text()[-4000:] for each in processes)
        time.sleep(0.1)


@pytest.mark.parametrize(
    "point",
    [
        "before-commit:2",
        pytest.param("after-answer:5", marks=pytest.mark.chaos_full),
        pytest.param("after-send-offsets:1", marks=pytest.mark.chaos_full),
        pytest.param("after-consume:1", marks=pytest.mark.chaos_full),
    ],
)
def test_a_judge_that_stood_still_while_another_took_over_writes_nothing_when_it_goes_on(
    point: str, broker: str, namespace: str, start_service: Callable[..., ServiceProcess], chaos: Chaos
) -> None:
    log = JudgedLog(kafka_bus(broker, "tests"), namespace)
    log.create_topics()
    toml = f"""\
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
worker = {{ max_results_per_transaction = 10, deadline_seconds = 420 }}
"""
    second_opinion = KafkaLog(broker, namespace)
    due: dict[int, int] = {}

    def write(numbers: range) -> None:
        for each in write_next_states(log, numbers):
            due[each.partition] = max(due.get(each.partition, 0), each.offset + 1)

    def all_is_handled() -> bool:
        return dict(second_opinion.committed()["judge"]) == due

    write(range(60))
    environment = {CRASH_AT: point, ALLOWED: "yes-this-is-a-test", SIGNAL: "SIGSTOP"}
    zombie = start_service("judge", toml, environment)
    process = psutil.Process(zombie.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "it stands still", zombie)
    successor = start_service("judge", toml + 'name = "judge-b"\n')
    wait_until(all_is_handled, "another has taken over", successor)

    zombie.process.send_signal(signal.SIGCONT)
    write(range(60, 90))
    wait_until(all_is_handled, "what came later is handled", successor)
    assert successor.stop() == 0, successor.text()
    if zombie.process.poll() is None:
        zombie.kill()
    second_opinion.close()
    report = chaos.audited(broker, namespace)
    assert report.handled["judge"]["waiting"] == 0
    chaos.counts.faults_survived += 1


@pytest.mark.parametrize("seconds", [25.0, pytest.param(60.0, marks=pytest.mark.chaos_full)])
async def test_a_broker_that_is_away_under_load_costs_nothing(seconds: float, tmp_path: Path, chaos: Chaos) -> None:
    """25 seconds are longer than a session and than a transaction may be open."""
    broker = LocalBroker(tmp_path, ends_with_parent=True)
    servers = await asyncio.to_thread(broker.start)
    try:
        scene = Scene(kafka_bus(servers, "outage"), f"outage-{uuid.uuid4().hex[:8]}", partitions=PARTITIONS)
        values = {
            partition: [f"{partition}/{number}" for number in range(INPUTS // PARTITIONS)]
            for partition in range(PARTITIONS)
        }
        for partition, each in values.items():
            await asyncio.to_thread(scene.write, *each, partition=partition)

        async def handle(record: Record) -> Outcome:
            await asyncio.sleep(0.05)
            return scene.echo(record)

        settings = WorkerSettings(max_in_flight=4, max_results_per_transaction=10)
        async with running(scene.worker(FunctionHandler(handle), settings=settings)):
            await eventually(lambda: sum(scene.committed().values()) > 0, "some are handled")
            await asyncio.to_thread(broker.kill)
            await asyncio.sleep(seconds)  # The outage itself: there is nothing to await.
            await asyncio.to_thread(broker.start)
            await eventually(lambda: sum(scene.committed().values()) == INPUTS, "all are handled")
        expected = [value for partition in range(PARTITIONS) for value in values[partition]]
        assert await asyncio.to_thread(scene.written) == expected
        chaos.counts.faults_survived += 1
        chaos.counts.records_checked += len(expected)
    finally:
        await asyncio.to_thread(broker.stop)
