"""A gateway with its real conversations and a log; behind it an engine that says what a policy says of the prompt."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clawstream.bus.memory import MemoryBus
from clawstream.rendering.renderer import load_renderer
from clawstream.rendering.tokenizer import load_tokenizer
from tests.clients.agents.agent_gateway import (
    MAX_CONTEXT_TOKENS,
    AgentGateway,
    Cut,
    Exchange,
    Policy,
    Prompt,
    StartAgentGateway,
    read_prompt,
)
from tests.clients.agents.closed_proxy import closed_proxy
from tests.clients.agents.installation import node_executable
from tests.fixtures import conversations as recording
from tests.fixtures.gateway_app import running_gateway
from tests.fixtures.stub_engine import StubAnswer


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
        exchanges: dict[str, Exchange] = {}

        def answer(request: Mapping[str, Any]) -> StubAnswer:
            prompt = read_prompt(tokenizer.hugging_face.decode(request["input_ids"], skip_special_tokens=False))
            prompts.append(prompt)
            said = policy(prompt)
            text, after = (said.text, said.after_tokens) if isinstance(said, Cut) else (said, None)
            answered = StubAnswer(token_ids=tokenizer.encode(f"{text}<|im_end|>"), break_after_tokens=after)
            turn_id = str(request["rid"]).rpartition(".")[0]
            exchanges[turn_id] = Exchange(request["input_ids"], answered.token_ids, answered.sent_logprobs())
            return answered

        async with (
            closed_proxy() as proxy,
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
            yield AgentGateway(gateway.base_url, bus, prompts, exchanges, gateway.metrics, proxy)

    return start


@pytest.fixture(scope="session")
def node() -> Path:
    """The pinned Node."""
    return node_executable()
