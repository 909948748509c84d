"""A broker that is away for long, under load: the chat goes on, the outbox is bounded, nothing is lost or reordered."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawstream import topics
from clawstream.audit.kafka_log import KafkaLog
from clawstream.broker import LocalBroker
from clawstream.bus.interface import Record
from clawstream.codec import decode_as
from clawstream.errors import MissingDependencyError
from clawstream.process_identity import free_ports
from schemas.events import TurnEvent
from tests.faults.chaos import Chaos
from tests.faults.chat import Chat, answers
from tests.faults.waiting import committed, is_ready, metric, wait_until
from tests.fixtures.broker import missing
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.stub_engine import StubEngine

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

USERS = 6
SMALL_OUTBOX_BYTES = 250_000


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """One that a test may kill."""
    made = LocalBroker(tmp_path / "kafka", ends_with_parent=True)
    try:
        made.start()
    except MissingDependencyError as error:
        missing(str(error))
    yield made
    made.stop()


@dataclass
class Supervised:
    """A worker that is started again when it ends, as a supervisor does: one that was fenced must end."""

    start: Callable[[], ServiceProcess]

    def __post_init__(self) -> None:
        self.now = self.start()

    def tend(self) -> None:
        if self.now.process.poll() is not None:
            self.now = self.start()


def kill(broker: LocalBroker) -> None:
    process = broker.running()
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)


def ends(records: list[Record]) -> dict[int, int]:
    return {record.partition: record.offset + 1 for record in records}


@pytest.mark.parametrize(
    ("seconds", "outbox_bytes"),
    [
        pytest.param(5.0, SMALL_OUTBOX_BYTES, id="until-the-outbox-is-full"),
        pytest.param(60.0, 64_000_000, id="for-a-minute", marks=pytest.mark.chaos_full),
        pytest.param(60.0, SMALL_OUTBOX_BYTES, id="for-a-minute-with-a-full-outbox", marks=pytest.mark.chaos_full),
    ],
)
async def test_a_broker_that_is_away_stops_no_chat_and_loses_nothing(
    seconds: float,
    outbox_bytes: int,
    own_broker: LocalBroker,
    namespace: str,
    tiny_model_directory: Path,
    tmp_path: Path,
    start_service: Callable[..., ServiceProcess],
    chaos: Chaos,
) -> None:
    servers = own_broker.bootstrap_servers
    log = JudgedLog(kafka_bus(servers, "tests"), namespace)
    await asyncio.to_thread(log.create_topics)
    port, operations = free_ports(2)
    url, operations_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{operations}"
    async with StubEngine(max_context_tokens=100_000, default_answer=answers(seed=1)) as engine:
        kafka = f'[kafka]\nbootstrap_servers = "{servers}"\nnamespace = "{namespace}"\n'
        gateway = start_service(
            "gateway",
            f"""\
data_directory = "{tmp_path / "data"}"
{kafka}
[gateway]
model_path = "{tiny_model_directory}"
port = {port}
operations_port = {operations}
max_context_tokens = 100000
engine_deadlines = {{ connect_seconds = 120.0 }}
engines = [{{ name = "one", url = "{engine.base_url}" }}]
conversations = {{ outbox_max_bytes = {outbox_bytes}, outbox_segment_bytes = 20000 }}
""",
        )
        rules = '[judge]\nspec = { backend = "rules", rules = [["th", -1]] }\n'
        workers = [
            Supervised(lambda: start_service("judge", kafka + rules)),
            Supervised(lambda: start_service("teacher", kafka + "[teacher]\n")),
        ]
        await asyncio.to_thread(wait_until, lambda: is_ready(url), "the gateway serves", gateway)
        async with Chat(url, USERS) as chat:
            await chat.hears(10 * USERS)
            kill(own_broker)
            unrecorded_before = len(chat.unrecorded)  # A busy machine drains slowly.
            back_at = time.monotonic() + seconds
            largest = 0.0
            while time.monotonic() < back_at or (
                outbox_bytes == SMALL_OUTBOX_BYTES and len(chat.unrecorded) == unrecorded_before
            ):
                await chat.hears(USERS)
                largest = max(largest, await asyncio.to_thread(metric, operations_url, "clawstream_outbox_bytes"))
            on_disk = sum(each.stat().st_size for each in (tmp_path / "data").rglob("*.segment"))
            assert on_disk <= outbox_bytes + 2 * 20_000, "the files hold the bound and what was drained before"
            assert largest <= outbox_bytes
            await asyncio.to_thread(own_broker.start)
            before = len(chat.recorded)
            await chat.until(lambda: len(chat.recorded) >= before + 5 * USERS)
        assert chat.refused == 0, "chat must go on"
        await asyncio.to_thread(
            wait_until, lambda: metric(operations_url, "clawstream_outbox_entries") == 0, "all is on the log", gateway
        )
        assert await asyncio.to_thread(gateway.stop) == 0, gateway.text()
    second_opinion = await asyncio.to_thread(KafkaLog, servers, namespace)
    for stage, topic in (("judge", topics.NEXT_STATES), ("teacher", topics.SCORES)):
        due = ends(await asyncio.to_thread(read_all, log.bus, log.topic(topic)))

        def all_is_handled(stage: str = stage, due: dict[int, int] = due) -> bool:
            for each in workers:
                each.tend()
            return committed(second_opinion, stage) == due

        await asyncio.to_thread(wait_until, all_is_handled, f"the {stage} has handled all")
    for each in workers:
        assert await asyncio.to_thread(each.now.stop) == 0, each.now.text()
    await asyncio.to_thread(second_opinion.close)

    records = await asyncio.to_thread(read_all, log.bus, log.topic(topics.TURNS))
    turns = [decode_as(record, TurnEvent) for record in records]
    for number, said in enumerate(chat.said):
        on_log = [turn.response_id for turn in turns if turn.session_id == f"user-{number}"]
        known = set(said.recorded)
        assert [each for each in on_log if each in known] == said.recorded, "as they were answered, none lost"
        assert set(on_log) <= known | set(said.unrecorded)
    await asyncio.to_thread(chaos.audited, servers, namespace)
    chaos.counts.faults_survived += 1
