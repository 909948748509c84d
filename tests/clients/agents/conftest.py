"""A gateway process on a real broker; behind it an engine that says what a test's policy says of the prompt."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from kafka import KafkaConsumer  # The second opinion: it shares no code with our client.
from kafka.structs import TopicPartition

from clawstream.broker import LocalBroker
from clawstream.process_identity import free_ports
from clawstream.rendering.tokenizer import load_tokenizer
from schemas.events import NextStateEvent, TurnEvent
from tests.clients.agents.installation import node_executable
from tests.fixtures.service_process import ServiceProcess
from tests.fixtures.stub_engine import StubAnswer, StubEngine
from tests.fixtures.system import wait_for

MAX_CONTEXT_TOKENS = 400_000
"""Agents' system prompts are tens of thousands of this small vocabulary's tokens."""
CLIENT_SECONDS = 120


@dataclass(frozen=True)
class Prompt:
    """What the policy is asked, as text."""

    text: str
    """The whole prompt."""
    newest: str
    """The newest message but for OpenClaw's trailing context."""


@dataclass(frozen=True)
class Cut:
    """An answer whose connection breaks after its first tokens."""

    text: str
    after_tokens: int = 6


Policy = Callable[[Prompt], str | Cut]


@dataclass
class AgentGateway:
    """What a client talks to, and what became of it."""

    url: str
    engine: StubEngine
    process: ServiceProcess
    kafka: str
    namespace: str
    prompts: list[Prompt] = field(default_factory=list[Prompt])

    async def turns(self, count: int) -> list[TurnEvent]:
        """All turns, by start, as soon as there are so many."""
        found = await asyncio.to_thread(
            wait_for, lambda: (events if len(events := self._events("turns.v1")) >= count else None), f"{count} turns"
        )
        return sorted((TurnEvent.model_validate(event) for event in found), key=lambda turn: turn.started_at)

    async def next_states(self, count: int) -> list[NextStateEvent]:
        """All next states, by time, as soon as there are so many."""
        found = await asyncio.to_thread(
            wait_for,
            lambda: (events if len(events := self._events("next-states.v1")) >= count else None),
            f"{count} next states",
        )
        states = [NextStateEvent.model_validate(event) for event in found]
        return sorted(states, key=lambda state: state.observed_at)

    def _events(self, topic: str) -> list[dict[str, Any]]:
        consumer = KafkaConsumer(bootstrap_servers=self.kafka, isolation_level="read_committed")
        try:
            name = f"{self.namespace}.{topic}"
            partitions = [TopicPartition(name, number) for number in sorted(consumer.partitions_for_topic(name) or ())]
            consumer.assign(partitions)
            ends = consumer.end_offsets(partitions)
            consumer.seek_to_beginning(*partitions)
            found: list[dict[str, Any]] = []
            while any((consumer.position(partition) or 0) < ends[partition] for partition in partitions):
                for records in consumer.poll(timeout_ms=200).values():
                    found += [orjson.loads(record.value) for record in records if record.value is not None]
            return found
        finally:
            consumer.close()


StartAgentGateway = Callable[[Policy], Awaitable[AgentGateway]]


@pytest.fixture
async def start_agent_gateway(
    local_broker: LocalBroker,
    namespace: str,
    tagged_model_directory: Path,
    start_service: Callable[..., ServiceProcess],
    tmp_path: Path,
) -> AsyncIterator[StartAgentGateway]:
    """Starts a gateway whose policy is a function of the prompt."""
    engines: list[StubEngine] = []
    tokenizer = load_tokenizer(tagged_model_directory)

    async def start(policy: Policy) -> AgentGateway:
        prompts: list[Prompt] = []

        def answer(request: Mapping[str, Any]) -> StubAnswer:
            prompt = _read(tokenizer.hugging_face.decode(request["input_ids"], skip_special_tokens=False))
            prompts.append(prompt)
            said = policy(prompt)
            text, after = (said.text, said.after_tokens) if isinstance(said, Cut) else (said, None)
            ids = tokenizer.encode(f"{text}<|im_end|>")
            return StubAnswer(token_ids=ids, break_after_tokens=after)

        engine = StubEngine(max_context_tokens=MAX_CONTEXT_TOKENS, default_answer=answer)
        engines.append(engine)
        await engine.start()
        port, operations_port = free_ports(2)
        toml = f"""
policy = "policy"
data_directory = "{tmp_path / "data"}"
[kafka]
bootstrap_servers = "{local_broker.bootstrap_servers}"
namespace = "{namespace}"
[gateway]
model_path = "{tagged_model_directory}"
renderer = "qwen3"
port = {port}
operations_port = {operations_port}
drain_seconds = 0.5
max_context_tokens = {MAX_CONTEXT_TOKENS}
engines = [{{ name = "scripted", url = "{engine.base_url}" }}]
"""
        topics = tmp_path / "topics.toml"
        topics.write_text(toml)
        await _succeed(["-m", "clawstream", "topics", "apply", "--config", str(topics)])
        process = start_service("gateway", toml)
        url = f"http://127.0.0.1:{port}"
        await _until_ready(url, process)
        return AgentGateway(url, engine, process, local_broker.bootstrap_servers, namespace, prompts)

    yield start
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="session")
def node() -> Path:
    """The pinned Node."""
    return node_executable()


async def run_client(command: list[str], *, folder: Path, environment: Mapping[str, str]) -> str:
    """What a client printed. Fails with all of it when the client does. It sees no more of the environment than PATH."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), CLIENT_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    said = output.decode(errors="replace")
    assert process.returncode == 0, f"{command}\n{said[-4000:]}\n{errors.decode(errors='replace')[-4000:]}"
    return said


def _read(text: str) -> Prompt:
    messages = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>")[1:]]
    spoken = [message for message in messages[:-1] if "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>" not in message]
    return Prompt(text=text, newest=spoken[-1])


async def _succeed(arguments: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")


async def _until_ready(url: str, process: ServiceProcess) -> None:
    def is_ready() -> bool:
        assert process.process.poll() is None, process.text()
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    await asyncio.to_thread(wait_for, is_ready, "the gateway is ready")
