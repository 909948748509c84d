"""Anthropic's messages as the real SDK sees them, and what they leave on the log."""

import asyncio
from itertools import groupby
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from clawstream.engine.client import EngineTimeouts
from clawstream.rendering.renderer import PackageRenderer
from services.gateway.auth import Authenticator, hash_key
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.stub_engine import StubAnswer

if TYPE_CHECKING:  # Every process of a run imports this file, and the SDK takes a second: only those that need it pay.
    import anthropic

END = 2
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
TEXT = (
    "<think>\nhm\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
    "And then?"
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
)


def client_of(gateway: GatewayUnderTest, key: str = "unused") -> "anthropic.AsyncAnthropic":
    import anthropic

    return anthropic.AsyncAnthropic(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=120)


async def events_of(gateway: GatewayUnderTest, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and data of every event, raw."""
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.post("/v1/messages", json={"model": "policy", "stream": True, **body})
    blocks = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
    return [(block.split("\n")[0].removeprefix("event: "), block.split("\n")[1]) for block in blocks]


async def test_a_message_and_its_turn(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("Hello there."), END]
    gateway.engine.enqueue(StubAnswer(token_ids=ids))
    async with client_of(gateway) as client:
        message = await client.messages.create(
            model="policy",
            max_tokens=9,
            system="Be brief.",
            messages=USER,
            stop_sequences=["###"],
            extra_body={"top_k": 5},
        )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello there."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    (turn,) = gateway.conversations.turns
    assert turn.response_id == message.id
    assert message.id.startswith("msg_")
    assert message.usage.input_tokens == turn.prompt_ids.element_count
    assert message.usage.output_tokens == len(ids)
    assert turn.request_messages == [{"role": "system", "content": "Be brief."}, *USER]
    sent = gateway.engine.requests[0]["sampling_params"]
    assert (sent["max_new_tokens"], sent["stop"], sent["top_k"]) == (9, ["###"], 5)


async def test_blocks_stream_as_they_are_whole(tagged_renderer: PackageRenderer) -> None:
    arguments: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 2000,
        "messages": USER,
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    async with running_gateway(tagged_renderer) as gateway, client_of(gateway) as client:
        ids = gateway.renderer.encode(TEXT)
        gateway.engine.default_answer = lambda request: StubAnswer(token_ids=ids)
        whole = await client.messages.create(**arguments)
        async with client.messages.stream(**arguments) as stream:
            streamed = await stream.get_final_message()
        hidden = await client.messages.create(**{**arguments, "thinking": {"type": "disabled"}})
        first, second, _ = gateway.conversations.turns

    def without_ids(message: Any) -> list[Any]:
        blocks = [block.to_dict() for block in message.content]
        return [{name: value for name, value in block.items() if name != "id"} for block in blocks]

    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "text", "tool_use"]
    assert whole.content[0].thinking == "hm"
    assert whole.content[2].input == {"at": "sky"}
    assert whole.content[4].input == {}
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert without_ids(streamed) == without_ids(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens == len(ids)
    assert [block.type for block in hidden.content] == ["text", "tool_use", "text", "tool_use"]
    assert first.response_message["content"] == second.response_message["content"] == "Let me look.And then?"


async def test_the_events_come_in_the_documented_order(tagged_renderer: PackageRenderer) -> None:
    async with running_gateway(tagged_renderer) as gateway:
        gateway.engine.enqueue(StubAnswer(token_ids=gateway.renderer.encode(TEXT), tokens_per_chunk=500))
        events = await events_of(gateway, {"messages": USER, "tools": TOOLS, "thinking": {"type": "adaptive"}})
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [name for name, _ in groupby(name for name, _ in events)]
    assert kinds == ["message_start", *block * 5, "message_delta", "message_stop"]
    assert all(f'"type":"{name}"' in data for name, data in events)


async def test_a_tool_loop_reaches_the_model_in_its_own_form(gateway: GatewayUnderTest) -> None:
    messages: list[Any] = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "blue"}]},
                {"type": "tool_result", "tool_use_id": "t0", "is_error": True},
                {"type": "text", "text": "and ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    async with client_of(gateway) as client:
        await client.messages.create(model="policy", max_tokens=5, messages=messages, tools=TOOLS)
    (turn,) = gateway.conversations.turns
    call = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}}
    assert turn.request_messages == [
        *USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "blue"},
        {"role": "tool", "tool_call_id": "t0", "content": "", "is_error": True},
        {"role": "user", "content": "and now?"},
    ]
    assert turn.trainable


async def test_tokens_are_counted_as_they_would_be_sent(gateway: GatewayUnderTest) -> None:
    async with client_of(gateway) as client:
        counted = await client.messages.count_tokens(model="policy", messages=USER, system="Be brief.", tools=TOOLS)
        message = await client.messages.create(
            model="policy", max_tokens=5, messages=USER, system="Be brief.", tools=TOOLS
        )
    assert counted.input_tokens == message.usage.input_tokens
    assert len(gateway.conversations.placed) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_why_an_answer_ended(gateway: GatewayUnderTest, stream: bool) -> None:
    ids = gateway.renderer.encode("one###")
    gateway.engine.enqueue(
        StubAnswer(token_ids=ids, finish={"type": "stop", "matched": "###"}),
        StubAnswer(token_ids=ids, finish={"type": "length", "length": len(ids)}),
    )
    found: list[Any] = []
    async with client_of(gateway) as client:
        for stop in (["###"], []):
            arguments: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": USER, "stop_sequences": stop}
            if stream:
                async with client.messages.stream(**arguments) as running:
                    found.append(await running.get_final_message())
            else:
                found.append(await client.messages.create(**arguments))
    assert [(message.stop_reason, message.stop_sequence) for message in found] == [
        ("stop_sequence", "###"),
        ("max_tokens", None),
    ]
    assert [message.content[0].text for message in found] == ["one", "one###"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "invalid_request_error", "content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "text only",
        ),
        ({"messages": USER, "model": "claude-x"}, 404, "not_found_error", "policy"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, 400, "invalid_request_error", "prompt is too"),
        ({"messages": USER, "tool_choice": {"type": "tool", "name": "x"}}, 400, "invalid_request_error", "tools"),
        ({"messages": USER, "mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "mcp_servers"),
    ],
)
async def test_refusals_have_anthropics_form(
    gateway: GatewayUnderTest, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        for path in ("/v1/messages", "/messages"):
            answer = await client.post(path, json=body)
            record = answer.json()
            assert (answer.status_code, record["type"], record["error"]["type"]) == (status, "error", kind)
            assert words in record["error"]["message"]
    assert gateway.conversations.placed == []


async def test_a_wrong_key_is_anthropics_authentication_error(tiny_renderer: PackageRenderer) -> None:
    import anthropic

    authenticator = Authenticator({"ada": [hash_key("right-key")]})
    async with running_gateway(tiny_renderer, authenticator=authenticator) as gateway:
        async with client_of(gateway, "wrong-key") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="policy", max_tokens=5, messages=USER)
        async with client_of(gateway, "right-key") as client:
            await client.messages.create(model="policy", max_tokens=5, messages=USER)
    assert gateway.conversations.placed[0].principal == "ada"


async def test_a_stalled_engine_ends_the_stream_in_an_error(tiny_renderer: PackageRenderer) -> None:
    import anthropic

    async with (
        running_gateway(tiny_renderer, timeouts=EngineTimeouts(idle_seconds=0.1)) as gateway,
        client_of(gateway) as client,
    ):
        gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
        with pytest.raises(anthropic.APIError, match="no answer in time"):
            async with client.messages.stream(model="policy", max_tokens=5, messages=USER) as stream:
                await stream.get_final_message()
        assert len(gateway.engine.aborted) == 1


async def test_a_waiting_stream_is_kept_alive_by_pings(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, keep_alive_seconds=0.05) as gateway:
        gate = asyncio.Event()
        gateway.engine.enqueue(StubAnswer(gate=gate))
        kinds: list[str] = []
        async with httpx.AsyncClient(base_url=gateway.base_url) as raw:
            body = {"model": "policy", "messages": USER, "stream": True}
            async with raw.stream("POST", "/v1/messages", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("event: "):
                        kinds.append(line.removeprefix("event: "))
                    if kinds.count("ping") == 3:
                        gate.set()
    assert kinds[:4] == ["message_start", "ping", "ping", "ping"]
    assert kinds[-1] == "message_stop"


async def test_models_are_listed_for_anthropics_sdk_too(gateway: GatewayUnderTest) -> None:
    async with client_of(gateway) as client:
        assert [(card.id, card.type) async for card in client.models.list()] == [("policy", "model")]


async def test_the_session_in_the_metadata_is_a_hint(gateway: GatewayUnderTest) -> None:
    session = "0f8fad5b-d9cb-469f-a165-70867728950e"
    async with client_of(gateway) as client:
        for user_id in (f"user_abc_account__session_{session}", f'{{"device_id":"x","session_id":"{session}"}}', "ada"):
            await client.messages.create(model="policy", max_tokens=5, messages=USER, metadata={"user_id": user_id})
    assert [request.session_hint for request in gateway.conversations.placed] == [session, session, None]
