"""How requests travel: streams, stops, aborts, disconnects, queues, and what is refused."""

import asyncio
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from clawstream.engine.client import HttpEngineClient
from tests.numerics.engine.conftest import EngineStarter, ModelMaker, request_body
from tests.numerics.engine.reference import output_logprobs

PROMPT = list(range(10, 30))
SEEDED = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 3}
ENDLESS = {"temperature": 1.0, "max_new_tokens": 480, "ignore_eos": True}


async def test_streams_of_both_kinds_add_up_to_the_whole_answer(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    model = make_model("llama", 1)
    options: dict[str, Any] = SEEDED | {"top_logprobs_num": 2, "logprob_start_len": 5}
    cumulative = await start_engine(model, weight_version="4")
    incremental = await start_engine(model, weight_version="4", incremental_streaming_output=True)
    whole = await cumulative.generate(PROMPT, **options)
    await cumulative.post("/flush_cache")
    last = [chunk async for chunk in cumulative.stream(PROMPT, **options)][-1]
    chunks = [chunk async for chunk in incremental.stream(PROMPT, **options)]
    assert len(chunks) == 40
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert [token for chunk in chunks for token in chunk["output_ids"]] == whole["output_ids"]
    for key in ("output_token_logprobs", "output_top_logprobs"):
        joined = [entry for chunk in chunks for entry in chunk["meta_info"][key]]
        assert len(joined) == 40
        assert flat(joined) == pytest.approx(flat(whole["meta_info"][key]), abs=1e-5)
        assert flat(last["meta_info"][key]) == pytest.approx(flat(whole["meta_info"][key]), abs=1e-5)
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == list(range(1, 41))
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 39
    assert "input_token_logprobs" in chunks[0]["meta_info"]
    assert all("input_token_logprobs" not in chunk["meta_info"] for chunk in chunks[1:])
    for answer in (last, chunks[-1]):
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
        assert answer["meta_info"]["weight_versions"] == [{"version": "4", "start": 0, "end": 40}]
    for key in ("text", "output_ids"):
        assert last[key] == whole[key]


def flat(value: Any) -> list[float]:
    """The numbers of nested log-prob entries; null is 0."""
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    return [0.0 if value is None else float(value)]


async def test_a_stop_token_ends_the_answer_and_stays_in_its_ids(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1))
    free = await engine.generate(PROMPT, **SEEDED)
    position = 12
    stop = free["output_ids"][position]
    first = free["output_ids"].index(stop)
    answer = await engine.generate(PROMPT, **SEEDED, stop_token_ids=[stop])
    assert answer["output_ids"] == free["output_ids"][: first + 1]
    assert len(output_logprobs(answer)) == first + 1
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert free["text"].startswith(answer["text"])
    untrimmed = await engine.generate(PROMPT, **SEEDED, stop_token_ids=[stop], no_stop_trim=True)
    assert untrimmed["text"] != answer["text"]
    # A stop token that is also the last one allowed ended the answer by itself.
    exact = await engine.generate(PROMPT, **(SEEDED | {"max_new_tokens": first + 1}), stop_token_ids=[stop])
    assert exact["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_stop_string_across_tokens_is_cut_from_the_text_and_never_streamed(
    incremental: bool, start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model, incremental_streaming_output=incremental)
    tokenizer = AutoTokenizer.from_pretrained(model)
    free = await engine.generate(PROMPT, **SEEDED)
    pieces = [tokenizer.decode([token]) for token in free["output_ids"]]
    # The end of one token and the start of the next one, both readable.
    index = next(i for i in range(8, 38) if all(piece.isascii() and piece for piece in pieces[i : i + 2]))
    stop = pieces[index][-1] + pieces[index + 1][0]
    cut = free["text"].index(stop)
    chunks = [chunk async for chunk in engine.stream(PROMPT, **SEEDED, stop=[stop, "never said"])]
    text = "".join(chunk["text"] for chunk in chunks) if incremental else chunks[-1]["text"]
    assert text == free["text"][:cut]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    if not incremental:
        assert all(free["text"][:cut].startswith(chunk["text"]) for chunk in chunks)
        ids = chunks[-1]["output_ids"]
        assert ids == free["output_ids"][: len(ids)]
        assert stop in tokenizer.decode(ids)


