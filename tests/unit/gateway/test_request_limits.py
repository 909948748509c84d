"""What is refused before anything of a request is understood, and generations that are ended from outside."""

import asyncio
from typing import Any
from unittest import mock

import httpx
import pytest

from clawstream.rendering.renderer import PackageRenderer
from schemas.events.turn import UntrainableReason
from services.gateway.generation_events import Failed
from services.gateway.surfaces.chat.format import ChatFormat
from services.gateway.surfaces.chat.surface import ChatSurface
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.stub_engine import StubAnswer

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/models"])
async def test_large_headers_are_431(gateway: GatewayUnderTest, path: str) -> None:
    headers = {f"x-{number}": "h" * 6000 for number in range(10)}
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.request("GET" if path == "/v1/models" else "POST", path, json=BODY, headers=headers)
        large_query = await client.get("/v1/models?" + "q" * 59_000)
    if path != "/v1/models":
        assert large_query.status_code == 200
    assert answer.status_code == 200
    headers["x-more"] = "h" * 6000
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.request("GET" if path == "/v1/models" else "POST", path, json=BODY, headers=headers)
    assert answer.status_code == 431
    assert "65536 bytes" in answer.json()["error"]["message"]


async def test_a_body_that_stalls_is_408(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, body_stall_seconds=0.1) as gateway:
        host, port = gateway.base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await reader.readuntil(b"}}")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer
    assert gateway.conversations.placed == []


async def test_an_answer_that_cannot_be_written_is_never_trained(gateway: GatewayUnderTest) -> None:
    gateway.engine.enqueue(StubAnswer(token_ids=[10, 11, 12, 2], gate=asyncio.Event(), gate_after_tokens=2))
    with mock.patch.object(ChatFormat, "piece_chunks", side_effect=RuntimeError("broken")):
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    async with asyncio.timeout(60):
        await gateway.conversations.wait_for_turns(1)
    assert gateway.engine.disconnected == [gateway.engine.requests[0]["rid"]]
    assert gateway.conversations.turns[0].untrainable_reason is UntrainableReason.CLIENT_GONE


async def test_a_generation_that_is_cancelled_from_outside_says_so(gateway: GatewayUnderTest) -> None:
    gateway.engine.enqueue(StubAnswer(gate=asyncio.Event()))
    before = asyncio.all_tasks()
    started = await gateway.chat.start(
        ChatSurface(gateway.renderer.decode),
        "local",
        {},
        b'{"messages": [{"role": "user", "content": "x"}]}',
        secrets=(),
    )
    await gateway.engine.wait_for_requests(1)
    (running,) = (task for task in asyncio.all_tasks() - before if "Generation.run" in repr(task.get_coro()))
    running.cancel()
    async with asyncio.timeout(60):
        event = await started.generation.next_event()
    assert isinstance(event, Failed)
    assert (event.refusal.status, event.refusal.code) == (503, "shutting_down")
    await asyncio.wait({running})
    assert running.cancelled()
    assert gateway.chat.requests_in_flight == 0
    assert gateway.router.leases == 0
