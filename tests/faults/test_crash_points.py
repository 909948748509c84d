"""Every process is killed at every point that matters, started again, and the whole log is audited.

The cases without the mark `chaos_full` are the reduced form; `make chaos` runs all. Which ones are reduced is drawn by
CLAWSTREAM_CHAOS_SEED (default 1), at least one of each process.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAIError

from clawstream import topics
from clawstream.audit.kafka_log import KafkaLog
from clawstream.bus.interface import Delivery
from clawstream.crash_points.point import ALLOWED, CRASH_AT
from clawstream.process_identity import free_ports
from schemas.events import TrainStepEvent, TurnEvent
from tests.faults.chaos import Chaos
from tests.faults.waiting import PATIENCE_SECONDS, is_ready, positions, wait_until
from tests.fixtures.configuration import kafka_toml, small_trainer_toml
from tests.fixtures.judged_history import write_next_states, write_samples, write_scores
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.stub_engine import StubAnswer, StubEngine
from tests.numerics.trainer.tiny_models import save_tiny_model

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

INPUTS = 60
SAMPLES = 12
CONVERSATIONS = 6
BIG_ANSWER_TOKENS = 70_000
REDUCED_CASES = {"judge": 2, "teacher": 1, "trainer": 2, "gateway": 2}

StartService = Callable[..., ServiceProcess]


@dataclass(frozen=True)
class Case:
    """Where a process ends."""

    service: str
    point: str
    passes: int = 1

    def __str__(self) -> str:
        return f"{self.service}-{self.point}-{self.passes}"

    @property
    def environment(self) -> dict[str, str]:
        return {CRASH_AT: f"{self.point}:{self.passes}", ALLOWED: "yes-this-is-a-test"}


WORKER_POINTS = [
    ("after-consume", 1),
    ("after-answer", 1),
    ("after-answer", 30),
    ("after-begin", 2),
    ("after-produce", 5),
    ("after-flush", 2),
    ("after-send-offsets", 2),
    ("before-commit", 1),
    ("before-commit", 3),
    ("after-commit", 2),
    ("in-revoke", 1),
    ("after-revoke", 1),
]
CASES = [
    *(Case(service, *each) for service in ("judge", "teacher") for each in WORKER_POINTS),
    *(
        Case("trainer", *each)
        for each in [
            ("before-checkpoint", 1),
            ("before-checkpoint", 2),
            ("after-turn-ledger", 2),
            ("after-turn-ledger", 3),
            ("after-checkpoint", 1),
            ("after-checkpoint", 3),
            ("before-weights-event", 2),
            ("after-begin", 2),
            ("after-produce", 5),
            ("after-flush", 3),
            ("before-commit", 1),
            ("after-commit", 2),
            ("after-weights-event", 3),
        ]
    ),
    # A gateway's first transaction writes the position of its new outbox.
    *(
        Case("gateway", *each)
        for each in [
            ("before-outbox-sync", 3),
            ("after-outbox-sync", 3),
            ("after-outbox-sync", 5),
            ("after-begin", 2),
            ("after-produce", 3),
            ("after-flush", 2),
            ("before-commit", 2),
            ("after-commit", 2),
            ("after-commit", 3),
            ("before-blob-write", 1),
            ("after-blob-write", 1),
        ]
    ),
]


def cases(services: Iterable[str]) -> list[Any]:
    """Those of some services; all but the drawn ones are for the full run."""
    draw = random.Random(os.environ.get("CLAWSTREAM_CHAOS_SEED", "1"))
    reduced = {
        each
        for service, count in REDUCED_CASES.items()
        for each in draw.sample([case for case in CASES if case.service == service], count)
    }
    return [
        pytest.param(case, id=str(case), marks=() if case in reduced else pytest.mark.chaos_full)
        for case in CASES
        if case.service in services
    ]


def dies(process: ServiceProcess, case: Case) -> None:
    """By its own hand, where it should."""
    code = process.process.wait(PATIENCE_SECONDS)
    assert code == -signal.SIGKILL, f"exit {code}:\n{process.text()[-4000:]}"
    assert f"crash point {case.point} reached" in process.text()


@pytest.mark.parametrize("case", cases(["judge", "teacher"]))
def test_a_worker_that_dies_there_loses_nothing_and_doubles_nothing(
    case: Case, log: JudgedLog, broker: str, namespace: str, start_service: StartService, chaos: Chaos
) -> None:
    toml = (
        kafka_toml(broker, namespace)
        + f"[{case.service}]\nworker = {{ max_results_per_transaction = 10, deadline_seconds = 420 }}\n"
    )
    if case.service == "judge":
        toml += 'spec = { backend = "rules", rules = [["thanks", 1], ["no", -1]] }\n'

    def write(numbers: range) -> list[Delivery]:
        if case.service == "judge":
            return write_next_states(log, numbers)
        return [delivery for _, delivery in write_scores(log, broker, numbers)]

    inputs = write(range(INPUTS))
    second_opinion = KafkaLog(broker, namespace)

    def committed() -> dict[int, int]:
        return dict(second_opinion.committed()[case.service])

    doomed = start_service(case.service, toml, case.environment)
    if case.point.endswith("revoke"):
        wait_until(lambda: committed() == positions(inputs), "all is handled", doomed)
        doomed.process.send_signal(signal.SIGTERM)
    dies(doomed, case)
    inputs += write(range(INPUTS, INPUTS + 20))  # So that there is something left to do, wherever it died.
    survivor = start_service(case.service, toml)
    wait_until(lambda: committed() == positions(inputs), "all is handled", survivor)
    assert survivor.stop() == 0, survivor.text()
    second_opinion.close()

    report = chaos.audited(broker, namespace)
    counts = report.handled[case.service]
    assert counts["waiting"] == 0
    assert counts["output"] + counts.get("skip", 0) + counts.get("dead letter", 0) == len(inputs)
    chaos.counts.crashes_survived += 1


@pytest.mark.parametrize("case", cases(["trainer"]))
def test_a_trainer_that_dies_there_trains_each_turn_once(
    case: Case, log: JudgedLog, broker: str, namespace: str, start_service: StartService, chaos: Chaos, tmp_path: Path
) -> None:
    model = save_tiny_model("qwen3", tmp_path / "model")
    write_samples(log, broker, [number for number in range(2 * SAMPLES) if number % 3][:SAMPLES])
    toml = small_trainer_toml(tmp_path / "data", broker, namespace, model)
    environment = {"OMP_NUM_THREADS": "1"}

    def steps() -> list[TrainStepEvent]:
        return log.events(topics.TRAIN_STEPS, TrainStepEvent)

    dies(start_service("trainer", toml, {**environment, **case.environment}), case)
    survivor = start_service("trainer", toml, environment)
    wait_until(lambda: sum(len(step.samples) for step in steps()) == SAMPLES, "all is trained", survivor)
    assert survivor.stop() == 0, survivor.text()

    report = chaos.audited(broker, namespace)
    assert report.training == {"trained": SAMPLES}
    assert [step.step for step in steps()] == list(range(1, SAMPLES // 3 + 1))
    chaos.counts.crashes_survived += 1


async def conversation(client: AsyncOpenAI, number: int) -> set[str]:
    """A question, an answer and a reply; asked again until it is answered whole. Returns the response ids."""
    history: list[Any] = [{"role": "user", "content": f"question {number}?"}]
    delivered: set[str] = set()
    for follow_up in ("thanks", None):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                answer = await client.chat.completions.create(model="default", messages=history, max_tokens=100_000)
            except OpenAIError:
                assert time.monotonic() < deadline, "no answer"
                await asyncio.sleep(0.1)
            else:
                break
        delivered.add(answer.id)
        history += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": follow_up},
        ]
    return delivered


@pytest.mark.parametrize("case", cases(["gateway"]))
async def test_a_gateway_that_dies_there_loses_no_delivered_answer(
    case: Case,
    log: JudgedLog,
    broker: str,
    namespace: str,
    start_service: StartService,
    chaos: Chaos,
    tmp_path: Path,
    tiny_model_directory: Path,
) -> None:
    big = "blob" in case.point
    tokens = [70 + index % 20 for index in range(BIG_ANSWER_TOKENS if big else 8)]
    answer = StubAnswer(token_ids=tokens, finish={"type": "length", "length": len(tokens)}, tokens_per_chunk=1000)
    port, operations = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    async with StubEngine(max_context_tokens=400_000, default_answer=lambda request: answer) as engine:
        toml = f'data_directory = "{tmp_path / "data"}"\n' + kafka_toml(broker, namespace)
        toml += f"""[gateway]
