"""The official OpenAI SDK does what its quickstart does: both APIs, sync and async, streams and tools."""

import asyncio
import json
from typing import Any

import openai

from tests.clients.conftest import API_KEY, FINAL_ANSWER, PLAIN_ANSWER, TOOL_RESULT, check_tool_loop
from tests.fixtures.gateway_app import GatewayUnderTest

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}


def sync_client(gateway: GatewayUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key=API_KEY)


async def test_chat_completions_in_threads(gateway: GatewayUnderTest) -> None:
    def quickstart() -> tuple[str | None, str]:
        with sync_client(gateway) as client:
            completion = client.chat.completions.create(model="policy", messages=[USER])
            stream = client.chat.completions.create(model="policy", messages=[USER], stream=True)
            return completion.choices[0].message.content, "".join(
                chunk.choices[0].delta.content or "" for chunk in stream
            )

    assert await asyncio.to_thread(quickstart) == (PLAIN_ANSWER, PLAIN_ANSWER)
    assert {turn.principal for turn in gateway.conversations.turns} == {"ada"}


async def test_a_tool_loop_in_chat_completions(gateway: GatewayUnderTest) -> None:
    messages: list[Any] = [USER]
    async with gateway.openai(API_KEY) as client:
        async with client.chat.completions.stream(model="policy", messages=messages, tools=[CHAT_TOOL]) as stream:
            completion = await stream.get_final_completion()
        message = completion.choices[0].message
        assert message.tool_calls is not None
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT})
        final = await client.chat.completions.create(model="policy", messages=messages, tools=[CHAT_TOOL])
    assert final.choices[0].message.content == FINAL_ANSWER
    check_tool_loop(gateway)


async def test_responses_in_threads(gateway: GatewayUnderTest) -> None:
    def quickstart() -> tuple[str, str]:
        with sync_client(gateway) as client:
            response = client.responses.create(model="policy", input="Hello")
            stream = client.responses.create(model="policy", input="Hello", stream=True)
            return response.output_text, "".join(
                event.delta for event in stream if event.type == "response.output_text.delta"
            )

    assert await asyncio.to_thread(quickstart) == (PLAIN_ANSWER, PLAIN_ANSWER)


async def test_a_tool_loop_in_responses(gateway: GatewayUnderTest) -> None:
    items: list[Any] = [USER]
    async with gateway.openai(API_KEY) as client:
        async with client.responses.stream(model="policy", input=items, tools=[RESPONSES_TOOL]) as stream:
            response = await stream.get_final_response()
        items += [item.to_dict() for item in response.output]
        for item in response.output:
            if item.type == "function_call":
                assert json.loads(item.arguments) == {"city": "Paris"}
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": TOOL_RESULT})
        final = await client.responses.create(model="policy", input=items, tools=[RESPONSES_TOOL])
    assert final.output_text == FINAL_ANSWER
    check_tool_loop(gateway)
