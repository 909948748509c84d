"""The gateway as a process, with the real engine, the tiny model and a real broker behind it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import orjson
import pytest

from clawstream.broker import LocalBroker
from clawstream.rendering.tokenizer import load_tokenizer
from schemas.events import TurnEvent
from tests.fixtures.system import free_ports, wait_for
from tests.fixtures.turns import turns_on_log

pytestmark = pytest.mark.kafka


@dataclass
class RunningGateway:
    """An engine process and a gateway process."""

    gateway: subprocess.Popen[bytes]
    engine: subprocess.Popen[bytes]
    url: str
    engine_url: str
    kafka: str
    namespace: str
    log: Path

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def turns(self) -> list[TurnEvent]:
        return turns_on_log(self.kafka, self.namespace)


@pytest.fixture
def running(
    local_broker: LocalBroker, namespace: str, tiny_model_directory: Path, tmp_path: Path
) -> Iterator[RunningGateway]:
    gateway_port, operations_port, engine_port = free_ports(3)
    config = tmp_path / "clawstream.toml"
    config.write_text(f"""
policy = "tiny"
data_directory = "data"
[kafka]
bootstrap_servers = "{local_broker.bootstrap_servers}"
namespace = "{namespace}"
[engine]
model_path = "{tiny_model_directory}"
port = {engine_port}
weight_version = "0"
[gateway]
model_path = "{tiny_model_directory}"
port = {gateway_port}
operations_port = {operations_port}
drain_seconds = 0.5
gate = {{ hold_seconds = 2 }}
engines = [{{ name = "one", url = "http://127.0.0.1:{engine_port}", loads_beside = true }}]
""")
    log = tmp_path / "gateway.log"
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "clawstream", "topics", "apply", "--config", str(config)],
        check=True,
        env=environment,
        capture_output=True,
    )
    with ExitStack() as stack:

        def start(service: str, output: Path) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", f"services.{service}", "--config", str(config)]
            process = subprocess.Popen(command, env=environment, stderr=stack.enter_context(output.open("wb")))
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        engine, gateway = start("engine", tmp_path / "engine.log"), start("gateway", log)
        url = f"http://127.0.0.1:{gateway_port}"

        def is_ready() -> bool:
            assert gateway.poll() is None, log.read_text()
            try:
                return httpx.get(f"{url}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_ready, "the gateway is ready")
        engine_url = f"http://127.0.0.1:{engine_port}"
        yield RunningGateway(gateway, engine, url, engine_url, local_broker.bootstrap_servers, namespace, log)


def test_what_was_sampled_is_on_the_log_and_the_process_ends_in_order(
    running: RunningGateway, tiny_model_directory: Path
) -> None:
    client = running.openai()
    history: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    streamed = list(client.chat.completions.create(model="tiny", messages=history, stream=True, max_tokens=24, seed=1))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    whole = client.chat.completions.create(model="tiny", messages=history, max_tokens=24, seed=1)
    assert whole.choices[0].message.content == text
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "thanks, exactly"}]
    client.chat.completions.create(model="tiny", messages=history, max_tokens=8)

    feedback = {"response_id": whole.id, "score": 1}
    assert httpx.post(f"{running.url}/v1/feedback", json=feedback).status_code == 200
    assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["context_length"] == 2048
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "long " * 3000}])
    assert caught.value.code == "context_length_exceeded"

    first, second, third = wait_for(lambda: turns if len(turns := running.turns()) == 3 else None, "three turns")
    assert first.trainable, first.untrainable_detail
    tokenizer = load_tokenizer(tiny_model_directory)
    assert tokenizer.decode(first.response_ids.to_numpy().tolist()) == text == first.response_message["content"]
    assert first.response_ids == second.response_ids
    np.testing.assert_allclose(first.response_logprobs.to_numpy(), second.response_logprobs.to_numpy(), atol=1e-4)
    assert third.parent_turn_id in (first.turn_id, second.turn_id)
    assert third.session_id in (first.session_id, second.session_id)
    # What the engine itself says of these ids: at temperature 1 scoring and sampling agree.
    scored = httpx.post(
        f"{running.engine_url}/generate",
        json={
            "input_ids": [*first.prompt_ids.to_numpy().tolist(), *first.response_ids.to_numpy().tolist()],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": first.prompt_ids.element_count - 1,
        },
        timeout=60,
    ).json()
    expected = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
    np.testing.assert_allclose(first.response_logprobs.to_numpy(), expected, atol=1e-3)

    # SIGTERM with an open stream: it ends, and the process too.
    stream = client.chat.completions.create(model="tiny", messages=history, stream=True, max_tokens=1900)
    next(iter(stream))
    running.gateway.send_signal(signal.SIGTERM)
    ends: list[str | None] = []
    try:
        ends += [chunk.choices[0].finish_reason for chunk in stream]
    except openai.APIError as error:
        ends.append(error.message)
    assert ends[-1] in ("stop", "length", "service unavailable: the gateway is shutting down")
    assert running.gateway.wait(timeout=60) == 0, running.log.read_text()
    assert "Traceback" not in running.log.read_text()


def test_an_engine_that_dies_is_503_and_the_gateway_lives_on(running: RunningGateway) -> None:
    running.engine.kill()
    running.engine.wait()
    messages = [{"role": "user", "content": "hi"}]
    with httpx.stream(
        "POST", f"{running.url}/v1/chat/completions", json={"messages": messages, "stream": True}, timeout=120
    ) as answer:
        body = answer.read()
    assert answer.status_code == 503, body
    assert int(answer.headers["retry-after"]) >= 1
    assert orjson.loads(body)["error"]["code"] == "no_engine_ready"
    assert httpx.get(f"{running.url}/healthz").status_code == 200
    assert httpx.get(f"{running.url}/readyz").status_code == 503
