"""A gateway with its real conversations and a log; behind it an engine that says what a policy says of the prompt."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from clawstream.bus.interface import Bus
from clawstream.bus.memory import MemoryBus
from clawstream.rendering.renderer import load_renderer
from clawstream.rendering.tokenizer import load_tokenizer
from clawstream.topics import NEXT_STATES, TURNS
from schemas.events import Event, NextStateEvent, TurnEvent
from tests.clients.agents.installation import node_executable
from tests.fixtures import conversations as recording
from tests.fixtures.gateway_app import running_gateway
from tests.fixtures.stub_engine import StubAnswer

MAX_CONTEXT_TOKENS = 400_000
"""Agents' system prompts are tens of thousands of this small vocabulary's tokens."""
CLIENT_SECONDS = 400
EventOfLog = TypeVar("EventOfLog", bound=Event)


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
    bus: Bus
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    """In order of arrival at the engine."""

    async def turns(self, count: int) -> list[TurnEvent]:
        """All turns, by start, as soon as there are so many."""
        return sorted(await self._at_least(TURNS, TurnEvent, count), key=lambda turn: turn.started_at)

    async def next_states(self, count: int) -> list[NextStateEvent]:
        """All next states, by time, as soon as there are so many."""
        return sorted(await self._at_least(NEXT_STATES, NextStateEvent, count), key=lambda state: state.observed_at)

    async def _at_least(self, topic: str, kind: type[EventOfLog], count: int) -> list[EventOfLog]:
        def events() -> list[EventOfLog]:
            return [event for event in recording.events_of(self.bus, topic) if isinstance(event, kind)]

        await recording.until(lambda: len(events()) >= count)
        return events()


StartAgentGateway = Callable[[Policy], AbstractAsyncContextManager[AgentGateway]]


@pytest.fixture
def start_agent_gateway(tagged_model_directory: Path, tmp_path: Path) -> StartAgentGateway:
    """Starts a gateway whose policy is a function of the prompt."""
    renderer = load_renderer(tagged_model_directory, "qwen3")
    tokenizer = load_tokenizer(tagged_model_directory)

    @asynccontextmanager
    async def start(policy: Policy) -> AsyncIterator[AgentGateway]:
        bus = MemoryBus()
        recording.create_topics(bus)
        prompts: list[Prompt] = []

        def answer(request: Mapping[str, Any]) -> StubAnswer:
            prompt = _read(tokenizer.hugging_face.decode(request["input_ids"], skip_special_tokens=False))
            prompts.append(prompt)
            said = policy(prompt)
            text, after = (said.text, said.after_tokens) if isinstance(said, Cut) else (said, None)
            return StubAnswer(token_ids=tokenizer.encode(f"{text}<|im_end|>"), break_after_tokens=after)

        async with (
            recording.running_gateway(bus, tmp_path / "gateway") as recorder,
            running_gateway(
                renderer,
                max_context_tokens=MAX_CONTEXT_TOKENS,
                max_body_bytes=8 << 20,
                real_conversations=recorder.conversations,
            ) as gateway,
        ):
            gateway.engine.max_context_tokens = MAX_CONTEXT_TOKENS
            gateway.engine.default_answer = answer
            yield AgentGateway(gateway.base_url, bus, prompts)

    return start


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
