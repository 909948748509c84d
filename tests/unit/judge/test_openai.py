"""The OpenAI-compatible backend against a real HTTP server that answers badly."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from clawstream.errors import EngineBusy, EngineProtocolError, EngineRejected, EngineTimeout, EngineUnavailable
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import Abstention, Opinion
from services.judge.backends.openai import OpenAIBackend, retry_after_seconds
from services.judge.prompts import load_prompt
from tests.unit.judge.examples import reply

KEY = "sk-very-secret"
SPEC = JudgeSpec(backend="openai", model="a-judge", temperature=0.6, max_new_tokens=99)


class StubEndpoint:
    """Answers every chat request with what the test put here."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.body: Any = {}
        self.hang = False
        self.requests: list[tuple[str, Any]] = []

    async def chat(self, request: web.Request) -> web.Response:
        self.requests.append((request.headers.get("authorization", ""), await request.json()))
        if self.hang:
            await asyncio.Event().wait()
        if isinstance(self.body, str):
            return web.Response(status=self.status, headers=self.headers, text=self.body)
        return web.json_response(self.body, status=self.status, headers=self.headers)

    def says(self, content: str | None, finish_reason: str = "stop") -> None:
        self.body = {
            "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 31, "completion_tokens": 7},
        }


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[StubEndpoint, str]]:
    stub = StubEndpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stub.chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    yield stub, f"http://127.0.0.1:{listener.getsockname()[1]}/v1/"
    await runner.cleanup()


@pytest.fixture
async def backend(endpoint: tuple[StubEndpoint, str]) -> AsyncIterator[OpenAIBackend]:
    made = OpenAIBackend(
        SPEC, load_prompt("verdict-1"), base_url=endpoint[1], api_key=SecretStr(KEY), timeout_seconds=60.0
    )
    yield made
    await made.close()