async def test_a_stop_string_that_is_a_special_token_works_though_it_has_no_text(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1))
    # Look for a seed that samples <|im_start|> (id 1).
    for seed in range(200):
        free = await engine.generate(PROMPT, **(SEEDED | {"sampling_seed": seed, "temperature": 3.0}))
        if 1 in free["output_ids"]:
            break
    else:
        pytest.fail("no seed samples the special token")
    answer = await engine.generate(
        PROMPT, **(SEEDED | {"sampling_seed": seed, "temperature": 3.0}), stop="<|im_start|>"
    )
    assert answer["output_ids"] == free["output_ids"][: free["output_ids"].index(1) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "<|im_start|>"}


async def test_abort_ends_one_request_and_abort_all_the_rest(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=2)
    tasks = [asyncio.create_task(engine.generate(PROMPT, rid=f"r{index}", **ENDLESS)) for index in range(4)]
    await engine.until(lambda: engine.engine.worker.num_requests == 4)
    await engine.post("/abort_request", rid="r1")
    await engine.post("/abort_request", rid="unknown")
    aborted = await tasks[1]
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert aborted["meta_info"]["id"] == "r1"
    await engine.post("/abort_request", abort_all=True)
    for answer in await asyncio.gather(*tasks):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 480
        output_logprobs(answer)
    assert engine.engine.worker.num_requests == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("paused", [False, True])
async def test_a_client_that_goes_away_frees_its_slot(
    stream: bool, paused: bool, start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=1)
    if paused:
        await engine.post("/pause_generation", mode="retract")

    async def ask() -> None:
        body = request_body(PROMPT, dict(ENDLESS)) | {"stream": stream}
        async with httpx.AsyncClient(base_url=engine.client.base_url, timeout=60) as leaving:
            await leaving.post("/generate", json=body)

    asking = asyncio.create_task(ask())
    await engine.until(lambda: engine.engine.num_in_flight == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await engine.until(lambda: engine.engine.num_in_flight == 0)
    if paused:
        await engine.post("/continue_generation")
    await engine.until(lambda: engine.engine.worker.num_requests == 0)
    answer = await engine.generate(PROMPT, **SEEDED)
    assert len(answer["output_ids"]) == 40


async def test_several_answers_come_as_a_list_each_with_its_own_tokens_and_name(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=2, weight_version="4")
    free = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
    answers: Any = await engine.generate(PROMPT, **free, n=5, rid="mine")
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 5, "sampled independently"
    assert len({answer["meta_info"]["id"] for answer in answers}) == 5
    for answer in answers:
        assert (answer["meta_info"]["prompt_tokens"], answer["meta_info"]["completion_tokens"]) == (len(PROMPT), 20)
        assert len(output_logprobs(answer)) == 20
        assert answer["meta_info"]["weight_versions"] == [{"version": "4", "start": 0, "end": 20}]
    seeded: Any = await engine.generate(PROMPT, **SEEDED, n=3)
    alone = await engine.generate(PROMPT, **SEEDED)
    assert [answer["output_ids"] for answer in seeded] == [alone["output_ids"]] * 3
    assert engine.engine.num_in_flight == 0
    body = request_body(PROMPT, free | {"n": 2})
    refused = await engine.client.post("/generate", json=body | {"stream": True})
    assert refused.status_code == 400
    assert "sampling_params.n must be 1 with stream" in refused.json()["error"]["message"]


async def test_several_answers_are_aborted_left_and_counted_together(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=2, max_queued_requests=2)
    three = asyncio.create_task(engine.generate(PROMPT, rid="three", n=3, **ENDLESS))
    await engine.until(lambda: engine.engine.num_in_flight == 3)
    full = await engine.client.post("/generate", json=request_body(PROMPT, ENDLESS | {"n": 2}))
    never = await engine.client.post("/generate", json=request_body(PROMPT, ENDLESS | {"n": 5}))
    assert (full.status_code, never.status_code) == (503, 400)
    assert "places for 4 answers" in never.json()["error"]["message"]
    await engine.post("/abort_request", rid="three")
    answers: Any = await three
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 3

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=engine.client.base_url, timeout=60) as leaving:
            await leaving.post("/generate", json=request_body(PROMPT, ENDLESS | {"n": 3}))

    asking = asyncio.create_task(ask())
    await engine.until(lambda: engine.engine.worker.num_requests == 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await engine.until(lambda: engine.engine.worker.num_requests == 0)
    assert engine.engine.num_in_flight == 0


async def test_more_requests_than_slots_queue_and_all_are_answered(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=2)
    alone = [await engine.generate(PROMPT, **(SEEDED | {"sampling_seed": seed})) for seed in range(9)]
    together = await asyncio.gather(
        *(engine.generate(PROMPT, **(SEEDED | {"sampling_seed": seed})) for seed in range(9))
    )
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in alone]


