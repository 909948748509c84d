"""The surface as the real OpenAI client sees it, and what it leaves on the log."""

import asyncio
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.engine.client import EngineTimeouts, HttpEngineClient
from clawstream.rendering.renderer import PackageRenderer
from schemas.events import TurnEvent
from schemas.events.base import RolloutPosition, TurnType
from schemas.events.turn import UntrainableReason
from services.gateway.capture import Capture
from tests.fixtures.gateway_app import GatewayUnderTest, running_gateway
from tests.fixtures.stub_engine import StubAnswer

USER: list[Any] = [{"role": "user", "content": "hi"}]
END = 2
"""Id of the end of a message."""


async def whole(gateway: GatewayUnderTest, **arguments: Any) -> Any:
    async with gateway.openai() as client:
        return await client.chat.completions.create(model="policy", messages=USER, **arguments)


async def streamed(gateway: GatewayUnderTest, **arguments: Any) -> list[Any]:
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(model="policy", messages=USER, stream=True, **arguments)
        return [chunk async for chunk in stream]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def check_fidelity(turn: TurnEvent, ids: list[int], logprobs: list[float]) -> None:
    assert turn.response_ids.to_numpy().tolist() == ids
    assert turn.response_logprobs.to_numpy().tobytes() == np.asarray(logprobs, dtype=np.float32).tobytes()


async def test_an_answer_and_its_turn(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("Hello there."), END]
    gateway.engine.enqueue(StubAnswer(token_ids=ids))
    completion = await whole(gateway)
    assert completion.choices[0].message.content == "Hello there."
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].finish_reason == "stop"
    (turn,) = gateway.conversations.turns
    assert turn.trainable
    check_fidelity(turn, ids, [-0.5 - index for index in range(len(ids))])
    assert turn.prompt_ids.to_numpy().tolist() == gateway.renderer.render(USER).token_ids
    assert turn.prompt_ids.to_numpy().tolist() == gateway.engine.requests[0]["input_ids"]
    assert completion.usage.prompt_tokens == turn.prompt_ids.element_count
    assert completion.usage.completion_tokens == len(ids)
    assert turn.response_id == completion.id
    assert turn.response_message == {"role": "assistant", "content": "Hello there."}
    assert turn.request_messages == USER
    assert [(span.weight_version, span.start, span.end) for span in turn.version_spans] == [(0, 0, len(ids))]
    assert turn.sampling.temperature == 1.0
    assert turn.first_token_at is not None
    assert turn.started_at <= turn.first_token_at <= turn.finished_at


async def test_a_stream_and_its_turn(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("Hello there."), END]
    gateway.engine.enqueue(StubAnswer(token_ids=ids))
    chunks = await streamed(gateway, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "Hello there."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usages = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(usages) == 1
    assert usages[0] is chunks[-1]
    assert usages[0].choices == []
    assert usages[0].usage.completion_tokens == len(ids)
    check_fidelity(gateway.conversations.turns[0], ids, [-0.5 - index for index in range(len(ids))])
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].id == gateway.conversations.turns[0].response_id


async def test_without_the_option_no_chunk_has_usage(gateway: GatewayUnderTest) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in await streamed(gateway))


async def test_tokens_reach_the_client_while_the_engine_still_works(gateway: GatewayUnderTest) -> None:
    gate = asyncio.Event()
    ids = gateway.renderer.encode("one two three")
    gateway.engine.enqueue(StubAnswer(token_ids=[*ids, END], gate=gate, gate_after_tokens=len(ids) - 1))
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(model="policy", messages=USER, stream=True)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
            if seen and not gate.is_set():
                assert not gateway.conversations.turns
                gate.set()
    assert seen == "one two three"


