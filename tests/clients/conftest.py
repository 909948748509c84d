"""A gateway for clients that know nothing of it. Behind it an engine that answers, and calls the tool it is given."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from clawstream.rendering.renderer import PackageRenderer
from services.gateway.auth import Authenticator, hash_key
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.stub_engine import StubAnswer

API_KEY = "a-key-for-tests"
PLAIN_ANSWER = "Hello there, 世界."
CALL = (
    "<think>\nI must look.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
TOOL_RESULT = "21 degrees"
FINAL_ANSWER = "It is 21 degrees in Paris."


@pytest.fixture
async def gateway(tagged_renderer: PackageRenderer) -> AsyncIterator[GatewayUnderTest]:
    authenticator = Authenticator({"ada": [hash_key(API_KEY)]})
    async with running_gateway(tagged_renderer, authenticator=authenticator, max_context_tokens=8192) as running:

        def answer(request: Mapping[str, Any]) -> StubAnswer:
            prompt = running.renderer.decode(request["input_ids"])
            text = FINAL_ANSWER if TOOL_RESULT in prompt else CALL if "get_weather" in prompt else PLAIN_ANSWER
            return StubAnswer(token_ids=running.renderer.encode(f"{text}<|im_end|>"))

        running.engine.default_answer = answer
        yield running


def check_tool_loop(gateway: GatewayUnderTest) -> None:
    """Two trainable turns: a call, and the answer to its result, whose request holds the first answer again."""
    first, second = gateway.conversations.turns
    assert first.trainable
    assert second.trainable
    assert first.finish_reason == "tool_calls"
    assert second.response_message["content"] == FINAL_ANSWER
    calls: Any = first.response_message["tool_calls"]
    echoed: Any = [message for message in second.request_messages if message["role"] == "assistant"][-1]["tool_calls"]
    assert [call["function"]["name"] for call in echoed] == [call["function"]["name"] for call in calls]
    assert second.request_messages[-1]["role"] == "tool"
    assert second.request_messages[-1]["tool_call_id"] == calls[0]["id"]
    assert TOOL_RESULT in str(second.request_messages[-1]["content"])
