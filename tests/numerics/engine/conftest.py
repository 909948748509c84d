"""Tiny models, and engines that serve them over real HTTP on a free port."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from clawstream.clock import SystemClock
from clawstream.log import get_logger
from services.engine.app import create_app
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from services.engine.tiny_model import Architecture, write_tiny_model
from tests.numerics.engine.reference import Reference

TOP_LEVEL_FIELDS = (
    "rid",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_text_in_logprobs",
)
"""Fields of a request that are no sampling parameters."""


class EngineUnderTest:
    """An engine, a client on its HTTP surface, and short ways to ask."""

    def __init__(self, engine: Engine, client: httpx.AsyncClient) -> None:
        self.engine = engine
        self.client = client

    async def generate(self, input_ids: list[int], **fields: Any) -> dict[str, Any]:
        """The whole answer of a request that must succeed; other keywords are sampling parameters."""
        response = await self.client.post("/generate", json=request_body(input_ids, fields))
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, input_ids: list[int], **fields: Any) -> AsyncIterator[dict[str, Any]]:
        """The streamed chunks of a request that must succeed and end with [DONE]."""
        body = request_body(input_ids, fields) | {"stream": True}
        done = False
        async with self.client.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line:
                    assert not done
                    yield json.loads(line.removeprefix("data: "))
        assert done

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """A control call that must succeed."""
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else {}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the engine's thread work until it is so."""
        while not condition():
            await asyncio.sleep(0.001)


def request_body(input_ids: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    """A request with log-probs, from mixed keywords."""
    body: dict[str, Any] = {"input_ids": input_ids, "return_logprob": True}
    body |= {key: value for key, value in fields.items() if key in TOP_LEVEL_FIELDS}
    return body | {"sampling_params": {key: value for key, value in fields.items() if key not in TOP_LEVEL_FIELDS}}


@asynccontextmanager
async def running_engine(model_path: Path, **fields: Any) -> AsyncIterator[EngineUnderTest]:
    """An engine in service, stopped at the end."""
    settings = EngineSettings.model_validate({"model_path": model_path, "port": 0, "max_context_tokens": 512} | fields)
    failures: list[str] = []
    engine = Engine(settings, log=get_logger(), on_failure=lambda: failures.append("a step raised"))
    config = uvicorn.Config(create_app(engine, settings, SystemClock()), port=0, log_config=None)
    listener = config.bind_socket()
    server = uvicorn.Server(config)
    engine.worker.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            under_test = EngineUnderTest(engine, client)
            await under_test.until(lambda: server.started)
            yield under_test
    finally:
        engine.worker.stop()
        server.should_exit = True
        await serving
    assert not failures


EngineStarter = Callable[..., Awaitable[EngineUnderTest]]


@pytest.fixture
async def start_engine() -> AsyncIterator[EngineStarter]:
    """Starts engines that end with the test: `await start_engine(model_path, **settings)`."""
    async with AsyncExitStack() as stack:

        async def start(model_path: Path, **fields: Any) -> EngineUnderTest:
            return await stack.enter_async_context(running_engine(model_path, **fields))

        yield start


ModelMaker = Callable[[Architecture, int], Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Directory of the tiny model of an architecture and seed; each is written once."""
    root = tmp_path_factory.mktemp("models")

    def make(architecture: Architecture, seed: int) -> Path:
        directory = root / f"{architecture}-{seed}"
        return directory if directory.exists() else write_tiny_model(directory, architecture, seed)

    return make


ReferenceMaker = Callable[[Path], Reference]


@pytest.fixture(scope="session")
def reference() -> ReferenceMaker:
    """Hugging Face's model of a directory; each is loaded once."""
    torch.set_num_threads(1)
    loaded: dict[Path, Reference] = {}

    def load(directory: Path) -> Reference:
        if directory not in loaded:
            loaded[directory] = Reference(directory)
        return loaded[directory]

    return load