async def test_the_end_waits_for_the_record(gateway: GatewayUnderTest) -> None:
    gateway.conversations.finish_gate = asyncio.Event()
    request = asyncio.create_task(streamed(gateway))
    await gateway.engine.wait_for_requests(1)
    finished, _ = await asyncio.wait({request}, timeout=0.2)
    assert not finished
    gateway.conversations.finish_gate.set()
    assert (await request)[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("recorded", [True, False])
async def test_clients_learn_whether_the_turn_was_recorded(gateway: GatewayUnderTest, recorded: bool) -> None:
    gateway.conversations.record = recorded
    body = {"model": "policy", "messages": USER}
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert answer.headers["x-clawstream-recorded"] == str(recorded).lower()
    assert answer.json()["choices"][0]["message"]["content"]
    assert stream.text.endswith(f": x-clawstream-recorded: {str(recorded).lower()}\n\ndata: [DONE]\n\n")
    assert stream.headers["x-clawstream-turn-id"] != answer.headers["x-clawstream-turn-id"]


# Fidelity


async def test_a_split_that_the_tokenizer_would_not_make_is_kept(gateway: GatewayUnderTest) -> None:
    canonical = gateway.renderer.encode("capital")
    split = [token for letter in "capital" for token in gateway.renderer.encode(letter)]
    assert canonical != split
    gateway.engine.enqueue(StubAnswer(token_ids=[*split, END]))
    completion = await whole(gateway)
    assert completion.choices[0].message.content == "capital"
    assert gateway.conversations.turns[0].response_ids.to_numpy().tolist() == [*split, END]


async def test_an_emoji_over_four_tokens_streams_whole_and_all_its_tokens_are_kept(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("a😀b"), END]
    gateway.engine.enqueue(StubAnswer(token_ids=ids))
    chunks = await streamed(gateway)
    assert text_of(chunks) == "a😀b"
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)
    check_fidelity(gateway.conversations.turns[0], ids, [-0.5 - index for index in range(len(ids))])


@pytest.mark.parametrize(
    ("logprobs", "reason", "detail"),
    [
        ([-0.1, -0.2], UntrainableReason.LENGTH_MISMATCH, "4 ids, 2 log-probs"),
        ([-0.1] * 5, UntrainableReason.LENGTH_MISMATCH, "4 ids, 5 log-probs"),
        ([-0.1, None, -0.1, -0.1], UntrainableReason.NON_FINITE_LOGPROB, "token 1"),
        ([-0.1, -0.1, float("-inf"), -0.1], UntrainableReason.NON_FINITE_LOGPROB, "token 2"),
        ([], UntrainableReason.NO_LOGPROBS, "4 ids"),
    ],
)
async def test_wrong_logprobs_make_a_turn_untrainable_and_leave_the_user_alone(
    gateway: GatewayUnderTest, logprobs: list[float | None], reason: UntrainableReason, detail: str
) -> None:
    ids = [*gateway.renderer.encode("abc"), END]
    assert len(ids) == 4
    # JSON has no infinity: the engine sends null for it.
    recorded = [value if value is not None and math.isfinite(value) else math.nan for value in logprobs]
    for incremental in (True, False):
        gateway.engine.incremental = incremental
        gateway.engine.enqueue(
            StubAnswer(token_ids=ids, logprobs=logprobs), StubAnswer(token_ids=ids, logprobs=logprobs)
        )
        assert text_of(await streamed(gateway)) == "abc"
        assert (await whole(gateway)).choices[0].message.content == "abc"
    assert len(gateway.conversations.turns) == 4
    for turn in gateway.conversations.turns:
        assert (turn.trainable, turn.untrainable_reason) == (False, reason)
        assert detail in turn.untrainable_detail
        assert turn.response_ids.to_numpy().tolist() == ids
        # Neither cut nor padded.
        np.testing.assert_array_equal(turn.response_logprobs.to_numpy(), np.asarray(recorded, dtype=np.float32))


async def test_unknown_weights_make_a_turn_untrainable(gateway: GatewayUnderTest) -> None:
    gateway.engine.enqueue(StubAnswer(report_versions=False))
    gateway.engine.enqueue(StubAnswer())
    await whole(gateway)
    gateway.engine.weight_version = "default"
    await whole(gateway)
    reasons = [turn.untrainable_reason for turn in gateway.conversations.turns]
    assert reasons == [UntrainableReason.UNKNOWN_VERSION] * 2


@pytest.fixture(scope="module")
def long_lived_gateway(tiny_renderer: PackageRenderer) -> Iterator[tuple[asyncio.Runner, GatewayUnderTest]]:
    """One gateway for all examples of a property."""
    with asyncio.Runner() as runner:
        running = running_gateway(tiny_renderer)
        yield runner, runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))


