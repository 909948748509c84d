"""The engine client against the scripted engine, over HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from clawstream.engine.client import EngineTimeouts, HttpEngineClient
from clawstream.engine.interface import GenerationChunk, GenerationRequest, PauseMode
from clawstream.engine.wire import parse_scores, parse_token_texts
from clawstream.errors import EngineProtocolError, EngineRejected, EngineTimeout, EngineUnavailable
from schemas.events.base import VersionSpan
from tests.fixtures.stub_engine import StubAnswer, StubEngine


@pytest.fixture(params=[True, False], ids=["incremental", "cumulative"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[StubEngine]:
    async with StubEngine(incremental=request.param, weight_version="3") as stub:
        yield stub


@pytest.fixture
async def client(engine: StubEngine) -> AsyncIterator[HttpEngineClient]:
    client = HttpEngineClient("one", engine.base_url)
    yield client
    await client.close()


async def collect(client: HttpEngineClient, request_id: str = "r") -> list[GenerationChunk]:
    request = GenerationRequest(request_id, [1, 2, 3], {"temperature": 1.0, "max_new_tokens": 8})
    return [chunk async for chunk in client.generate(request)]


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 3, 100])
async def test_chunks_never_repeat_whatever_the_engine_sends(
    engine: StubEngine, client: HttpEngineClient, tokens_per_chunk: int
) -> None:
    ids = [7, 7, 7, 8, 7, 2]
    engine.enqueue(StubAnswer(token_ids=ids, tokens_per_chunk=tokens_per_chunk))
    chunks = await collect(client)
    assert [token for chunk in chunks for token in chunk.token_ids] == ids
    assert [value for chunk in chunks for value in chunk.logprobs] == [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5]
    assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in chunks)
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].finish_detail["matched"] == 2
    assert chunks[-1].version_spans == [VersionSpan(weight_version=3, start=0, end=6)]
    assert engine.requests[0]["input_ids"] == [1, 2, 3]
    assert engine.requests[0]["rid"] == "r"


async def test_null_logprobs_stay_none(engine: StubEngine, client: HttpEngineClient) -> None:
    engine.enqueue(StubAnswer(token_ids=[5, 6, 2], logprobs=[-1.0, None, -2.0]))
    chunks = await collect(client)
    assert [value for chunk in chunks for value in chunk.logprobs] == [-1.0, None, -2.0]


@pytest.mark.parametrize("logprobs", [[-1.0, -2.0], [-1.0, -2.0, -3.0, -4.0], []])
async def test_missing_and_surplus_logprobs_are_passed_on(
    engine: StubEngine, client: HttpEngineClient, logprobs: list[float | None]
) -> None:
    engine.enqueue(StubAnswer(token_ids=[5, 6, 2], logprobs=logprobs))
    chunks = await collect(client)
    assert [token for chunk in chunks for token in chunk.token_ids] == [5, 6, 2]
    assert [value for chunk in chunks for value in chunk.logprobs] == logprobs


async def test_version_spans_cross_an_update_in_mid_answer(engine: StubEngine, client: HttpEngineClient) -> None:
    gate = asyncio.Event()
    engine.enqueue(StubAnswer(token_ids=[5, 6, 7, 8, 2], gate=gate, gate_after_tokens=2))
    answer = asyncio.create_task(collect(client))
    await engine.wait_for_requests(1)
    await client.pause(PauseMode.RETRACT)
    await client.load_weights("directory", 4, flush_cache=True)
    gate.set()
    await client.resume()
    chunks = await answer
    spans = chunks[-1].version_spans
    assert spans[-1].weight_version == 4
    assert spans[-1].end == 5
    assert [path for path, _ in engine.control_calls] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
    ]
    assert engine.control_calls[1][1] == {"model_path": "directory", "weight_version": "4", "flush_cache": True}


async def test_a_weight_update_that_failed_with_status_200_is_refused(
    engine: StubEngine, client: HttpEngineClient
) -> None:
    engine.fail_next_load = "no such file"
    with pytest.raises(EngineRejected, match="no such file"):
        await client.load_weights("directory", 4, flush_cache=True)


async def test_a_version_that_is_no_number_is_unknown(engine: StubEngine, client: HttpEngineClient) -> None:
    engine.weight_version = "default"
    chunks = await collect(client)
    assert chunks[-1].version_spans == []
    information = await client.model_information()
    assert information.weight_version is None
    assert information.max_context_tokens == 2048


async def test_scores_are_aligned_by_echoed_id(engine: StubEngine, client: HttpEngineClient) -> None:
    scored = await client.score([1, 2, 3], [9, 8], top_k=2)
    assert scored.token_ids == [9, 8]
    assert scored.logprobs == [-1.0, -1.25]
    assert scored.top_ids == [[9, 10], [8, 9]]
    assert scored.top_logprobs == [[-1.0, -2.0], [-1.25, -2.25]]
    assert scored.weight_version == 3


async def test_log_probs_of_given_ids_come_in_the_order_of_the_ids(
    engine: StubEngine, client: HttpEngineClient
) -> None:
    scored = await client.score([1, 2, 3], [9, 8], given_ids=[30, 5])
    assert scored.given_logprobs == [[-1.3, -1.05], [-1.55, -1.3]]
    assert scored.engine == "one"
    assert (await client.score([1, 2, 3], [9, 8])).given_logprobs is None


def scoring(entries: list[list[object]], **fields: object) -> dict[str, object]:
    return {"meta_info": {"input_token_logprobs": entries, **fields}}


RIGHT: list[list[object]] = [[None, 3, None], [-1.0, 9, None], [-2.0, 8, None]]


def test_the_last_id_of_the_vocabulary_is_echoed_as_0() -> None:
    """SGLang 0.5.23 does; any other id that is not echoed is an error."""
    meta = {"input_token_logprobs": [[None, 7, None], [-1.0, 5, None], [-2.0, 0, None], [-3.0, 6, None]]}
    assert parse_scores({"meta_info": meta}, [5, 511, 6], "one").logprobs == [-1.0, -2.0, -3.0]
    with pytest.raises(EngineProtocolError, match="scored id 0 at token 1, asked for 8"):
        parse_scores({"meta_info": meta}, [5, 8, 9], "one")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (scoring(RIGHT[1:]), "asked to score 2 tokens, got 1 log-probs"),
        (scoring([*RIGHT, [-1.0, 7, None]]), "asked to score 2 tokens, got 3 log-probs"),
        (scoring([[None, 2, None], *RIGHT[1:]]), "scoring began after id 2, but the prompt ends with 3"),
        (scoring([[None, 2, None], [-1.0, 3, None], [-2.0, 9, None]]), "scoring began after id 2"),
        (scoring([RIGHT[0], [-1.0, 9, None], [-2.0, 9, None]]), "scored id 9 at token 1, asked for 8"),
        (scoring([RIGHT[0], [None, 9, None], RIGHT[2]]), "log-prob of token 0 is None"),
        (scoring(RIGHT, input_token_ids_logprobs=[None, [[-1.0, 30, None]]]), "expected 2 rows of 1 entries, got 1"),
        (
            scoring(RIGHT, input_token_ids_logprobs=[None, [[-1.0, 30, None]], [[-1.0, 31, None]]]),
            "other ids than the given ones at token 1",
        ),
        (scoring(RIGHT, input_token_ids_logprobs=[None, [[-1.0, 30, None]], None]), "of which 1 are whole"),
    ],
)
def test_a_score_that_is_off_by_anything_is_an_error_with_its_position(answer: dict[str, object], message: str) -> None:
    with pytest.raises(EngineProtocolError, match=message):
        parse_scores(answer, [9, 8], "one", given_ids=[30], last_prompt_id=3)


async def test_token_texts_are_the_engines_own_words(client: HttpEngineClient) -> None:
    assert await client.token_texts([5, 6]) == [None, None]
    with pytest.raises(EngineProtocolError, match="2 ids were sent, 1 came back"):
        parse_token_texts(scoring([[None, 5, "a"]]), [5, 6], "one")
    assert parse_token_texts(scoring([[None, 5, "a"], [-1.0, 6, "b"]]), [5, 6], "one") == ["a", "b"]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([-1.0, -1.0, -1.0, float("nan"), -1.0], id="not finite"),
        pytest.param([-1.0, -1.0, -1.0, None, -1.0], id="null"),
    ],
)
async def test_a_score_that_is_no_number_is_an_error(
    engine: StubEngine, client: HttpEngineClient, values: list[float]
) -> None:
    engine.scores = lambda ids: values
    with pytest.raises(EngineProtocolError, match="token 0"):
        await client.score([1, 2, 3], [9, 8])


@pytest.mark.parametrize(("status", "error"), [(400, EngineRejected), (422, EngineRejected), (500, EngineUnavailable)])
async def test_statuses_become_errors(
    engine: StubEngine, client: HttpEngineClient, status: int, error: type[Exception]
) -> None:
    engine.enqueue(StubAnswer(status=status, error_body='{"error": {"message": "too long"}}'))
    with pytest.raises(error, match="too long"):
        await collect(client)


async def test_an_error_that_is_not_json_is_kept(engine: StubEngine, client: HttpEngineClient) -> None:
    engine.enqueue(StubAnswer(status=502, error_body="<html>bad gateway</html>"))
    with pytest.raises(EngineUnavailable, match="bad gateway"):
        await collect(client)


async def test_an_error_inside_the_stream_is_raised(engine: StubEngine, client: HttpEngineClient) -> None:
    engine.enqueue(StubAnswer(stream_error={"message": "input too long", "code": 400}))
    with pytest.raises(EngineRejected, match="input too long"):
        await collect(client)


async def test_a_stream_that_breaks_off_is_unavailable(engine: StubEngine, client: HttpEngineClient) -> None:
    engine.enqueue(StubAnswer(token_ids=[1, 2, 3, 4], break_after_tokens=2))
    with pytest.raises(EngineUnavailable):
        await collect(client)


async def test_a_refused_connection_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = HttpEngineClient("gone", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(EngineUnavailable, match="gone"):
            await collect(client)
        assert not await client.is_healthy()
        await client.close()


async def test_a_stalled_stream_ends_at_the_idle_deadline(engine: StubEngine) -> None:
    engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=1))
    # The first token, too, must come in this time, on a busy machine.
    client = HttpEngineClient("one", engine.base_url, timeouts=EngineTimeouts(idle_seconds=1.0))
    stream = client.generate(GenerationRequest("r", [1], {"max_new_tokens": 8}))
    assert len((await anext(stream)).token_ids) == 1
    with pytest.raises(EngineTimeout):
        await anext(stream)
    await client.close()


async def test_an_error_whose_words_do_not_come_is_not_waited_for_for_ever() -> None:
    async def answers_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 100\r\n\r\nbusy")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answers_half, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    timeouts = EngineTimeouts(first_chunk_seconds=0.5)
    client = HttpEngineClient("one", f"http://127.0.0.1:{port}", timeouts=timeouts)
    asking = asyncio.create_task(collect(client))
    ended, _ = await asyncio.wait([asking], timeout=30.0)
    assert ended, "it waits for ever"
    with pytest.raises(EngineTimeout):
        await asking
    await client.close()
    server.close()


async def test_a_silence_that_is_explained_is_waited_out(engine: StubEngine) -> None:
    go_on = asyncio.Event()
    engine.enqueue(StubAnswer(gate=go_on, gate_after_tokens=1))
    asked: list[bool] = []

    def may_be_silent() -> bool:
        asked.append(True)
        if len(asked) == 3:
            go_on.set()
        return True

    timeouts = EngineTimeouts(idle_seconds=0.02)
    client = HttpEngineClient("one", engine.base_url, timeouts=timeouts, may_be_silent=may_be_silent)
    chunks = await collect(client)
    assert [token for chunk in chunks for token in chunk.token_ids] == [10, 11, 12, 2]
    assert chunks[-1].finish_reason == "stop"
    await client.close()


async def test_a_paused_engine_says_so_and_one_that_does_not_know_is_not_paused(
    engine: StubEngine, client: HttpEngineClient
) -> None:
    assert await client.accepts_requests()
    await client.pause(PauseMode.RETRACT)
    assert not await client.accepts_requests()
    assert (await client.server_information())["incremental_streaming_output"] is engine.incremental
    old = HttpEngineClient("old", f"{engine.base_url}/no-such-api")
    assert await old.accepts_requests()
    assert await old.server_information() == {}
    await old.close()


async def test_an_aborted_answer_says_so(engine: StubEngine, client: HttpEngineClient) -> None:
    engine.enqueue(StubAnswer(gate=asyncio.Event(), gate_after_tokens=2))
    answer = asyncio.create_task(collect(client, "stop-me"))
    await engine.wait_for_requests(1)
    await client.abort("stop-me")
    assert (await answer)[-1].finish_reason == "abort"
    assert engine.aborted == ["stop-me"]


async def test_answers_one_after_another_share_a_connection(engine: StubEngine, client: HttpEngineClient) -> None:
    for number in range(5):
        ended = asyncio.Event()
        engine.enqueue(StubAnswer(end_gate=ended))
        asyncio.get_running_loop().call_later(0.005, ended.set)  # engines end a stream after its last chunk
        await collect(client, f"r{number}")
    assert len(engine.requests) == 5
    assert len(engine.connections) == 1


async def test_an_answer_that_is_complete_does_not_wait_for_its_stream_to_end(
    engine: StubEngine, client: HttpEngineClient
) -> None:
    ended = asyncio.Event()
    engine.enqueue(StubAnswer(end_gate=ended))
    chunks = await collect(client)
    assert chunks[-1].finish_reason == "stop"
    await collect(client)
    assert len(engine.connections) == 2, "a connection whose answer has not ended serves no other"
    ended.set()