model_path = "{tiny_model_directory}"
port = {port}
operations_port = {operations}
max_context_tokens = 400000
engines = [{{ name = "one", url = "{engine.base_url}" }}]
"""
        doomed = start_service("gateway", toml, case.environment)
        await asyncio.to_thread(wait_until, lambda: is_ready(url), "the gateway serves", doomed)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
            talks = [asyncio.create_task(conversation(client, number)) for number in range(1 if big else CONVERSATIONS)]
            await asyncio.to_thread(dies, doomed, case)
            survivor = start_service("gateway", toml)
            # The conversations may be over already, and what is told to stop before it serves drains nothing.
            await asyncio.to_thread(wait_until, lambda: is_ready(url), "the gateway serves again", survivor)
            delivered = set().union(*await asyncio.gather(*talks))
        assert await asyncio.to_thread(survivor.stop) == 0, survivor.text()

    turns = await asyncio.to_thread(log.events, topics.TURNS, TurnEvent)
    assert delivered <= {turn.response_id for turn in turns}
    assert len({turn.turn_id for turn in turns}) == len(turns)
    await asyncio.to_thread(chaos.audited, broker, namespace)
    chaos.counts.crashes_survived += 1


def test_the_reduced_form_has_cases_of_every_process() -> None:
    chosen = [each for each in cases(REDUCED_CASES) if not each.marks]
    assert {each.values[0].service for each in chosen} == set(REDUCED_CASES)
    assert len(chosen) == sum(REDUCED_CASES.values())