@given(ids=st.lists(st.integers(3, 511), min_size=1, max_size=30), per_chunk=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_streamed_and_whole_text_are_equal_for_any_ids(
    long_lived_gateway: tuple[asyncio.Runner, GatewayUnderTest], ids: list[int], per_chunk: int
) -> None:
    runner, gateway = long_lived_gateway
    gateway.engine.enqueue(
        StubAnswer(token_ids=ids, tokens_per_chunk=per_chunk), StubAnswer(token_ids=ids, tokens_per_chunk=1)
    )
    chunks, completion = runner.run(streamed(gateway)), runner.run(whole(gateway))
    assert text_of(chunks) == completion.choices[0].message.content == gateway.renderer.decode(ids)
    first, second = gateway.conversations.turns[-2:]
    assert first.response_message == second.response_message
    assert first.response_ids == second.response_ids


# Reasoning and tools


async def test_reasoning_and_tool_calls_stream_as_they_are_whole(tagged_renderer: PackageRenderer) -> None:
    text = (
        "<think>\nhm\n</think>\n\nLet me look.\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call><|im_end|>'
    )
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    async with running_gateway(tagged_renderer) as gateway:
        ids = gateway.renderer.encode(text)
        gateway.engine.enqueue(StubAnswer(token_ids=ids), StubAnswer(token_ids=ids))
        completion = await whole(gateway, tools=tools)
        chunks = await streamed(gateway, tools=tools)
        first, second = gateway.conversations.turns
    message = completion.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me look.", "hm")
    assert [call.function.name for call in message.tool_calls] == ["look", "wait"]
    assert message.tool_calls[0].function.arguments == '{"at":"sky"}'
    assert completion.choices[0].finish_reason == "tool_calls"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "look", '{"at":"sky"}'),
        (1, "wait", "{}"),
    ]
    assert all(call.id and call.type == "function" for call in calls)
    assert text_of(chunks) == "Let me look."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert first.finish_reason == second.finish_reason == "tool_calls"
    assert first.response_message["content"] == "Let me look."
    assert [call["function"] for call in first.response_message["tool_calls"]] == [  # pyright: ignore - JSON
        call["function"]
        for call in second.response_message["tool_calls"]  # pyright: ignore - JSON
    ]


async def test_a_call_cut_by_the_cap_is_no_call(tagged_renderer: PackageRenderer) -> None:
    async with running_gateway(tagged_renderer) as gateway:
        ids = gateway.renderer.encode('<tool_call>\n{"name": "look", "argum')
        gateway.engine.enqueue(StubAnswer(token_ids=ids, finish={"type": "length", "length": len(ids)}))
        completion = await whole(gateway)
        assert completion.choices[0].finish_reason == "length"
        assert completion.choices[0].message.tool_calls is None
        assert gateway.conversations.turns[0].truncated


async def test_stop_strings_trim_the_text_and_keep_the_ids(gateway: GatewayUnderTest) -> None:
    ids = gateway.renderer.encode("one###")
    for _ in range(2):
        gateway.engine.enqueue(StubAnswer(token_ids=ids, finish={"type": "stop", "matched": "###"}))
    assert (await whole(gateway, stop=["###"])).choices[0].message.content == "one"
    assert text_of(await streamed(gateway, stop="###")) == "one"
    assert gateway.engine.requests[0]["sampling_params"]["stop"] == ["###"]
    assert gateway.conversations.turns[0].response_ids.to_numpy().tolist() == ids
    assert gateway.conversations.turns[0].response_message["content"] == "one"


async def test_the_clients_own_logprobs(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("a😀"), END]
    for _ in range(3):
        gateway.engine.enqueue(StubAnswer(token_ids=ids))
    expected = [-0.5 - index for index in range(len(ids))]
    completion = await whole(gateway, logprobs=True)
    assert [entry.logprob for entry in completion.choices[0].logprobs.content] == expected
    chunks = await streamed(gateway, logprobs=True)
    given_logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry.logprob for logprobs in given_logprobs if logprobs for entry in logprobs.content] == expected
    assert (await whole(gateway)).choices[0].logprobs is None


@pytest.mark.parametrize("incremental", [True, False])
async def test_the_likeliest_tokens_beside_the_sampled_one(tiny_renderer: PackageRenderer, incremental: bool) -> None:
    async with running_gateway(tiny_renderer, incremental=incremental) as gateway:
        ids = [*gateway.renderer.encode("Hello there."), END]
        answers = [StubAnswer(token_ids=ids, tokens_per_chunk=2) for _ in range(3)]
        gateway.engine.enqueue(*answers)
        content = (await whole(gateway, logprobs=True, top_logprobs=3)).choices[0].logprobs.content
        chunks = await streamed(gateway, logprobs=True, top_logprobs=3)
        assert [entry for chunk in chunks if (said := chunk.choices[0].logprobs) for entry in said.content] == content
        assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [[-0.25, -0.5, -0.75]] * len(ids)
        texts = [[gateway.renderer.decode([number + rank]) for rank in range(3)] for number in ids]
        assert [[top.token for top in entry.top_logprobs] for entry in content] == texts
        assert [entry.token for entry in content] == [row[0] for row in texts]
        assert gateway.engine.requests[-1]["top_logprobs_num"] == 3
        assert all(turn.trainable for turn in gateway.conversations.turns)
        (first, *_) = (await whole(gateway, logprobs=True)).choices[0].logprobs.content
        assert first.top_logprobs == []
        assert "top_logprobs_num" not in gateway.engine.requests[-1]


