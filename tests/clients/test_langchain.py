"""LangChain's ChatOpenAI does what its quickstart does, through both of OpenAI's APIs."""

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.conftest import API_KEY, FINAL_ANSWER, PLAIN_ANSWER, TOOL_RESULT, check_tool_loop
from tests.fixtures.gateway_app import GatewayUnderTest


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Paris"
    return TOOL_RESULT


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, gateway: GatewayUnderTest) -> ChatOpenAI:
    arguments: dict[str, Any] = {"base_url": f"{gateway.base_url}/v1", "api_key": API_KEY, "model": "policy"}
    return ChatOpenAI(use_responses_api=request.param, **arguments)


async def test_answers_and_streams(model: ChatOpenAI) -> None:
    answer = await model.ainvoke("Hello")
    assert answer.text == PLAIN_ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join([chunk.text async for chunk in model.astream("Hello")]) == PLAIN_ANSWER


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tool_loop(model: ChatOpenAI, gateway: GatewayUnderTest, stream: bool) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage("What is the weather in Paris?")]
    if stream:
        first: Any = None
        async for chunk in bound.astream(messages):
            first = chunk if first is None else first + chunk
    else:
        first = await bound.ainvoke(messages)
    (call,) = first.tool_calls
    result = get_weather.invoke(call["args"])
    final = await bound.ainvoke([*messages, first, ToolMessage(result, tool_call_id=call["id"])])
    assert final.text == FINAL_ANSWER
    check_tool_loop(gateway)
