"""What clawstream's client gets from the real SGLang is what was sampled: ids, log-probs and versions, to the token."""

import pytest

from clawstream.engine.wire import ChunkReader
from tests.numerics.engine.reference import Reference
from tests.sglang.conftest import TOLERANCE, Sglang

PROMPT = list(range(10, 40))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_a_streamed_answer_is_exact(sglang: Sglang, references: list[Reference], temperature: float) -> None:
    answer = await sglang.ask(PROMPT, temperature=temperature, max_new_tokens=40, ignore_eos=True)
    assert len(answer.token_ids) == 40
    assert answer.finish_reason == "length"
    assert [(span.weight_version, span.start, span.end) for span in answer.spans] == [(0, 0, 40)]
    expected = references[0].of_output(PROMPT, answer.token_ids, temperature)
    assert answer.logprobs == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_a_whole_answer_is_exact(sglang: Sglang, references: list[Reference], temperature: float) -> None:
    whole = await sglang.ask_whole(PROMPT, temperature=temperature, max_new_tokens=40, ignore_eos=True)
    chunk = ChunkReader("sglang").read(whole)
    expected = references[0].of_output(PROMPT, chunk.token_ids, temperature)
    assert len(chunk.token_ids) == 40
    assert chunk.logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert [(span.weight_version, span.start, span.end) for span in chunk.version_spans] == [(0, 0, 40)]


async def test_streamed_and_whole_answers_agree_with_hugging_face(sglang: Sglang, references: list[Reference]) -> None:
    streamed = await sglang.ask(PROMPT, temperature=0.0, max_new_tokens=32)
    whole = await sglang.ask_whole(PROMPT, temperature=0.0, max_new_tokens=32)
    assert streamed.token_ids == whole["output_ids"] == references[0].greedy(PROMPT, 32)


@pytest.mark.parametrize("stop", [{}, {"no_stop_trim": True}], ids=["trimmed", "kept"])
async def test_the_token_that_stopped_an_answer_is_captured(sglang: Sglang, stop: dict[str, bool]) -> None:
    free = await sglang.ask(PROMPT, temperature=0.0, max_new_tokens=12, ignore_eos=True)
    stopper = free.token_ids[5]
    end = free.token_ids.index(stopper) + 1
    answer = await sglang.ask(PROMPT, temperature=0.0, max_new_tokens=12, stop_token_ids=[stopper], **stop)
    assert answer.token_ids == free.token_ids[:end]
    assert answer.logprobs == pytest.approx(free.logprobs[:end], abs=TOLERANCE)
    assert answer.finish_reason == "stop"


async def test_an_aborted_answer_ends_with_what_it_has(sglang: Sglang) -> None:
    request = sglang.request(PROMPT, temperature=1.0, max_new_tokens=1500, ignore_eos=True)
    seen: list[int] = []
    finish, is_aborted = None, False
    async for chunk in sglang.client.generate(request):
        assert len(chunk.token_ids) == len(chunk.logprobs)
        seen += chunk.token_ids
        finish = chunk.finish_reason
        if len(seen) >= 5 and not is_aborted:  # A chunk may bring several tokens: nobody sees exactly five then.
            is_aborted = True
            await sglang.client.abort(request.request_id)
    assert finish == "abort"
    assert 5 <= len(seen) < 1500


async def test_several_answers_to_one_prompt_come_in_one_call(sglang: Sglang) -> None:
    prompt, sampling = list(range(10, 40)), {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True}
    answers = await sglang.client.generate_texts(prompt, sampling, answers=3)
    assert len({text for text, _ in answers}) == 3, "sampled independently"
    assert [(meta["prompt_tokens"], meta["completion_tokens"]) for _, meta in answers] == [(len(prompt), 30)] * 3
    assert len(await sglang.client.generate_texts(prompt, sampling)) == 1
