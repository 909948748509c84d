"""One SGLang for the whole lane, tiny models that it can be moved between, and the client that clawstream uses."""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawstream.engine.client import HttpEngineClient
from clawstream.engine.interface import GenerationChunk, GenerationRequest, PauseMode
from clawstream.errors import MissingDependencyError
from schemas.events.base import VersionSpan
from services.engine.tiny_model import write_tiny_model
from tests.fixtures.broker import missing
from tests.numerics.engine.reference import Reference
from tests.sglang.installation import DiskTooSmall, ensure_sglang
from tests.sglang.server import SglangServer, running_sglang

TOLERANCE = 1e-3
"""Of log-probs in nats, between two implementations in fp32."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here is slow, and the first test waits for an installation."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1800))


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer, put together."""

    token_ids: list[int]
    """[tokens]"""
    logprobs: list[float]
    """[tokens]"""
    spans: list[VersionSpan]
    finish_reason: str
    cached_tokens: int
    chunks: list[GenerationChunk]


@dataclass(slots=True)
class Sglang:
    """The server, the client, and short ways to ask."""

    server: SglangServer
    models: Sequence[Path]
    """Directories of equal shape and other weights. The first is what the server was started with."""
    client: HttpEngineClient
    raw: httpx.AsyncClient
    """For what clawstream's client does not do."""
    _requests: int = field(default=0)

    async def serve(self, version: int, model: Path) -> None:
        """Moves the server as the weight gate does."""
        await self.client.pause(PauseMode.RETRACT)
        try:
            await self.client.load_weights(str(model), version, flush_cache=True)
        finally:
            await self.client.resume()

    def request(self, prompt: Sequence[int], **parameters: Any) -> GenerationRequest:
        """With an id of its own."""
        self._requests += 1
        return GenerationRequest(f"request-{self._requests}-{id(self)}", prompt, parameters)

    async def ask(self, prompt: Sequence[int], **parameters: Any) -> Answer:
        """A streamed answer through clawstream's client."""
        return assemble([chunk async for chunk in self.client.generate(self.request(prompt, **parameters))])

    async def ask_whole(self, prompt: Sequence[int], **parameters: Any) -> dict[str, Any]:
        """An answer that is not streamed, as JSON."""
        body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
        response = await self.raw.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def assemble(chunks: list[GenerationChunk]) -> Answer:
    """Checks that every token has its log-prob and its weight version."""
    last = chunks[-1]
    assert last.finish_reason is not None
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    assert len(logprobs) == len(token_ids)
    assert None not in logprobs
    position = 0
    for span in last.version_spans:
        assert span.start == position
        position = span.end
    assert position == len(token_ids), "every token has a version"
    return Answer(
        token_ids,
        [logprob for logprob in logprobs if logprob is not None],
        last.version_spans,
        last.finish_reason,
        chunks[0].cached_tokens,
        chunks,
    )


@pytest.fixture(scope="session")
def sglang_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tiny Qwen3 models that differ in their weights alone."""
    root = tmp_path_factory.mktemp("sglang-models")
    return [write_tiny_model(root / f"seed-{seed}", "qwen3", seed) for seed in range(3)]


@pytest.fixture(scope="session")
def sglang_server(sglang_models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """The lane's only server: a start takes half a minute. Tests put the weights that they need into it."""
    try:
        python = ensure_sglang(os.environ)
    except DiskTooSmall as error:
        pytest.skip(str(error))
    except MissingDependencyError as error:
        missing(str(error))
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_sglang(python, sglang_models[0], log, os.environ) as server:
        yield server


@pytest.fixture
async def sglang(sglang_server: SglangServer, sglang_models: list[Path]) -> AsyncIterator[Sglang]:
    """The server on version 0, with nothing cached and nothing paused."""
    client = HttpEngineClient("sglang", sglang_server.url)
    async with httpx.AsyncClient(base_url=sglang_server.url, timeout=120) as raw:
        under_test = Sglang(sglang_server, sglang_models, client, raw)
        await under_test.serve(0, sglang_models[0])
        try:
            yield under_test
        finally:
            await client.close()


@pytest.fixture(scope="session")
def references(sglang_models: list[Path]) -> list[Reference]:
    """Hugging Face's model of each directory."""
    return [Reference(directory) for directory in sglang_models]
