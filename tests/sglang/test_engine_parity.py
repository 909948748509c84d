"""`services.engine` beside the real SGLang: the same requests, the same ids, log-probs and keys."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from tests.numerics.engine.conftest import EngineUnderTest, running_engine
from tests.sglang.conftest import TOLERANCE, Sglang

PROMPTS = [[3 + (index * step) % 500 for index in range(length)] for step, length in ((7, 40), (11, 90), (13, 5))]
SGLANG_ONLY = frozenset(
    {
        # What SGLang measures of itself, and clawstream does not read.
        *("e2e_latency", "response_sent_to_client_ts", "queue_time", "prefill_launch_delay", "prefill_launch_latency"),
        *("request_received_ts", "inference_time", "decode_throughput", "forward_entry_time", "prefill_finished_ts"),
        *("num_retractions", "total_retractions", "cached_tokens_details", "reasoning_tokens", "dp_rank"),
        *("output_token_logprobs_length",),
    }
)


@pytest.fixture
async def engine(sglang: Sglang) -> AsyncIterator[EngineUnderTest]:
    """Ours, on the same model."""
    async with running_engine(sglang.models[0], weight_version="0", incremental_streaming_output=True) as engine:
        yield engine


async def test_greedy_ids_and_logprobs_are_equal(sglang: Sglang, engine: EngineUnderTest) -> None:
    for prompt in PROMPTS:
        theirs = await sglang.ask_whole(prompt, temperature=0.0, max_new_tokens=32)
        ours = await engine.generate(prompt, temperature=0.0, max_new_tokens=32)
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["text"] == theirs["text"]
        for key in ("finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions"):
            assert ours["meta_info"][key] == theirs["meta_info"][key], key
        assert _logprobs(ours) == pytest.approx(_logprobs(theirs), abs=TOLERANCE)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.5}], ids=str
)
async def test_penalties_do_the_same(sglang: Sglang, engine: EngineUnderTest, penalty: dict[str, float]) -> None:
    parameters: dict[str, float] = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True, **penalty}
    theirs = await sglang.ask_whole(PROMPTS[0], **parameters)
    ours = await engine.generate(PROMPTS[0], **parameters)
    assert ours["output_ids"] == theirs["output_ids"]
    assert _logprobs(ours) == pytest.approx(_logprobs(theirs), abs=TOLERANCE)
    without = await engine.generate(PROMPTS[0], temperature=0.0, max_new_tokens=48, ignore_eos=True)
    assert ours["output_ids"] != without["output_ids"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.6},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
async def test_both_report_the_logprobs_of_the_same_distribution(
    sglang: Sglang, engine: EngineUnderTest, parameters: dict[str, float]
) -> None:
    """What one sampled has the same log-prob in the other's whole distribution."""
    theirs = await sglang.ask_whole(PROMPTS[0], **(parameters | {"max_new_tokens": 1, "ignore_eos": True}))
    [token] = theirs["output_ids"]
    top = await engine.generate(
        PROMPTS[0], **(parameters | {"max_new_tokens": 1, "ignore_eos": True}), top_logprobs_num=512
    )
    [row] = top["meta_info"]["output_top_logprobs"]
    assert {entry[1]: entry[0] for entry in row}[token] == pytest.approx(_logprobs(theirs)[0], abs=TOLERANCE)


async def test_scores_are_equal(sglang: Sglang, engine: EngineUnderTest) -> None:
    body: dict[str, Any] = {
        "input_ids": PROMPTS[1],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 30,
        "top_logprobs_num": 3,
    }
    theirs = (await sglang.raw.post("/generate", json=body)).json()["meta_info"]
    ours = (await engine.client.post("/generate", json=body)).json()["meta_info"]
    for key in ("input_token_logprobs", "input_top_logprobs"):
        assert len(ours[key]) == len(theirs[key]) == 60
        assert ours[key][0] == theirs[key][0] or ours[key][0][0] is theirs[key][0][0] is None
    for mine, their in zip(ours["input_token_logprobs"][1:], theirs["input_token_logprobs"][1:], strict=True):
        assert mine[1] == their[1]
        assert mine[0] == pytest.approx(their[0], abs=TOLERANCE)
    for mine, their in zip(ours["input_top_logprobs"][1:], theirs["input_top_logprobs"][1:], strict=True):
        assert [entry[1] for entry in mine] == [entry[1] for entry in their]