async def test_a_vote_is_one_chat_completion(endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend) -> None:
    stub, _ = endpoint
    stub.says(r"The user is glad. \boxed{1}")
    (answer,) = await backend.call(backend.prepare(reply("Thanks, exactly.")))
    assert backend.interpret(answer.response) == Opinion(verdict=1)
    assert (answer.prompt_tokens, answer.completion_tokens) == (31, 7)
    ((authorization, body),) = stub.requests
    assert authorization == f"Bearer {KEY}"
    assert {name: body[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "a-judge",
        "temperature": 0.6,
        "max_tokens": 99,
    }
    (message,) = body["messages"]
    for part in ("What is the capital of Australia?", "Canberra.", "Thanks, exactly."):
        assert part in message["content"]


async def test_several_votes_are_one_chat_completion_and_usage_adds_up(
    endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend
) -> None:
    stub, _ = endpoint
    texts = [r"\boxed{1}", r"\boxed{-1}", "?"]
    stub.body = {
        "choices": [
            {"index": number, "message": {"content": text}, "finish_reason": "stop" if number else "length"}
            for number, text in enumerate(texts)
        ],
        "usage": {"prompt_tokens": 31, "completion_tokens": 20},
    }
    answers = await backend.call(backend.prepare(reply("Thanks")), 3)
    ((_, body),) = stub.requests
    assert body["n"] == 3
    assert {name: value for name, value in body.items() if name != "n"} == backend.prepare(reply("Thanks"))
    assert [backend.interpret(answer.response) for answer in answers] == [
        Opinion(abstention=Abstention.TRUNCATED),
        Opinion(verdict=-1),
        Opinion(abstention=Abstention.UNPARSABLE),
    ]
    assert [(answer.prompt_tokens, answer.completion_tokens) for answer in answers] == [(31, 7), (0, 7), (0, 6)]


async def test_one_vote_asks_as_it_always_did(endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend) -> None:
    stub, _ = endpoint
    stub.says(r"\boxed{1}")
    await backend.call(backend.prepare(reply("Thanks")), 1)
    ((_, body),) = stub.requests
    assert "n" not in body, "some endpoints refuse even n = 1"


async def test_fewer_more_and_broken_choices(endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend) -> None:
    stub, _ = endpoint
    good = {"message": {"content": r"\boxed{1}"}, "finish_reason": "stop"}
    for choices, expected in (([good], 1), ([good] * 5, 3), ([7, good, {}], 1)):
        stub.body = {"choices": choices, "usage": {"prompt_tokens": 9, "completion_tokens": 4}}
        answers = await backend.call(backend.prepare(reply("Thanks")), 3)
        assert len(answers) == expected
        assert sum(answer.prompt_tokens for answer in answers) == 9
        assert sum(answer.completion_tokens for answer in answers) == 4
    stub.body = {"choices": [7, {}]}
    with pytest.raises(EngineProtocolError, match=r"choices\[0\]"):
        await backend.call(backend.prepare(reply("Thanks")), 3)


async def test_an_answer_that_was_cut_off_has_no_verdict(
    endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend
) -> None:
    endpoint[0].says(r"\boxed{1}", finish_reason="length")
    (answer,) = await backend.call(backend.prepare(reply("Thanks")))
    assert backend.interpret(answer.response) == Opinion(abstention=Abstention.TRUNCATED)


async def test_an_empty_answer_abstains(endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend) -> None:
    endpoint[0].says(None)
    (answer,) = await backend.call(backend.prepare(reply("Thanks")))
    assert backend.interpret(answer.response) == Opinion(abstention=Abstention.UNPARSABLE)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, EngineRejected),
        (401, EngineRejected),
        (422, EngineRejected),
        (429, EngineBusy),
        (500, EngineUnavailable),
        (503, EngineBusy),
    ],
)
async def test_errors_say_what_happened_and_never_the_key(
    endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend, status: int, error: type[Exception]
) -> None:
    stub, _ = endpoint
    stub.status, stub.body = status, f"Incorrect API key provided: {KEY}"
    with pytest.raises(error, match=f"answered {status}: Incorrect API key provided: ") as caught:
        await backend.call(backend.prepare(reply("Thanks")))
    assert KEY not in str(caught.value)
    assert KEY not in repr(caught.value.__dict__)


async def test_retry_after_is_passed_on(endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend) -> None:
    stub, _ = endpoint
    stub.status, stub.headers, stub.body = 429, {"Retry-After": "7"}, "slow down"
    with pytest.raises(EngineBusy) as caught:
        await backend.call(backend.prepare(reply("Thanks")))
    assert caught.value.retry_after_seconds == 7.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), ("3", 3.0), (" 12 ", 12.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None), ("", None)],
)
def test_retry_after_headers(header: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(header) == seconds


@pytest.mark.parametrize("body", ["not json", [], {}, {"choices": []}, {"choices": [7]}, {"choices": [{}]}])
async def test_an_answer_of_another_shape_is_a_protocol_error(
    endpoint: tuple[StubEndpoint, str], backend: OpenAIBackend, body: Any
) -> None:
    endpoint[0].body = body
    with pytest.raises(EngineProtocolError, match="judge"):
        await backend.call(backend.prepare(reply("Thanks")))


async def test_a_silent_endpoint_times_out(endpoint: tuple[StubEndpoint, str]) -> None:
    stub, url = endpoint
    stub.hang = True
    backend = OpenAIBackend(SPEC, load_prompt("verdict-1"), base_url=url, api_key=None, timeout_seconds=0.05)
    with pytest.raises(EngineTimeout, match=r"within 0\.05 s"):
        await backend.call(backend.prepare(reply("Thanks")))
    await backend.close()


async def test_nobody_listening_is_an_outage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    backend = OpenAIBackend(SPEC, load_prompt("verdict-1"), base_url=url, api_key=None, timeout_seconds=60.0)
    with pytest.raises(EngineUnavailable):
        await backend.call(backend.prepare(reply("Thanks")))
    await backend.close()