async def test_a_full_queue_refuses_with_503_and_works_again_later(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=1, max_queued_requests=2)
    await engine.post("/pause_generation", mode="retract")
    tasks = [asyncio.create_task(engine.generate(PROMPT, **SEEDED)) for _ in range(3)]
    await engine.until(lambda: engine.engine.num_in_flight == 3)
    refused = await engine.client.post("/generate", json=request_body(PROMPT, dict(SEEDED)))
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "queue is full" in refused.json()["error"]["message"]
    await engine.post("/continue_generation")
    assert len(await asyncio.gather(*tasks)) == 3
    assert len((await engine.generate(PROMPT, **SEEDED))["output_ids"]) == 40


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [5] * 400, "sampling_params": {"max_new_tokens": 113}}, "maximum context length of 512"),
        ({"input_ids": [5] * 600, "sampling_params": {"max_new_tokens": 0}}, "maximum context length of 512"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [512]}, "vocabulary"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({}, "exactly one of text and input_ids"),
        ({"input_ids": [5], "text": "a"}, "exactly one of text and input_ids"),
        ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [5], "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
        ({"input_ids": [5], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"input_ids": [5], "sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"input_ids": [5], "return_logprobs": True}, "return_logprobs"),
        ({"input_ids": "5"}, "input_ids"),
    ],
    ids=str,
)
async def test_impossible_requests_are_refused_with_a_reason(
    body: dict[str, Any], message: str, start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1))
    for stream in (False, True):
        response = await engine.client.post("/generate", json=body | {"stream": stream})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


async def test_a_body_that_is_not_json_and_a_taken_rid_are_refused(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1))
    response = await engine.client.post("/generate", content=b"{")
    assert response.status_code == 400
    first = asyncio.create_task(engine.generate(PROMPT, rid="same", **ENDLESS))
    await engine.until(lambda: engine.engine.num_in_flight == 1)
    response = await engine.client.post("/generate", json=request_body(PROMPT, {"rid": "same"}))
    assert response.status_code == 400
    assert "in flight" in response.json()["error"]["message"]
    await engine.post("/abort_request", rid="same")
    await first


async def test_penalties_change_what_is_said(start_engine: EngineStarter, make_model: ModelMaker) -> None:
    engine = await start_engine(make_model("llama", 1))
    greedy = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    plain = await engine.generate(PROMPT, **greedy)
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        answer = await engine.generate(PROMPT, **greedy, **penalty)
        assert len(set(answer["output_ids"])) > len(set(plain["output_ids"]))


async def test_text_prompts_models_and_server_information(start_engine: EngineStarter, make_model: ModelMaker) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model, served_model_name="tiny", weight_version="7")
    text = "The capital of France"
    ids = AutoTokenizer.from_pretrained(model).encode(text)
    response = await engine.client.post(
        "/generate",
        json={
            "text": text,
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_text_in_logprobs": True,
            "sampling_params": {"max_new_tokens": 0},
        },
    )
    entries = response.json()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids
    assert "".join(entry[2] for entry in entries) == text
    card = (await engine.client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512)
    information = (await engine.client.get("/model_info")).json()
    assert (information["weight_version"], information["model_path"]) == ("7", str(model))
    assert (await engine.client.get("/server_info")).json()["status"] == "ready"
    assert (await engine.client.get("/health")).status_code == 200
    assert (await engine.client.get("/health_generate")).status_code == 200


async def test_the_client_takes_several_answers_and_one(start_engine: EngineStarter, make_model: ModelMaker) -> None:
    engine = await start_engine(make_model("llama", 1))
    client = HttpEngineClient("one", str(engine.client.base_url))
    sampling = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    three = await client.generate_texts(PROMPT, sampling, answers=3)
    one = await client.generate_texts(PROMPT, sampling)
    await client.close()
    assert (len(three), len(one)) == (3, 1)
    assert len({text for text, _ in three}) == 3
    assert [meta["completion_tokens"] for _, meta in three + one] == [12] * 4
