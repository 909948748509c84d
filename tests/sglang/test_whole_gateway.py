"""The gateway as a process in front of the real SGLang: people chat while the weights change under them."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from clawstream.bus.kafka import KafkaBus
from clawstream.engine.client import HttpEngineClient
from clawstream.errors import TokenIdRefused
from clawstream.rendering.tokenizer import load_tokenizer
from clawstream.settings import KafkaSettings
from schemas.events import TurnEvent
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.system import free_ports, wait_for
from tests.fixtures.turns import turns_on_log
from tests.fixtures.weights import make_artefact, pointer_record, version_record, write
from tests.numerics.engine.reference import Reference
from tests.sglang.conftest import TOLERANCE, Sglang

pytestmark = pytest.mark.kafka


@dataclass(frozen=True, slots=True)
class Chatting:
    """A gateway that is ready."""

    url: str
    kafka: str
    namespace: str
    process: ServiceProcess

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120)

    def turns(self) -> list[TurnEvent]:
        return turns_on_log(self.kafka, self.namespace)

    def engine(self) -> dict[str, Any]:
        """What the gate says of SGLang."""
        return httpx.get(f"{self.url}/status").json()["gate"]["engines"]["sglang"]

    def publish(self, root: Path, version: int, model: Path) -> None:
        bus = KafkaBus(KafkaSettings(bootstrap_servers=self.kafka, namespace=self.namespace), client_id="publisher")
        event = make_artefact(root, version, model)
        write(bus, version_record(event, self.namespace), pointer_record(version, self.namespace))

    def wait_for_version(self, version: int) -> None:
        def serves() -> bool:
            engine = self.engine()
            return engine["ready"] and engine["weight_version"] == version

        wait_for(serves, f"the gate says that SGLang serves version {version}")


@pytest.fixture
def chatting(
    sglang: Sglang, broker: str, namespace: str, start_service: Callable[..., ServiceProcess], tmp_path: Path
) -> Chatting:
    port, operations_port = free_ports(2)
    toml = f"""
data_directory = "data"
[kafka]
bootstrap_servers = "{broker}"
namespace = "{namespace}"
[gateway]
model_path = "{sglang.models[0]}"
port = {port}
operations_port = {operations_port}
gate = {{ heartbeat_seconds = 0.5, heartbeat_expiry_seconds = 5.0 }}
engines = [{{ name = "sglang", url = "{sglang.server.url}" }}]
"""
    config = tmp_path / "topics.toml"
    config.write_text(toml)
    subprocess.run(
        [sys.executable, "-m", "clawstream", "topics", "apply", "--config", str(config)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
    )
    process = start_service("gateway", toml, {"OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.process.poll() is None, process.text()
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, "the gateway is ready")
    return Chatting(url, broker, namespace, process)


async def test_a_chat_an_update_a_chat(
    chatting: Chatting, sglang: Sglang, references: list[Reference], tmp_path: Path
) -> None:
    client = chatting.client()
    streamed: list[str] = []

    def ask(text: str, history: list[Any], *, tokens: int = 48, temperature: float = 1.0) -> str:
        messages = [*history, {"role": "user", "content": text}]
        parts: list[str] = []
        reasons: list[str | None] = []
        for chunk in client.chat.completions.create(
            model="default", messages=messages, stream=True, max_tokens=tokens, temperature=temperature
        ):
            parts += [choice.delta.content or "" for choice in chunk.choices]
            reasons += [choice.finish_reason for choice in chunk.choices]
        assert reasons[-1] in ("stop", "length"), "an answer ends as an answer, whatever the weights do"
        streamed.append("".join(parts))
        return streamed[-1]

    first = ask("What is the capital of France?", [], temperature=0.6)
    history = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": first}]

    with ThreadPoolExecutor(4) as pool:
        talking = [pool.submit(ask, f"question {number}?", [], tokens=400) for number in range(12)]
        chatting.publish(tmp_path, 1, sglang.models[1])
        chatting.wait_for_version(1)
        for answer in talking:
            answer.result()
    ask("thanks, exactly", history, temperature=0.6)

    turns = wait_for(lambda: found if len(found := chatting.turns()) == 14 else None, "every turn is on the log")
    tokenizer = load_tokenizer(sglang.models[0])
    assert sorted(turn.response_message["content"] or "" for turn in turns) == sorted(streamed)
    assert {span.weight_version for turn in turns for span in turn.version_spans} == {0, 1}
    for turn in turns:
        assert turn.trainable, turn.untrainable_detail
        assert turn.engine == "sglang"
        prompt, response = turn.prompt_ids.to_numpy().tolist(), turn.response_ids.to_numpy().tolist()
        assert tokenizer.decode(response) == (turn.response_message["content"] or "")
        for span in turn.version_spans:
            expected = references[span.weight_version].of_output(prompt, response, turn.sampling.temperature)
            np.testing.assert_allclose(
                turn.response_logprobs.to_numpy()[span.start : span.end],
                expected[span.start : span.end],
                atol=TOLERANCE,
            )
    last = turns[-1]
    assert [span.weight_version for span in last.version_spans] == [1]
    assert last.parent_turn_id == turns[0].turn_id
    engine = chatting.engine()
    assert engine["error"] == ""
    assert engine["warnings"] == []
    assert chatting.process.stop() == 0, chatting.process.text()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_the_likeliest_tokens_of_every_position_reach_the_client(
    chatting: Chatting, references: list[Reference], sglang: Sglang, temperature: float
) -> None:
    """Logprobs at the client are those of the distribution that was sampled from, in a stream and without one."""
    client = chatting.client()
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    options: Any = {"max_tokens": 24, "temperature": temperature, "seed": 7, "logprobs": True, "top_logprobs": 4}
    whole = client.chat.completions.create(model="default", messages=messages, **options)
    chunks = list(client.chat.completions.create(model="default", messages=messages, stream=True, **options))
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert whole.choices[0].logprobs is not None
    tokenizer = load_tokenizer(sglang.models[0])
    turns = wait_for(lambda: found if len(found := chatting.turns()) == 2 else None, "both turns are on the log")
    for turn, entries in zip(turns, (whole.choices[0].logprobs.content or [], streamed), strict=True):
        assert turn.trainable, turn.untrainable_detail
        prompt, response = turn.prompt_ids.to_numpy().tolist(), turn.response_ids.to_numpy().tolist()
        rows = references[0].logprobs(prompt + response, temperature)[len(prompt) - 1 : -1]
        assert len(entries) == len(response) > 0
        for token_id, row, entry in zip(response, rows, entries, strict=True):
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            best = row.topk(4)
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
            likeliest = tokenizer.decode([int(best.indices[0])])
            if float(best.values[0] - best.values[1]) > 2 * TOLERANCE:
                assert entry.top_logprobs[0].token == likeliest


async def test_ids_beyond_the_vocabulary_never_reach_the_engine(chatting: Chatting, sglang: Sglang) -> None:
    """SGLang would die of them, and of every answer that runs beside: it goes on serving instead."""
    client = chatting.client()
    size = load_tokenizer(sglang.models[0]).vocabulary_size
    for token_id in (size, 10**9):
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "x"}], logit_bias={str(token_id): 5}
            )
    guarded = HttpEngineClient("sglang", sglang.server.url, vocabulary_size=size)
    try:
        with pytest.raises(TokenIdRefused, match=str(size)):
            _ = [chunk async for chunk in guarded.generate(sglang.request([1, size], max_new_tokens=1))]
    finally:
        await guarded.close()
    answer = client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "still there?"}], max_tokens=4
    )
    assert answer.choices[0].finish_reason in ("stop", "length")
