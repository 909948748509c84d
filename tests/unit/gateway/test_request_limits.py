"""What is refused before anything of a request is understood, and generations that are ended from outside."""

import asyncio
from typing import Any
from unittest import mock

import httpx
import orjson
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


async def talk(gateway: GatewayUnderTest, *pieces: bytes, until: bytes = b"}}") -> bytes:
    """Sends pieces as they are and gives what comes back, to the end of the connection or `until`."""
    host, port = gateway.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while until not in received and (more := await reader.read(1 << 16)):
                received += more
    except ConnectionError:
        received += await reader.read(1 << 16) if not reader.exception() else b""
    finally:
        writer.close()
    return received


POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("beginning", [POST + b"x-long: ", POST, b"POST /"], ids=["a value", "many headers", "a path"])
async def test_a_head_without_end_is_not_read_on(gateway: GatewayUnderTest, beginning: bytes) -> None:
    more = b"x-some: thing\r\n" * 1000 if beginning == POST else b"x" * 15_000
    answer = await talk(gateway, beginning, *[more] * 200)
    assert b"200 OK" not in answer
    assert gateway.conversations.placed == []
    assert not gateway.server.server_state.connections


async def test_trailers_without_end_are_not_read_on(gateway: GatewayUnderTest) -> None:
    body = orjson.dumps(BODY)
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    await talk(gateway, chunked, *[b"x-some: thing\r\n" * 1000] * 200, until=b"never")
    assert gateway.conversations.placed == []
    assert not gateway.server.server_state.connections


async def test_a_body_that_comes_byte_by_byte_is_read(gateway: GatewayUnderTest) -> None:
    text = "word " * 4_000
    body = orjson.dumps({"model": text, **BODY})
    framed = b"".join(b"1\r\n%b\r\n" % body[index : index + 1] for index in range(len(body))) + b"0\r\n\r\n"
    pieces = [framed[start : start + 20_000] for start in range(0, len(framed), 20_000)]
    answer = await talk(gateway, POST + b"transfer-encoding: chunked\r\n\r\n", *pieces)
    assert b"model_not_found" in answer


async def test_an_offer_of_http_2_is_not_taken_up(gateway: GatewayUnderTest) -> None:
    """Java's client makes one with every request."""
    body = orjson.dumps({**BODY, "max_tokens": 4})
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    answer = await talk(gateway, POST + offer + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 OK")


async def test_offers_of_http_2_in_one_piece_are_all_declined(gateway: GatewayUnderTest) -> None:
    body = orjson.dumps({**BODY, "max_tokens": 4})
    offer = b"connection: Upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(body)
    last = POST + offer.replace(b"Upgrade", b"Upgrade, close") + body + b"after the end"
    answer = await talk(gateway, 2 * (POST + offer + body) + last, until=b"never")
    assert (answer.count(b"HTTP/1.1 "), answer.count(b"HTTP/1.1 200 OK")) == (3, 3)
    assert [len(request.messages) for request in gateway.conversations.placed] == [1, 1, 1]


async def test_a_tunnel_is_refused(gateway: GatewayUnderTest) -> None:
    answer = await talk(gateway, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", until=b"never")
    assert answer.startswith(b"HTTP/1.1 400")


async def test_trailers_are_no_headers(gateway: GatewayUnderTest) -> None:
    body = orjson.dumps({**BODY, "max_tokens": 4})
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    answer = await talk(gateway, chunked + b"x-session-id: of somebody\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert [request.session_header for request in gateway.conversations.placed] == [None]


async def test_who_leaves_with_requests_in_the_pipeline_is_noticed(gateway: GatewayUnderTest) -> None:
    gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
    host, port = gateway.base_url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = orjson.dumps(BODY)
    writer.write(2 * (POST + b"content-length: %d\r\n\r\n" % len(body) + body))
    async with asyncio.timeout(60):
        await gateway.engine.wait_for_requests(1)
        writer.close()
        await gateway.conversations.wait_for_turns(1)
    assert gateway.conversations.turns[0].untrainable_reason is UntrainableReason.CLIENT_GONE
    assert len(gateway.engine.requests) == 1


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
    (running,) = (task for task in asyncio.all_tasks() - before if "Generation._run" in repr(task.get_coro()))
    running.cancel()
    async with asyncio.timeout(60):
        event = await started.generation.next_event()
    assert isinstance(event, Failed)
    assert (event.refusal.status, event.refusal.code) == (503, "shutting_down")
    await asyncio.wait({running})
    assert running.cancelled()
    assert gateway.chat.requests_in_flight == 0
    assert gateway.router.leases == 0


async def test_an_answer_that_is_whole_is_given_though_the_gateway_ends_before_the_stream_of_the_engine(
    gateway: GatewayUnderTest,
) -> None:
    """The end of the engine's stream is read for the sake of its connection alone."""
    gateway.engine.enqueue(StubAnswer(token_ids=[10, 11, 2], end_gate=asyncio.Event()))
    with mock.patch("clawstream.engine.connection._END_OF_STREAM_SECONDS", 60.0):
        async with asyncio.timeout(50), httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
            await gateway.engine.wait_for_requests(1)
            (generation,) = gateway.chat._running.values()  # pyright: ignore[reportPrivateUsage] - what only it knows
            while generation._capture.finish_reason is None:  # pyright: ignore[reportPrivateUsage]
                await asyncio.sleep(0.01)
            await gateway.chat.finish(0)
            answer = await asking
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
    assert [turn.finish_reason for turn in gateway.conversations.turns] == ["stop"]
    assert gateway.engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ended_by", ["client", "shutdown"])
async def test_what_was_sampled_before_the_request_was_placed_is_recorded_once_it_is(
    gateway: GatewayUnderTest, ended_by: str, stream: bool
) -> None:
    placed = gateway.conversations.place_gate = asyncio.Event()
    gateway.engine.enqueue(StubAnswer(token_ids=[10, 11, 12, 2], gate=asyncio.Event(), gate_after_tokens=2))
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        # Whole answers are asked of the engine as streams, too: what came so far is known.
        asking = asyncio.create_task(client.post("/v1/chat/completions", json={**BODY, "stream": stream}))
        await gateway.engine.wait_for_requests(1)
        (generation,) = gateway.chat._running.values()  # pyright: ignore[reportPrivateUsage] - what only it knows
        while len(generation._capture.token_ids) < 2:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        if ended_by == "client":
            asking.cancel()
        else:
            generation.shut_down()
        request_id = gateway.engine.requests[0]["rid"]
        await gateway.engine.wait_for_abort(request_id)
        assert gateway.conversations.turns == []
        placed.set()
        await gateway.conversations.wait_for_turns(1)
        if ended_by == "shutdown" and not stream:
            assert (await asking).status_code == 503
        elif ended_by == "shutdown":
            assert "shutting_down" in (await asking).text
    assert gateway.engine.aborted == [request_id]
    (turn,) = gateway.conversations.turns
    assert turn.response_ids.to_numpy().tolist() == [10, 11]
    assert turn.finish_reason == "abort"
    assert not turn.trainable
