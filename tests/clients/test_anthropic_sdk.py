"""The official Anthropic SDK does what its quickstart does: sync and async, streams and tools."""

import asyncio
from typing import Any

import anthropic

from tests.clients.conftest import API_KEY, FINAL_ANSWER, PLAIN_ANSWER, TOOL_RESULT, check_tool_loop
from tests.fixtures.gateway_app import GatewayUnderTest

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}


async def test_messages_in_threads(gateway: GatewayUnderTest) -> None:
    def quickstart() -> tuple[Any, str]:
        with anthropic.Anthropic(base_url=gateway.base_url, api_key=API_KEY) as client:
            message = client.messages.create(model="policy", max_tokens=100, messages=[USER])
            with client.messages.stream(model="policy", max_tokens=100, messages=[USER]) as stream:
                return message.content[0], "".join(stream.text_stream)

    block, streamed = await asyncio.to_thread(quickstart)
    assert (block.text, streamed) == (PLAIN_ANSWER, PLAIN_ANSWER)
    assert {turn.principal for turn in gateway.conversations.turns} == {"ada"}


async def test_a_tool_loop(gateway: GatewayUnderTest) -> None:
    messages: list[Any] = [USER]
    arguments: dict[str, Any] = {"model": "policy", "max_tokens": 200, "tools": [TOOL]}
    async with anthropic.AsyncAnthropic(base_url=gateway.base_url, auth_token=API_KEY) as client:
        async with client.messages.stream(messages=messages, **arguments) as stream:
            message = await stream.get_final_message()
        assert message.stop_reason == "tool_use"
        results: list[Any] = []
        for block in message.content:
            if block.type == "tool_use":
                assert block.input == {"city": "Paris"}
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": TOOL_RESULT})
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        final = await client.messages.create(messages=messages, **arguments)
    assert [block.to_dict() for block in final.content] == [{"type": "text", "text": FINAL_ANSWER}]
    check_tool_loop(gateway)
