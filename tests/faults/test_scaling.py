"""Judges and teachers come and go under load: every input is scored once, and the backlog is worked off."""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import pytest

from clawstream import topics
from clawstream.audit.kafka_log import KafkaLog
from clawstream.bus.interface import Record
from clawstream.codec import header
from tests.faults.chaos import Chaos
from tests.faults.load import Load
from tests.faults.waiting import committed, positions, wait_until
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

RULES = 'spec = { backend = "rules", rules = [["thanks", 1], ["no", -1]] }\n'


@pytest.mark.parametrize(
    ("services", "added"),
    [
        pytest.param(("judge",), 1, id="one-two-one"),
        pytest.param(("judge", "teacher"), 2, id="one-three-one", marks=pytest.mark.chaos_full),
    ],
)
def test_workers_scaled_out_and_back_under_load_handle_every_input_once(
    services: tuple[str, ...],
    added: int,
    broker: str,
    namespace: str,
    start_service: Callable[..., ServiceProcess],
    chaos: Chaos,
) -> None:
    log = JudgedLog(kafka_bus(broker, "tests"), namespace)
    log.create_topics()
    second_opinion = KafkaLog(broker, namespace)

    def start(service: str, name: str) -> ServiceProcess:
        toml = f'[kafka]\nbootstrap_servers = "{broker}"\nnamespace = "{namespace}"\n[{service}]\nname = "{name}"\n'
        toml += "worker = { max_results_per_transaction = 10, deadline_seconds = 420 }\n"
        return start_service(service, toml + (RULES if service == "judge" else ""))

    def handled(service: str) -> int:
        return sum(committed(second_opinion, service).values())

    def further(service: str, offsets: int, *running: ServiceProcess) -> None:
        goal = handled(service) + offsets
        wait_until(lambda: handled(service) >= goal, f"the {service} goes on", *running)

    with ExitStack() as stack:
        load = stack.enter_context(Load(log))
        stayed = [start(service, f"{service}-0") for service in services]
        for service in services:
            further(service, 50, *stayed)
        came = [start(service, f"{service}-{number}") for number in range(1, added + 1) for service in services]
        for each in came:
            wait_until(lambda each=each: "partitions assigned" in each.text(), "it has its share", *stayed, *came)
        for service in services:
            further(service, 150, *stayed, *came)
        for number, each in enumerate(came):
            if number % 2:
                each.kill()
            else:
                assert each.stop() == 0, each.text()
        for service in services:
            further(service, 50, *stayed)
    wait_until(lambda: committed(second_opinion, "judge") == positions(load.written), "the backlog is done", *stayed)
    scores = read_all(log.bus, log.topic(topics.SCORES))
    if "teacher" in services:
        ends = {record.partition: record.offset + 1 for record in scores}
        wait_until(lambda: committed(second_opinion, "teacher") == ends, "the scores are done", *stayed)
    for each in stayed:
        assert each.stop() == 0, each.text()
    second_opinion.close()

    assert len(scores) == len(load.written)
    assert writers(scores) == {f"judge/judge-{number}" for number in range(added + 1)}, "everybody took part"
    assert in_order(scores)
    report = chaos.audited(broker, namespace)
    assert report.handled["judge"] == {"output": len(load.written), "waiting": 0}
    if "teacher" in services:
        assert report.handled["teacher"] == {"output": len(load.written), "waiting": 0}
    chaos.counts.faults_survived += 2 * added * len(services)


def writers(records: list[Record]) -> set[str]:
    return {str(header(record.headers, "ce_source")) for record in records}


def in_order(scores: list[Record]) -> bool:
    """Scores of a session stand in the order of its turns: their numbers rise."""
    of_session: dict[bytes, list[int]] = {}
    for record in scores:
        assert record.key is not None
        number = int(record.value.decode().partition('"turn_id":"turn-')[2].partition('"')[0]) if record.value else -1
        of_session.setdefault(record.key, []).append(number)
    return all(first < second for numbers in of_session.values() for first, second in pairwise(numbers))
