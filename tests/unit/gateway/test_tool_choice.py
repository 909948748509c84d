"""`tool_choice` on every API: none, any tool, one tool; and models of which no call can be demanded."""

from typing import Any

import httpx
import orjson
import pytest

from clawstream.rendering.renderer import PackageRenderer
from schemas.events.turn import UntrainableReason
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.stub_engine import StubAnswer

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
CHAT_TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "wait")]
RESPONSES_TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("look", "wait")]
MESSAGES_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name in ("look", "wait")]
USER = [{"role": "user", "content": "hi"}]


def body_of(path: str, choice: Any) -> dict[str, Any]:
    match path:
        case "/v1/responses":
            return {"input": "hi", "tools": RESPONSES_TOOLS, "tool_choice": choice}
        case "/v1/messages":
            return {"messages": USER, "tools": MESSAGES_TOOLS, "tool_choice": choice}
        case _:
            return {"messages": USER, "tools": CHAT_TOOLS, "tool_choice": choice}


def calls_in(answer: Any) -> list[tuple[str, Any]]:
    """Names and arguments, whichever API."""
    if "choices" in answer:
        calls = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls", [])]
        return [(call["name"], orjson.loads(call["arguments"])) for call in calls]
    if "output" in answer:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(item["name"], orjson.loads(item["arguments"])) for item in items]
    return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


async def post(gateway: GatewayUnderTest, path: str, choice: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        return await client.post(path, json=body_of(path, choice))


@pytest.mark.parametrize(
    ("path", "any_tool", "one_tool"),
    [
        ("/v1/chat/completions", "required", {"type": "function", "function": {"name": "wait"}}),
        ("/v1/responses", "required", {"type": "function", "name": "wait"}),
        ("/v1/messages", {"type": "any"}, {"type": "tool", "name": "wait"}),
    ],
)
async def test_a_call_that_is_demanded_is_begun_for_the_model(
    tagged_renderer: PackageRenderer, path: str, any_tool: Any, one_tool: Any
) -> None:
    async with running_gateway(tagged_renderer) as gateway:
        end = "\n</tool_call><|im_end|>"
        for text in ('look", "arguments": {"at": "sky"}}', '{"seconds": 5}}'):
            gateway.engine.enqueue(StubAnswer(token_ids=gateway.renderer.encode(text + end)))
        first, second = await post(gateway, path, any_tool), await post(gateway, path, one_tool)
        prompts = [gateway.renderer.decode(request["input_ids"]) for request in gateway.engine.requests]
    assert calls_in(first.json()) == [("look", {"at": "sky"})]
    assert calls_in(second.json()) == [("wait", {"seconds": 5})]
    assert prompts[0].endswith('<tool_call>\n{"name": "')
    assert prompts[1].endswith('<tool_call>\n{"name": "wait", "arguments": ')
    for turn, request in zip(gateway.conversations.turns, gateway.engine.requests, strict=True):
        assert turn.untrainable_reason is UntrainableReason.ALTERED_DISTRIBUTION
        assert turn.prompt_ids.to_numpy().tolist() == request["input_ids"]


async def test_a_demanded_call_streams(tagged_renderer: PackageRenderer) -> None:
    async with running_gateway(tagged_renderer) as gateway, gateway.openai() as client:
        gateway.engine.enqueue(StubAnswer(token_ids=gateway.renderer.encode('look", "arguments": {}}\n</tool_call>')))
        arguments: dict[str, Any] = {"model": "policy", **body_of("/v1/chat/completions", "required")}
        async with client.chat.completions.stream(**arguments) as stream:
            message = (await stream.get_final_completion()).choices[0].message
    assert message.content is None or message.content == ""
    assert [call.function.name for call in message.tool_calls or []] == ["look"]


@pytest.mark.parametrize(
    ("path", "choice"),
    [("/v1/chat/completions", "none"), ("/v1/responses", "none"), ("/v1/messages", {"type": "none"})],
)
async def test_without_tools_the_model_never_hears_of_them(gateway: GatewayUnderTest, path: str, choice: Any) -> None:
    assert (await post(gateway, path, choice)).status_code == 200
    assert "look" not in gateway.renderer.decode(gateway.engine.requests[0]["input_ids"])
    assert len(gateway.conversations.turns[0].tools) == 2


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        ("/v1/chat/completions", "sometimes"),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "other"}}),
        ("/v1/responses", {"type": "function", "name": "other"}),
        ("/v1/responses", {"type": "web_search"}),
        ("/v1/messages", {"type": "tool", "name": "other"}),
        ("/v1/messages", {"type": "some"}),
    ],
)
async def test_a_choice_that_cannot_be_honoured_is_refused(gateway: GatewayUnderTest, path: str, choice: Any) -> None:
    answer = await post(gateway, path, choice)
    assert answer.status_code == 400
    assert "tool_choice" in answer.json()["error"]["message"]
    assert gateway.conversations.placed == []
