"""A turn of 150,000 tokens passes gateway, log, judge, teacher and the trainer's assembly."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from clawstream import topics
from clawstream.process_identity import free_ports
from schemas.events import TurnEvent
from schemas.events.turn import UntrainableReason
from services.trainer.candidates import Candidate, CandidateRules, read_candidate
from services.trainer.packing import pack
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.stub_engine import StubAnswer, StubEngine

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

ANSWER_TOKENS = 75_000
QUESTION_WORDS = 76_000
CONTEXT_TOKENS = 400_000


def settings(broker: str, namespace: str, model: Path, data: Path, engine: str, port: int, operations: int) -> str:
    return f"""
data_directory = "{data}"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[gateway]
model_path = "{model}"
port = {port}
operations_port = {operations}
max_context_tokens = {CONTEXT_TOKENS}
engines = [{{ name = "one", url = "{engine}" }}]
[judge]
spec = {{ backend = "rules", rules = [["thanks", 1], ["no", -1]] }}
"""


async def until(condition: Callable[[], Any], *processes: ServiceProcess) -> None:
    while not await asyncio.to_thread(condition):
        for each in processes:
            assert each.process.poll() is None, each.text()
        await asyncio.sleep(0.1)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


async def test_a_turn_of_150_000_tokens_is_trained(
    broker: str,
    namespace: str,
    tiny_model_directory: Path,
    tmp_path: Path,
    start_service: Callable[..., ServiceProcess],
) -> None:
    log = JudgedLog(kafka_bus(broker, "tests"), namespace)
    await asyncio.to_thread(log.create_topics)
    port, operations = free_ports(2)
    answer = StubAnswer(
        token_ids=[70 + index % 20 for index in range(ANSWER_TOKENS)],
        logprobs=[-(index % 1000) / 100 for index in range(ANSWER_TOKENS)],
        finish={"type": "length", "length": ANSWER_TOKENS},
        tokens_per_chunk=1000,
    )
    async with StubEngine(max_context_tokens=CONTEXT_TOKENS) as engine:
        engine.enqueue(answer)
        toml = settings(broker, namespace, tiny_model_directory, tmp_path / "data", engine.base_url, port, operations)
        gateway = start_service("gateway", toml)
        workers = [
            start_service(name, toml.replace(f"operations_port = {operations}", "")) for name in ("judge", "teacher")
        ]
        url = f"http://127.0.0.1:{port}"
        await until(lambda: is_ready(url), gateway)
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=300)
        history: list[Any] = [{"role": "user", "content": "long " * QUESTION_WORDS}]
        first = await client.chat.completions.create(model="default", messages=history, max_tokens=ANSWER_TOKENS)
        text = first.choices[0].message.content
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "thanks, exactly"}]
        await client.chat.completions.create(model="default", messages=history, max_tokens=8)
        await client.close()
        await until(lambda: log.samples(), gateway, *workers)
        prompt_ids, second_prompt_ids = (request["input_ids"] for request in engine.requests)
    assert len(prompt_ids) + ANSWER_TOKENS > 150_000
    assert second_prompt_ids[: len(prompt_ids)] == prompt_ids

    record, _ = read_all(log.bus, log.topic(topics.TURNS))
    turn = TurnEvent.model_validate_json(record.value or b"")
    assert turn.trainable, turn.untrainable_reason
    assert turn.untrainable_reason is not UntrainableReason.OVERSIZED
    for array in (turn.prompt_ids, turn.response_ids, turn.response_logprobs):
        assert array.blob is not None
    assert len(record.value or b"") < 600_000, "the texts; the arrays alone would be 1.2 MB"

    (sample,) = read_all(log.bus, log.topic(topics.SAMPLES))
    rules = CandidateRules(
        policy="default", tokenizer_fingerprint="", vocabulary_size=1 << 20, max_sample_tokens=200_000
    )
    candidate = read_candidate(sample, rules, newest_published=0)
    assert isinstance(candidate, Candidate), candidate
    assert candidate.reward == 1.0
    np.testing.assert_array_equal(candidate.sample.prompt_ids, prompt_ids)
    np.testing.assert_array_equal(candidate.sample.response_ids, answer.token_ids)
    np.testing.assert_array_equal(candidate.sample.behaviour_log_probs, np.asarray(answer.logprobs, dtype=np.float32))
    row = pack([(candidate.sample.prompt_ids, candidate.sample.response_ids)])
    assert row.token_ids.size == candidate.sample.num_tokens == len(prompt_ids) + ANSWER_TOKENS - 1