# Parameters


async def test_the_clients_parameters_reach_the_engine_and_the_turn(gateway: GatewayUnderTest) -> None:
    await whole(gateway, temperature=0.6, top_p=0.9, max_tokens=7, seed=5, presence_penalty=0.5)
    sent = gateway.engine.requests[0]["sampling_params"]
    assert {name: sent[name] for name in ("temperature", "top_p", "max_new_tokens", "presence_penalty")} == {
        "temperature": 0.6,
        "top_p": 0.9,
        "max_new_tokens": 7,
        "presence_penalty": 0.5,
    }
    assert sent["sampling_seed"] == 5
    assert sent["stop_token_ids"] == [END]
    (turn,) = gateway.conversations.turns
    assert turn.untrainable_reason is UntrainableReason.ALTERED_DISTRIBUTION
    assert turn.untrainable_detail == "top_p=0.9, presence_penalty=0.5"
    assert turn.sampling.seed == 5


@pytest.mark.parametrize(("temperature", "trainable"), [(1.0, True), (0.6, True), (0, False)])
async def test_temperature_alone_leaves_a_turn_trainable_unless_it_is_zero(
    gateway: GatewayUnderTest, temperature: float, trainable: bool
) -> None:
    await whole(gateway, temperature=temperature)
    assert gateway.conversations.turns[0].trainable == trainable


async def test_max_tokens_are_cut_to_the_context(gateway: GatewayUnderTest) -> None:
    await whole(gateway, max_completion_tokens=100_000)
    sent = gateway.engine.requests[0]
    assert sent["sampling_params"]["max_new_tokens"] == 2048 - len(sent["input_ids"]) - 1


async def test_headers_place_the_request(gateway: GatewayUnderTest) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    await whole(
        gateway,
        extra_headers={
            "X-Session-Id": "s 1",
            "x-session-affinity": "hint",
            "X-Turn-Type": "side",
            "X-Session-Done": "true",
            "traceparent": f"00-{trace}-00f067aa0ba902b7-01",
            "X-Task-Id": "t",
            "X-Group-Id": "g",
            "X-Rollout-Id": "r",
            "X-Step-Index": "3",
        },
        extra_body={"prompt_cache_key": "less"},
    )
    (incoming,) = gateway.conversations.placed
    assert incoming.session_header is not None
    assert re.fullmatch(r"sha256-[0-9a-f]{64}", incoming.session_header)
    assert incoming.session_hint == "hint"
    assert incoming.turn_type_header is TurnType.SIDE
    assert incoming.session_done
    assert incoming.trace_id == trace
    assert incoming.rollout == RolloutPosition(task_id="t", group_id="g", rollout_id="r", step_index=3)
    assert incoming.principal == "local"
    assert "OpenAI" in incoming.user_agent
    (turn,) = gateway.conversations.turns
    assert turn.untrainable_reason is UntrainableReason.SIDE_TURN
    assert turn.rollout == incoming.rollout


async def test_a_body_can_hint_at_the_session(gateway: GatewayUnderTest) -> None:
    await whole(gateway, extra_body={"prompt_cache_key": "key"})
    assert gateway.conversations.placed[0].session_hint == "key"
    assert gateway.conversations.placed[0].session_header is None


async def test_histories_that_cannot_be_rendered_as_sent_are_served_and_not_trained(gateway: GatewayUnderTest) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    messages: list[Any] = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *USER]
    async with gateway.openai() as client:
        await client.chat.completions.create(model="policy", messages=messages)
    (turn,) = gateway.conversations.turns
    assert turn.untrainable_reason is UntrainableReason.RENDERING_REPAIRED
    assert turn.request_messages == messages


