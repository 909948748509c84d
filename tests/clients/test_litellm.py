"""litellm does what its quickstart does, through either of the APIs that it knows for an address of one's own."""

import json
from typing import Any

import litellm
import pytest

from tests.clients.conftest import API_KEY, FINAL_ANSWER, PLAIN_ANSWER, TOOL_RESULT, check_tool_loop
from tests.fixtures.gateway_app import GatewayUnderTest

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(params=["openai/policy", "anthropic/policy"])
def target(request: pytest.FixtureRequest, gateway: GatewayUnderTest) -> dict[str, Any]:
    is_openai = request.param.startswith("openai/")
    base = f"{gateway.base_url}/v1" if is_openai else gateway.base_url
    return {"model": request.param, "api_base": base, "api_key": API_KEY, "max_tokens": 200}


async def test_completions(target: dict[str, Any]) -> None:
    completion: Any = await litellm.acompletion(messages=[USER], **target)
    assert completion.choices[0].message.content == PLAIN_ANSWER
    stream: Any = await litellm.acompletion(messages=[USER], stream=True, **target)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == PLAIN_ANSWER


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tool_loop(target: dict[str, Any], gateway: GatewayUnderTest, stream: bool) -> None:
    messages: list[Any] = [USER]
    first: Any = await litellm.acompletion(messages=messages, tools=[TOOL], stream=stream, **target)
    if stream:
        first = litellm.stream_chunk_builder([chunk async for chunk in first], messages=messages)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT}]
    final: Any = await litellm.acompletion(messages=messages, tools=[TOOL], **target)
    assert final.choices[0].message.content == FINAL_ANSWER
    check_tool_loop(gateway)
