"""A disk that is full, for real: the chat goes on, training waits, and nothing half-written is believed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawstream import topics
from clawstream.process_identity import free_ports
from schemas.events import TrainStepEvent, TurnEvent
from tests.faults.chaos import Chaos
from tests.faults.chat import Chat, answers
from tests.faults.waiting import is_ready, wait_until
from tests.fixtures.configuration import small_trainer_toml
from tests.fixtures.judged_history import write_samples
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.small_disk import SmallDisk
from tests.fixtures.stub_engine import StubAnswer, StubEngine
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

USERS = 3
BIG_ANSWER_TOKENS = 70_000
"""Its ids and log-probs are over the limit of what travels inside an event."""

StartService = Callable[..., ServiceProcess]


async def ask(url: str, history: list[dict[str, str]], user: str) -> tuple[list[dict[str, str]], httpx.Response]:
    """The conversation with the question and its answer, and the response. No header says which session it is."""
    asked = [*history, {"role": "user", "content": user}]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        body = {"model": "default", "messages": asked, "max_tokens": 100_000}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()["choices"][0]["message"]["content"]
    return [*asked, {"role": "assistant", "content": answer}], response


async def test_a_gateway_whose_disk_is_full_goes_on_and_recovers(
    log: JudgedLog,
    broker: str,
    namespace: str,
    tiny_model_directory: Path,
    tmp_path: Path,
    start_service: StartService,
    small_disk: Callable[[int], SmallDisk],
    chaos: Chaos,
) -> None:
    disk = await asyncio.to_thread(small_disk, 16 << 20)
    ports = free_ports(6)
    urls = [f"http://127.0.0.1:{port}" for port in ports[:3]]
    async with StubEngine(max_context_tokens=400_000, default_answer=answers(seed=1)) as engine:

        def start(number: int) -> ServiceProcess:
            data = (disk.path, tmp_path, disk.path)[number] / "data"
            return start_service(
                "gateway",
                f"""\