# Refusals


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b'{"messages": []}', 400, "invalid_parameter"),
        (b'{"messages": "hi"}', 400, "invalid_parameter"),
        (b'{"messages": [7]}', 400, "invalid_parameter"),
        (b'{"messages": [{"role": "user", "content": 7}]}', 400, "invalid_messages"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "invalid_messages"),
        (b'{"n": 2, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_parameter"),
        (b'{"temperature": "hot", "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_parameter"),
        (b'{"max_tokens": 0, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_parameter"),
        (b'{"top_logprobs": 5, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_parameter"),
        (b'{"logit_bias": {"99999": 5}, "messages": [{"role": "user", "content": "x"}]}', 400, "invalid_parameter"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"role": "critic", "content": "x"}]}',
            400,
            "invalid_parameter",
        ),
        (b'{"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}', 404, "model_not_found"),
        (b'{"messages": [{"role": "user", "content": "' + b"long " * 3000 + b'"}]}', 400, "context_length_exceeded"),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * (1 << 20) + b'"}]}', 413, "request_too_large"),
        (b'{"messages": ' + b"[" * 100_000, 400, "invalid_json"),
    ],
)
async def test_bad_requests_are_refused_in_openais_form(
    gateway: GatewayUnderTest, body: bytes, status: int, code: str
) -> None:
    for sent in (body, body.replace(b'{"', b'{"stream": true, "', 1)):
        async with httpx.AsyncClient(base_url=gateway.base_url) as client:
            answer = await client.post("/v1/chat/completions", content=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert error["message"]
        assert error["type"] == "invalid_request_error"
    assert gateway.conversations.placed == []
    assert gateway.engine.requests == []
    assert f'code="{code}"' in gateway.metrics.exposition().decode()


async def test_a_role_that_no_model_knows_is_refused_by_its_place(gateway: GatewayUnderTest) -> None:
    with pytest.raises(openai.BadRequestError, match=r"messages\[2\].role is 'critic'") as caught:
        async with gateway.openai() as client:
            messages: list[Any] = [*USER, {"role": "developer", "content": "x"}, {"role": "critic", "content": "x"}]
            await client.chat.completions.create(model="policy", messages=messages)
    assert caught.value.param == "messages"


async def test_old_and_new_names_of_roles_are_rendered_as_the_templates_own(gateway: GatewayUnderTest) -> None:
    old: list[Any] = [{"role": "developer", "content": "Be brief."}, *USER, {"role": "function", "content": "42"}]
    new: list[Any] = [{"role": "system", "content": "Be brief."}, *USER, {"role": "tool", "content": "42"}]
    async with gateway.openai() as client:
        await client.chat.completions.create(model="policy", messages=old)
    assert gateway.engine.requests[0]["input_ids"] == gateway.renderer.render(new).token_ids


async def test_unknown_fields_never_matter(gateway: GatewayUnderTest) -> None:
    await whole(gateway, extra_body={"store": True, "frobnicate": {"x": [1]}, "user": 7, "n": 1, "stop": None})
    assert len(gateway.conversations.turns) == 1


async def test_half_an_emoji_is_replaced_everywhere(gateway: GatewayUnderTest) -> None:
    body = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}], "user": "\udc00"}'
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 200
    (turn,) = gateway.conversations.turns
    assert turn.request_messages[0]["content"] == "cut \ufffd"
    assert turn.model_dump_json().encode()


async def test_every_unknown_path_is_json(gateway: GatewayUnderTest) -> None:
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        for method, path, status in (("GET", "/", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/feedback", 405)):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"].startswith(f"{method} {path}")


# Engine faults


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("engine_status", "status", "error"),
    [
        (400, 400, openai.BadRequestError),
        (404, 404, openai.NotFoundError),
        (429, 429, openai.RateLimitError),
        (500, 503, openai.InternalServerError),
    ],
)
async def test_engine_failures_keep_their_meaning(
    gateway: GatewayUnderTest, engine_status: int, status: int, error: type[openai.APIStatusError], stream: bool
) -> None:
    for _ in range(3):
        gateway.engine.enqueue(StubAnswer(status=engine_status, error_body='{"error": {"message": "scripted"}}'))
    with pytest.raises(error) as caught:
        await (streamed(gateway) if stream else whole(gateway))
    assert caught.value.status_code == status
    assert "scripted" in caught.value.message
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))
    assert gateway.conversations.turns == []


async def test_no_engine_is_503_with_retry_after(gateway: GatewayUnderTest) -> None:
    gateway.router.closed = True
    with pytest.raises(openai.InternalServerError) as caught:
        await streamed(gateway)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "5"
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_tried_again_unseen(gateway: GatewayUnderTest, stream: bool) -> None:
    gateway.engine.enqueue(StubAnswer(status=503), StubAnswer(token_ids=[*gateway.renderer.encode("fine"), END]))
    if stream:
        assert text_of(await streamed(gateway)) == "fine"
    else:
        assert (await whole(gateway)).choices[0].message.content == "fine"
    assert gateway.router.failures == ["one"]
    (turn,) = gateway.conversations.turns
    assert turn.trainable