async def test_answers_have_the_same_keys(sglang: Sglang, engine: EngineUnderTest) -> None:
    """Whoever reads one can read the other; the rest is named here, so that an upgrade shows what came."""
    parameters = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True}
    theirs = await sglang.ask_whole(PROMPTS[0], **parameters)
    ours = await engine.generate(PROMPTS[0], **parameters)
    assert theirs.keys() == ours.keys()
    assert ours["meta_info"].keys() <= theirs["meta_info"].keys()
    assert theirs["meta_info"].keys() - ours["meta_info"].keys() <= SGLANG_ONLY


async def test_streamed_chunks_have_the_same_keys_and_lengths(sglang: Sglang, engine: EngineUnderTest) -> None:
    body = {
        "input_ids": PROMPTS[0],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
    }
    theirs, ours = await asyncio.gather(_chunks(sglang.raw, body), _chunks(engine.client, body))
    assert [token for chunk in ours for token in chunk["output_ids"]] == [
        token for chunk in theirs for token in chunk["output_ids"]
    ]
    for mine, their in ((ours[0], theirs[0]), (ours[-1], theirs[-1])):
        assert mine.keys() == their.keys()
        assert mine["meta_info"].keys() <= their["meta_info"].keys()
        # There every chunk repeats the prompt's log-probs, here the first one has them.
        assert their["meta_info"].keys() - mine["meta_info"].keys() <= SGLANG_ONLY | {"input_token_logprobs"}


@pytest.mark.parametrize("path", ["/model_info", "/v1/models", "/server_info", "/ready"])
async def test_what_clawstream_asks_about_the_server_is_answered_alike(
    sglang: Sglang, engine: EngineUnderTest, path: str
) -> None:
    theirs, ours = await sglang.raw.get(path), await engine.client.get(path)
    assert theirs.status_code == ours.status_code == 200
    read = {
        "/model_info": ["model_path", "weight_version"],
        "/v1/models": ["data"],
        "/server_info": ["incremental_streaming_output"],
        "/ready": [],
    }
    for key in read[path]:
        assert type(theirs.json()[key]) is type(ours.json()[key])
    if path == "/v1/models":
        assert "max_model_len" in theirs.json()["data"][0]
        assert "max_model_len" in ours.json()["data"][0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "in_place"}),
        ("/continue_generation", {}),
        ("/flush_cache", {}),
        ("/abort_request", {"rid": "nobody"}),
    ],
)
async def test_control_calls_are_answered_alike(
    sglang: Sglang, engine: EngineUnderTest, path: str, body: dict[str, Any]
) -> None:
    theirs, ours = await sglang.raw.post(path, json=body), await engine.client.post(path, json=body)
    await sglang.client.resume()
    assert theirs.status_code == ours.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 4, "temperature": -1.0}},
        {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 4, "top_p": 1.5}},
        {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 100_000}},
        {"input_ids": [], "sampling_params": {"max_new_tokens": 4}},
    ],
    ids=["temperature", "top_p", "too-long", "empty"],
)
async def test_what_one_refuses_the_other_refuses(
    sglang: Sglang, engine: EngineUnderTest, body: dict[str, Any]
) -> None:
    theirs, ours = await sglang.raw.post("/generate", json=body), await engine.client.post("/generate", json=body)
    """Not asked here: an id beyond the vocabulary, which ends SGLang 0.5.23 and is 400 here."""
    assert theirs.status_code == ours.status_code == 400, theirs.text


def _logprobs(answer: dict[str, Any]) -> list[float]:
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return [entry[0] for entry in entries]


async def _chunks(client: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                found.append(orjson.loads(line.removeprefix("data: ")))
    return found
