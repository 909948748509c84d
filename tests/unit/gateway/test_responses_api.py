"""OpenAI's responses as the real SDK sees them, and what they leave on the log."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from clawstream.engine.client import EngineTimeouts
from clawstream.rendering.renderer import PackageRenderer
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.stub_engine import StubAnswer

END = 2
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Takes a patch."}
TEXT = (
    "<think>\nhm\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
    "And then?"
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call><|im_end|>'
)


async def test_a_response_and_its_turn(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("Hello there."), END]
    gateway.engine.enqueue(StubAnswer(token_ids=ids))
    async with gateway.openai() as client:
        response = await client.responses.create(
            model="policy", instructions="Be brief.", input="hi", max_output_tokens=9, temperature=0.6
        )
    assert response.output_text == "Hello there."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 9)
    (turn,) = gateway.conversations.turns
    assert turn.response_id == response.id
    assert response.id.startswith("resp_")
    assert response.usage is not None
    assert response.usage.input_tokens == turn.prompt_ids.element_count
    assert response.usage.output_tokens == len(ids)
    assert turn.request_messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    sent = gateway.engine.requests[0]["sampling_params"]
    assert (sent["max_new_tokens"], sent["temperature"]) == (9, 0.6)


async def test_items_stream_as_they_are_whole(tagged_renderer: PackageRenderer) -> None:
    arguments: dict[str, Any] = {"model": "policy", "input": "hi", "tools": [LOOK, PATCH, {"type": "web_search"}]}
    async with running_gateway(tagged_renderer) as gateway, gateway.openai() as client:
        ids = gateway.renderer.encode(TEXT)
        gateway.engine.default_answer = lambda request: StubAnswer(token_ids=ids)
        whole = await client.responses.create(**arguments)
        async with client.responses.stream(**arguments) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert "web_search" not in gateway.renderer.decode(gateway.engine.requests[0]["input_ids"])

    def without_ids(response: Any) -> list[Any]:
        items = [item.to_dict() for item in response.output]
        ours = ("id", "call_id", "parsed_arguments")
        for item in items:
            for part in item.get("content") or []:
                part.pop("parsed", None)
        return [{name: value for name, value in item.items() if name not in ours} for item in items]

    assert [item.type for item in whole.output] == [
        "reasoning",
        "message",
        "function_call",
        "message",
        "custom_tool_call",
    ]
    assert whole.output[2].arguments == '{"at":"sky"}'
    assert whole.output[4].input == "*** Begin"
    assert without_ids(streamed) == without_ids(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Let me look.And then?"


async def test_the_events_come_in_the_documented_order(tagged_renderer: PackageRenderer) -> None:
    async with running_gateway(tagged_renderer) as gateway:
        ids = gateway.renderer.encode(TEXT.replace("Let me look.", "Look"))
        gateway.engine.enqueue(StubAnswer(token_ids=ids))
        async with gateway.openai() as client:
            stream = await client.responses.create(model="policy", input="hi", tools=[LOOK, PATCH], stream=True)  # pyright: ignore - JSON
            kinds = [event.type.removeprefix("response.") async for event in stream]
    once = [kind for index, kind in enumerate(kinds) if index == 0 or kind != kinds[index - 1]]
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]

    def item(*inner: str) -> list[str]:
        return ["output_item.added", *inner, "output_item.done"]

    assert once == [
        "created",
        "in_progress",
        *item("reasoning_text.delta", "reasoning_text.done"),
        *item(*message),
        *item("function_call_arguments.delta", "function_call_arguments.done"),
        *item(*message),
        *item("custom_tool_call_input.delta", "custom_tool_call_input.done"),
        "completed",
    ]


async def test_a_tool_loop_reaches_the_model_in_its_own_form(gateway: GatewayUnderTest) -> None:
    history: list[Any] = [
        {"role": "developer", "content": "Look first."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"sky"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "c1", "output": "blue"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "and now?"},
    ]
    async with gateway.openai() as client:
        await client.responses.create(model="policy", input=history, tools=[LOOK, PATCH], store=True)  # pyright: ignore - JSON
    (turn,) = gateway.conversations.turns

    def call(identity: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert turn.request_messages == [
        {"role": "developer", "content": "Look first."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("c1", "look", '{"at":"sky"}'), call("c2", "patch", '{"input":"*** Begin"}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "and now?"},
    ]


async def test_what_was_answered_is_recognised_when_it_comes_back(tagged_renderer: PackageRenderer) -> None:
    """The echo of all output items is one assistant message, equal to the one that the log holds."""
    async with running_gateway(tagged_renderer) as gateway, gateway.openai() as client:
        gateway.engine.enqueue(StubAnswer(token_ids=gateway.renderer.encode(TEXT)))
        first = await client.responses.create(model="policy", input="hi", tools=[LOOK, PATCH])  # pyright: ignore - JSON
        echo = [item.to_dict() for item in first.output]
        history: list[Any] = [{"role": "user", "content": "hi"}, *echo, {"role": "user", "content": "thanks"}]
        await client.responses.create(model="policy", input=history, tools=[LOOK, PATCH])  # pyright: ignore - JSON
    first_turn, second_turn = gateway.conversations.turns
    assert second_turn.request_messages[1] == first_turn.response_message


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_was_cut_is_incomplete(gateway: GatewayUnderTest, stream: bool) -> None:
    ids = gateway.renderer.encode("one")
    gateway.engine.enqueue(StubAnswer(token_ids=ids, finish={"type": "length", "length": len(ids)}))
    async with gateway.openai() as client:
        if stream:
            async with client.responses.stream(model="policy", input="hi") as running:
                events = [event async for event in running]
            response = events[-1].response  # pyright: ignore - the last event has one
            assert events[-1].type == "response.incomplete"
        else:
            response = await client.responses.create(model="policy", input="hi")
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "one"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "response_format"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    gateway: GatewayUnderTest, fields: dict[str, Any], parameter: str
) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)
    assert gateway.conversations.placed == []


async def test_a_stalled_engine_ends_the_stream_in_an_error(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, timeouts=EngineTimeouts(idle_seconds=0.1)) as gateway:
        gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
        async with gateway.openai() as client:
            stream = await client.responses.create(model="policy", input="hi", stream=True)
            with pytest.raises(openai.APIError, match="no answer in time"):
                async for event in stream:
                    if event.type == "response.failed":
                        assert event.response.error is not None
                        raise openai.APIError(event.response.error.message, None, body=None)  # pyright: ignore - no request
        assert len(gateway.engine.aborted) == 1


async def test_unknown_fields_never_matter(gateway: GatewayUnderTest) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.post(
            "/v1/responses",
            json={
                "input": "hi",
                "include": ["reasoning.encrypted_content"],
                "reasoning": {"effort": "high"},
                "client_metadata": {"x": 1},
                "frobnicate": [1],
                "truncation": "auto",
            },
        )
    assert answer.status_code == 200
    assert answer.json()["reasoning"] == {"effort": "high"}