async def test_an_answer_that_was_not_sent_yet_is_tried_again_whole(gateway: GatewayUnderTest) -> None:
    ids = [*gateway.renderer.encode("fine"), END]
    gateway.engine.enqueue(StubAnswer(token_ids=ids, break_after_tokens=1), StubAnswer(token_ids=ids))
    assert (await whole(gateway)).choices[0].message.content == "fine"
    check_fidelity(gateway.conversations.turns[0], ids, [-0.5 - index for index in range(len(ids))])


async def test_a_stream_that_breaks_ends_in_an_error_and_is_not_trained(gateway: GatewayUnderTest) -> None:
    ids = gateway.renderer.encode("one two")
    gateway.engine.enqueue(StubAnswer(token_ids=[*ids, END], break_after_tokens=len(ids)))
    with pytest.raises(openai.APIError, match=r"^service unavailable: the connection to the engine was lost"):
        await streamed(gateway)
    (turn,) = gateway.conversations.turns
    assert turn.untrainable_reason is UntrainableReason.ENGINE_ABORTED
    assert turn.finish_reason == "abort"
    assert turn.response_message["content"] == "one two"
    assert 'gateway_errors_total{code="engine_unavailable"} 1.0' in gateway.metrics.exposition().decode()


async def test_a_stalled_engine_ends_at_its_deadline(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, timeouts=EngineTimeouts(idle_seconds=0.1)) as gateway:
        gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
        with pytest.raises(openai.APIError, match="no answer in time"):
            await streamed(gateway)
        assert len(gateway.engine.aborted) == 1


async def test_a_failure_of_our_own_is_a_500_in_openais_form(gateway: GatewayUnderTest) -> None:
    gateway.conversations.place_error = RuntimeError("secret detail")
    with pytest.raises(openai.InternalServerError) as caught:
        await whole(gateway)
    assert caught.value.status_code == 500
    assert "secret detail" not in caught.value.message


# Placing


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_is_asked_while_the_request_is_placed(gateway: GatewayUnderTest, stream: bool) -> None:
    gateway.conversations.place_gate = asyncio.Event()
    gateway.engine.enqueue(StubAnswer(token_ids=[*gateway.renderer.encode("one two"), END]))
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": USER, "stream": stream}))
        await gateway.engine.wait_for_requests(1)
        assert gateway.conversations.placed == []
        gateway.conversations.place_gate.set()
        answer = await asking
    [turn] = gateway.conversations.turns
    assert answer.headers["x-clawstream-turn-id"] == turn.turn_id
    assert gateway.engine.requests[0]["rid"] == f"{turn.turn_id}.1"
    assert turn.response_message["content"] == "one two"


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_said_by_an_engine_when_placing_fails(gateway: GatewayUnderTest, stream: bool) -> None:
    gateway.conversations.place_gate = asyncio.Event()
    gateway.conversations.place_error = RuntimeError("the index is gone")
    gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=2))
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": USER, "stream": stream}))
        async with asyncio.timeout(60):
            while "first_token_seconds_count 1.0" not in gateway.metrics.exposition().decode():
                await asyncio.sleep(0.001)
        gateway.conversations.place_gate.set()
        answer = await asking
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert gateway.engine.aborted == [gateway.engine.requests[0]["rid"]]
    assert gateway.conversations.turns == []


# Life cycles


async def test_a_waiting_stream_is_kept_alive_by_chunks(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, keep_alive_seconds=0.05) as gateway:
        gate = asyncio.Event()
        gateway.engine.enqueue(StubAnswer(token_ids=[*gateway.renderer.encode("late"), END], gate=gate))
        async with gateway.openai() as client:
            stream = await client.chat.completions.create(model="policy", messages=USER, stream=True)
            chunks: list[Any] = []
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 4:
                    gate.set()
        empty = [
            chunk for chunk in chunks[1:] if not chunk.choices[0].delta.content and not chunk.choices[0].finish_reason
        ]
        assert len(empty) >= 3
        assert text_of(chunks) == "late"


async def test_a_stream_begins_without_a_token_once_an_engine_has_the_request(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, keep_alive_seconds=600, stream_start_seconds=0.05) as gateway:
        gate = asyncio.Event()
        gateway.engine.enqueue(StubAnswer(token_ids=[*gateway.renderer.encode("late"), END], gate=gate))
        async with gateway.openai() as client:
            stream = await client.chat.completions.create(model="policy", messages=USER, stream=True)
            beginning = [await anext(stream) for _ in range(2)]
            assert [chunk.choices[0].delta.content for chunk in beginning] == ["", None]
            gate.set()
            assert text_of([chunk async for chunk in stream]) == "late"


