"""Tiny models, and an engine on a thread of its own that every test gets fresh."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from clawstream.clock import SystemClock
from clawstream.log import get_logger
from services.engine.app import create_app
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from services.engine.tiny_model import Architecture, write_tiny_model

torch.set_num_threads(1)

ModelMaker = Callable[[Architecture, int], Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Directory of the tiny model of an architecture and seed; each is written once."""
    root = tmp_path_factory.mktemp("models")

    def make(architecture: Architecture, seed: int) -> Path:
        directory = root / f"{architecture}-{seed}"
        return directory if directory.exists() else write_tiny_model(directory, architecture, seed)

    return make


class EngineUnderTest:
    """An engine, a client on its HTTP surface, and short ways to ask."""

    def __init__(self, engine: Engine, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.client = client

    async def generate(self, input_ids: list[int], **fields: Any) -> dict[str, Any]:
        """The whole answer of a request that must succeed; unknown keywords are sampling parameters."""
        top_level = ("rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
        body = {"input_ids": input_ids, "return_logprob": True}
        body |= {key: fields.pop(key) for key in top_level if key in fields}
        response = await self.client.post("/generate", json=body | {"sampling_params": fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """A control call."""
        return await self.client.post(path, json=body)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the engine's thread work until it is so."""
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running_engine(model_path: Path, **fields: Any) -> AsyncIterator[EngineUnderTest]:
    """An engine in service, stopped at the end."""
    settings = EngineSettings.model_validate({"model_path": model_path, "max_context_tokens": 512} | fields)
    failures: list[str] = []
    engine = Engine(settings, log=get_logger(), on_failure=lambda: failures.append("a step raised"))
    engine.worker.start()
    transport = httpx.ASGITransport(create_app(engine, settings, SystemClock()))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
            yield EngineUnderTest(engine, client)
    finally:
        engine.worker.stop()
    assert not failures


EngineStarter = Callable[..., Any]


@pytest.fixture
async def start_engine() -> AsyncIterator[EngineStarter]:
    """Starts engines that end with the test: `await start_engine(model_path, **settings)`."""
    async with AsyncExitStack() as stack:

        async def start(model_path: Path, **fields: Any) -> EngineUnderTest:
            return await stack.enter_async_context(running_engine(model_path, **fields))

        yield start
