"""Teacher scoring on the real SGLang: the log-probs of given ids, aligned by echoed id."""

import random

import pytest

from tests.numerics.engine.reference import Reference
from tests.sglang.conftest import TOLERANCE, Sglang

RANDOM = random.Random(7)
PROMPT = [RANDOM.randrange(3, 512) for _ in range(50)]
RESPONSE = [RANDOM.randrange(3, 512) for _ in range(20)]


async def test_scores_equal_hugging_face_at_temperature_one(sglang: Sglang, references: list[Reference]) -> None:
    scores = await sglang.client.score(PROMPT, RESPONSE, top_k=4)
    assert scores.token_ids == RESPONSE
    assert scores.logprobs == pytest.approx(references[0].of_output(PROMPT, RESPONSE), abs=TOLERANCE)
    assert scores.weight_version == 0
    rows = references[0].logprobs(PROMPT + RESPONSE)[len(PROMPT) - 1 : -1]
    assert scores.top_ids is not None
    assert scores.top_logprobs is not None
    for row, ids, logprobs in zip(rows, scores.top_ids, scores.top_logprobs, strict=True):
        assert ids == row.topk(4).indices.tolist()
        assert logprobs == pytest.approx(row.topk(4).values.tolist(), abs=TOLERANCE)


async def test_the_shortest_prompt_and_a_cached_one_are_aligned_too(
    sglang: Sglang, references: list[Reference]
) -> None:
    for prompt, response in ((PROMPT[:1], RESPONSE[:1]), (PROMPT, RESPONSE), (PROMPT, RESPONSE)):
        scores = await sglang.client.score(prompt, response)
        assert scores.logprobs == pytest.approx(references[0].of_output(prompt, response), abs=TOLERANCE)


async def test_scores_of_what_was_sampled_equal_what_sampling_said(sglang: Sglang) -> None:
    answer = await sglang.ask(PROMPT, temperature=1.0, max_new_tokens=30, ignore_eos=True)
    scores = await sglang.client.score(PROMPT, answer.token_ids)
    assert scores.logprobs == pytest.approx(answer.logprobs, abs=TOLERANCE)