async def test_what_fails_after_the_beginning_is_told_in_the_stream(tiny_renderer: PackageRenderer) -> None:
    async with running_gateway(tiny_renderer, keep_alive_seconds=600, stream_start_seconds=0.0) as gateway:
        gate = asyncio.Event()
        gateway.engine.enqueue(StubAnswer(gate=gate, stream_error={"message": "cannot", "code": 400}))
        async with gateway.openai() as client:
            stream = await client.chat.completions.create(model="policy", messages=USER, stream=True)
            await anext(stream)
            gate.set()
            with pytest.raises(openai.APIError, match="cannot"):
                _ = [chunk async for chunk in stream]


@pytest.mark.parametrize(("fault", "status"), [("refused", 400), ("away", 503), ("overloaded", 503)])
async def test_what_fails_before_an_engine_has_the_request_keeps_its_status(
    tiny_renderer: PackageRenderer, fault: str, status: int
) -> None:
    async with running_gateway(tiny_renderer, keep_alive_seconds=600, stream_start_seconds=0.0) as gateway:
        gateway.router.closed = fault == "away"
        gateway.engine.enqueue(*(StubAnswer(status=400 if fault == "refused" else 503) for _ in range(3)))
        with pytest.raises(openai.APIStatusError) as caught:
            await streamed(gateway)
        assert caught.value.status_code == status


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_who_leaves_before_the_first_token_ends_the_engines_work(
    gateway: GatewayUnderTest, stream: bool
) -> None:
    gateway.engine.enqueue(StubAnswer(gate=asyncio.Event()))
    request = asyncio.create_task(streamed(gateway) if stream else whole(gateway))
    await gateway.engine.wait_for_requests(1)
    request.cancel()
    rid = gateway.engine.requests[0]["rid"]
    async with asyncio.timeout(2):
        await gateway.engine.wait_for_abort(rid)
    # The next turn works, and an answer that ends by itself is not aborted.
    assert (await whole(gateway)).choices[0].finish_reason == "stop"
    assert gateway.router.leases == 0
    assert gateway.engine.aborted == [rid]
    assert len(gateway.conversations.turns) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_who_leaves_between_two_engines_disturbs_neither(
    gateway: GatewayUnderTest, stream: bool
) -> None:
    gateway.router.failure_gate = asyncio.Event()
    gateway.engine.enqueue(StubAnswer(status=503))
    request = asyncio.create_task(streamed(gateway) if stream else whole(gateway))
    async with asyncio.timeout(60):
        await gateway.router.is_waited_for.wait()
        request.cancel()
        while gateway.chat.requests_in_flight:
            await asyncio.sleep(0.001)
    assert gateway.engine.aborted == []
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_who_leaves_ends_the_work_of_the_engine_that_took_over(
    gateway: GatewayUnderTest, stream: bool
) -> None:
    gateway.engine.enqueue(StubAnswer(status=503), StubAnswer(gate=asyncio.Event()))
    request = asyncio.create_task(streamed(gateway) if stream else whole(gateway))
    await gateway.engine.wait_for_requests(2)
    request.cancel()
    async with asyncio.timeout(60):
        while gateway.chat.requests_in_flight:
            await asyncio.sleep(0.001)
    assert gateway.engine.aborted == [gateway.engine.requests[1]["rid"]]


async def test_an_engine_that_refuses_has_nothing_to_abort(gateway: GatewayUnderTest) -> None:
    gateway.engine.enqueue(StubAnswer(status=400))
    with pytest.raises(openai.BadRequestError):
        await whole(gateway)
    assert gateway.engine.aborted == []


async def test_a_failure_of_our_own_in_mid_answer_ends_the_engines_work(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Capture, "add", fail)
    gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
    with pytest.raises(openai.InternalServerError):
        await whole(gateway)
    assert gateway.engine.aborted == [gateway.engine.requests[0]["rid"]]


