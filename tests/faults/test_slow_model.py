"""A judge model slower than the poll interval: the judge stays a member, and no call is made twice."""

import asyncio
import re
import time
from collections.abc import Callable

import pytest

from clawstream.audit.kafka_log import KafkaLog
from tests.faults.chaos import Chaos
from tests.faults.load import write_replies
from tests.faults.slow_model import SlowModel
from tests.faults.waiting import committed, positions, wait_until
from tests.fixtures.buses import kafka_bus
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

POLL_INTERVAL_SECONDS = 6.0
"""The broker allows no shorter session, and a session may not be longer than the poll interval."""
INPUTS = 120
VOTES = 3


@pytest.mark.parametrize(
    ("judges", "poll_intervals"),
    [pytest.param(1, 2, id="one-judge"), pytest.param(2, 5, id="two-judges", marks=pytest.mark.chaos_full)],
)
async def test_a_model_slower_than_the_poll_interval_costs_no_membership_and_no_second_call(
    judges: int,
    poll_intervals: int,
    broker: str,
    namespace: str,
    start_service: Callable[..., ServiceProcess],
    chaos: Chaos,
) -> None:
    log = JudgedLog(kafka_bus(broker, "tests"), namespace)
    await asyncio.to_thread(log.create_topics)
    milliseconds = round(1000 * POLL_INTERVAL_SECONDS)
    async with SlowModel() as model:
        toml = f"""\
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
client_properties = {{ "max.poll.interval.ms" = "{milliseconds}", "session.timeout.ms" = "{milliseconds}" }}
[judge]
spec = {{ backend = "openai", model = "slow", votes = {VOTES} }}
model = {{ urls = ["{model.base_url}"], max_concurrent_calls = 1000 }}
worker = {{ deadline_seconds = 420 }}
"""
        running = [start_service("judge", f'{toml}name = "judge-{number}"\n') for number in range(judges)]

        def all_have_a_share() -> bool:
            return sum(shares(each) for each in running) == 12 and all(shares(each) for each in running)

        await asyncio.to_thread(wait_until, all_have_a_share, "the partitions are shared out", *running)
        told = [each.text().count("partitions ") for each in running]
        inputs = await asyncio.to_thread(write_replies, log, range(INPUTS))
        await asyncio.to_thread(
            wait_until, lambda: model.answers_asked_for == VOTES * INPUTS, "all votes are asked for", *running
        )
        # The time itself is what is tested: nothing can be awaited that tells that a poll interval has passed.
        until = time.monotonic() + poll_intervals * POLL_INTERVAL_SECONDS
        while time.monotonic() < until:
            assert all(each.process.poll() is None for each in running)
            await asyncio.sleep(0.2)
        model.may_answer.set()
        second_opinion = await asyncio.to_thread(KafkaLog, broker, namespace)
        due = positions(inputs)
        await asyncio.to_thread(
            wait_until, lambda: committed(second_opinion, "judge") == due, "all is scored", *running
        )
        assert [each.text().count("partitions ") for each in running] == told, "a rebalance came of it"
        for each in running:
            assert await asyncio.to_thread(each.stop) == 0, each.text()
        await asyncio.to_thread(second_opinion.close)
        assert model.answers_asked_for == VOTES * INPUTS
    report = await asyncio.to_thread(chaos.audited, broker, namespace)
    assert report.handled["judge"] == {"output": INPUTS, "waiting": 0}
    chaos.counts.faults_survived += 1


def shares(judge: ServiceProcess) -> int:
    """Partitions that a judge holds, by its log."""
    held = 0
    for event, partitions in re.findall(r"partitions (assigned|revoked|lost).*?partitions=\[(.*?)\] ", judge.text()):
        count = partitions.count("next-states")
        held += count if event == "assigned" else -count
    return held