data_directory = "{data}"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[gateway]
name = "gateway-{number}"
model_path = "{tiny_model_directory}"
port = {ports[number]}
operations_port = {ports[3 + number]}
max_context_tokens = 400000
engine_deadlines = {{ connect_seconds = 120.0 }}
engines = [{{ name = "one", url = "{engine.base_url}" }}]
conversations = {{ outbox_segment_bytes = 20000, index_secret_file = "{tmp_path / "secret"}" }}
""",
            )

        full = start(0)
        await asyncio.to_thread(wait_until, lambda: is_ready(urls[0]), "the gateway serves", full)
        other = start(1)
        await asyncio.to_thread(wait_until, lambda: is_ready(urls[1]), "the other gateway serves", full, other)
        async with Chat(urls[0], USERS, prefix="full") as chat, Chat(urls[1], USERS, prefix="other") as at_other:
            await chat.hears(5 * USERS)
            assert not chat.unrecorded
            disk.fill()
            await chat.until(lambda: chat.unrecorded)
            # What the drain gives back is taken, too, until there is nothing left to drain.
            while not await asyncio.to_thread(keeps_nothing_more, chat, disk):
                await chat.hears(USERS)
            history, first = await ask(urls[1], [], "something that only the other gateway has heard of?")
            await at_other.hears(5 * USERS)
            await asyncio.to_thread(
                wait_until, lambda: "the turn index cannot be written" in full.text(), "the index is full", full
            )
            big = StubAnswer(
                token_ids=[70 + index % 20 for index in range(BIG_ANSWER_TOKENS)],
                finish={"type": "length", "length": BIG_ANSWER_TOKENS},
                tokens_per_chunk=1000,
            )
            engine.enqueue(big)
            await chat.until(lambda: not engine.answers)
            await chat.hears(2 * USERS)
            assert full.process.poll() is None, full.text()
            assert await asyncio.to_thread(is_alive, urls[0])
            assert not list(disk.path.rglob(".writing-*")), "half a blob"
            disk.free()
            before = len(chat.recorded)
            await chat.until(lambda: len(chat.recorded) >= before + 5 * USERS)

        async def at_the_full_one() -> httpx.Response:
            return (await ask(urls[0], history, "and now?"))[1]

        session = first.headers["x-clawstream-session-id"]
        for _ in range(100):  # The index catches up.
            if (await at_the_full_one()).headers["x-clawstream-session-id"] == session:
                break
            await asyncio.sleep(0.2)
        else:
            pytest.fail(f"what the other gateway served is not found:\n{full.text()[-4000:]}")
        full.kill()
        disk.fill()
        again, new = start(0), start(2)
        for each in (again, new):
            await asyncio.to_thread(wait_until, lambda each=each: waits_for_space(each), "it waits for space", each)
        disk.free()
        for url, each in ((urls[0], again), (urls[2], new)):
            await asyncio.to_thread(wait_until, lambda url=url: is_ready(url), "the gateway serves", each)
        for each in (again, new, other):
            assert await asyncio.to_thread(each.stop) == 0, each.text()

    turns = await asyncio.to_thread(log.events, topics.TURNS, TurnEvent)
    ids = [turn.response_id for turn in turns]
    assert len(ids) == len(set(ids))
    assert chat.recorded | at_other.recorded <= set(ids), "what was called recorded is on the log"
    assert not at_other.unrecorded
    await asyncio.to_thread(chaos.audited, broker, namespace)
    chaos.counts.faults_survived += 1


def waits_for_space(gateway: ServiceProcess) -> bool:
    """Before it serves (one with new files), or with an index that it cannot write; it says so again and again."""
    assert gateway.process.poll() is None, gateway.text()
    return gateway.text().count("disk is full") > 1


def is_alive(url: str) -> bool:
    return httpx.get(f"{url}/healthz", timeout=10).status_code == 200


def keeps_nothing_more(chat: Chat, disk: SmallDisk) -> bool:
    """Whether the last answers of all users were not recorded, on a disk that is full again."""
    disk.fill()
    return all(said.last_is_unrecorded for said in chat.said)


@pytest.mark.parametrize("refuses_as", ["a full disk", "a quota"])
def test_a_trainer_whose_disk_is_full_waits_and_goes_on(
    log: JudgedLog,
    broker: str,
    namespace: str,
    tmp_path: Path,
    start_service: StartService,
    small_disk: Callable[[int], SmallDisk],
    quota: dict[str, str],
    chaos: Chaos,
    refuses_as: str,
) -> None:
    disk = small_disk(16 << 20)
    model = save_tiny_model("qwen3", tmp_path / "model")
    numbers = [number for number in range(54) if number % 3]  # every third is neutral, and makes no sample
    write_samples(log, broker, numbers[:12])
    toml = small_trainer_toml(disk.path / "data", broker, namespace, model)
    environment: dict[str, Any] = {"OMP_NUM_THREADS": "1"} | (quota if refuses_as == "a quota" else {})
    trainer = start_service("trainer", toml, environment)

    def trained() -> int:
        return sum(len(step.samples) for step in log.events(topics.TRAIN_STEPS, TrainStepEvent))

    def waits(which: ServiceProcess) -> None:
        before = which.text().count("the disk is full")
        wait_until(lambda: which.text().count("the disk is full") > before, "it waits", which)
        assert not list(disk.path.rglob(".partial-*")), "half a file"

    wait_until(lambda: trained() == 12, "the first steps are made", trainer)
    disk.fill()
    write_samples(log, broker, numbers[12:24])
    waits(trainer)
    assert trained() == 12
    disk.free()
    wait_until(lambda: trained() == 24, "it goes on", trainer)

    disk.fill()
    write_samples(log, broker, numbers[24:])
    waits(trainer)
    trainer.kill()
    successor = start_service("trainer", toml, environment)
    waits(successor)
    assert trained() == 24
    disk.free()
    wait_until(lambda: trained() == 36, "its successor goes on", successor)
    assert successor.stop() == 0, successor.text()
    steps = log.events(topics.TRAIN_STEPS, TrainStepEvent)
    assert [step.step for step in steps] == list(range(1, 13))
    report = chaos.audited(broker, namespace)
    assert report.training == {"trained": 36}
    chaos.counts.faults_survived += 2