async def test_a_failure_of_our_own_is_told_though_the_engine_cannot_be_asked_to_end(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(Capture, "add", fail)
    monkeypatch.setattr(HttpEngineClient, "abort", fail)
    gateway.engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
    request = asyncio.create_task(whole(gateway))
    answered, _ = await asyncio.wait([request], timeout=30.0)
    assert answered, "the client waits for ever"
    with pytest.raises(openai.InternalServerError):
        await request


async def open_stream_after(gateway: GatewayUnderTest, tokens: int) -> Any:
    """An answer of five letters that stands still after some; the client has read them."""
    ids = gateway.renderer.encode("x😀")
    assert len(ids) == 5
    gateway.engine.enqueue(StubAnswer(token_ids=[*ids, END], gate=asyncio.Event(), gate_after_tokens=tokens))
    client = gateway.openai()
    stream = await client.chat.completions.create(model="policy", messages=USER, stream=True, logprobs=True)
    read = 0
    while read < tokens:
        logprobs = (await anext(stream)).choices[0].logprobs
        read += len(logprobs.content or []) if logprobs else 0
    return stream


async def test_a_client_who_leaves_in_mid_answer_gets_a_turn_that_is_never_trained(gateway: GatewayUnderTest) -> None:
    stream = await open_stream_after(gateway, 3)
    await stream.close()
    async with asyncio.timeout(2):
        await gateway.engine.wait_for_abort(gateway.engine.requests[0]["rid"])
        await gateway.conversations.wait_for_turns(1)
    (turn,) = gateway.conversations.turns
    assert turn.untrainable_reason is UntrainableReason.CLIENT_GONE
    assert turn.finish_reason == "abort"
    assert turn.response_ids.to_numpy().tolist() == gateway.renderer.encode("x😀")[:3]
    assert turn.response_message["content"] == "x\ufffd"  # a real cut inside a character


async def test_shutting_down_ends_open_streams_with_an_error(gateway: GatewayUnderTest) -> None:
    stream = await open_stream_after(gateway, 1)
    ending = asyncio.create_task(gateway.chat.finish(0))
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass
    await ending
    assert gateway.conversations.turns[0].untrainable_reason is UntrainableReason.ENGINE_ABORTED
    assert gateway.chat.requests_in_flight == 0


async def test_many_requests_at_once_are_served_apart(gateway: GatewayUnderTest) -> None:
    ids = {index: [*gateway.renderer.encode(f"answer {index}"), END] for index in range(16)}
    gateway.engine.default_answer = lambda request: StubAnswer(
        token_ids=ids[request["sampling_params"]["sampling_seed"]]
    )
    answers = await asyncio.gather(*(streamed(gateway, seed=index) for index in range(16)))
    assert [text_of(chunks) for chunks in answers] == [f"answer {index}" for index in range(16)]
    assert len({turn.turn_id for turn in gateway.conversations.turns}) == 16


# Models and feedback


async def test_models_tell_the_context_length(gateway: GatewayUnderTest) -> None:
    async with gateway.openai() as client:
        cards = [card async for card in client.models.list()]
        assert [(card.id, card.context_length) for card in cards] == [("policy", 2048)]  # pyright: ignore - extra field
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        assert (await client.get("/models")).json()["data"][0]["id"] == "policy"
        answer = await client.post("/chat/completions", json={"model": "alias", "messages": USER})
        assert answer.json()["model"] == "policy"


async def test_feedback_by_response_id(gateway: GatewayUnderTest) -> None:
    completion = await whole(gateway)
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        body = {"response_id": completion.id, "score": -1, "text": "too long"}
        answer = await client.post("/v1/feedback", json=body, headers={"Idempotency-Key": "k1"})
        outcome = await client.post("/v1/feedback", json={**body, "source": "pytest"})
        unknown = await client.post("/v1/feedback", json={**body, "response_id": "chatcmpl-0"})
        bad = await client.post("/v1/feedback", json={**body, "score": 2})
    assert answer.json()["id"] == "k1"
    assert answer.json()["next_state_id"]
    assert outcome.status_code == 200
    assert gateway.conversations.said[0] == {
        "principal": "local",
        "id": "k1",
        "score": -1.0,
        "text": "too long",
        "source": "user",
    }
    assert gateway.conversations.said[1]["source"] == "pytest"
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "response_not_found")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "score")


async def test_the_outcome_of_a_rollout_over_http(gateway: GatewayUnderTest) -> None:
    headers = {"X-Task-Id": "t", "X-Group-Id": "g", "X-Rollout-Id": "r", "X-Step-Index": "0"}
    async with httpx.AsyncClient(base_url=gateway.base_url) as client:
        asked = await client.post("/v1/chat/completions", json={"model": "policy", "messages": USER}, headers=headers)
        assert asked.status_code == 200
        body = {"rollout_id": "r", "score": 1, "source": "verifier", "steps": 1, "step_scores": [0.5]}
        answer = await client.post("/v1/feedback", json=body)
        unknown = await client.post("/v1/feedback", json={**body, "rollout_id": "another"})
    assert answer.json()["id"] == "outcome:r"
    assert len(answer.json()["next_state_ids"]) == 1
    (outcome,) = gateway.conversations.outcomes
    assert (outcome.score, outcome.step_scores, outcome.source) == (1.0, {0: 0.5}, "verifier")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "rollout_not_found")
