"""A process stands still in the middle of its work while another takes over: nothing is lost, nothing comes twice."""

import signal
from collections.abc import Callable

import psutil
import pytest

from clawstream.audit.kafka_log import KafkaLog
from clawstream.crash_points.point import ALLOWED, CRASH_AT, SIGNAL
from tests.faults.chaos import Chaos
from tests.faults.waiting import wait_until
from tests.fixtures.buses import kafka_bus
from tests.fixtures.judged_history import write_next_states
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]


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
