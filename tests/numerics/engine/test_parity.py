"""Ids and log-probs against Hugging Face: greedy, sampled, scored; mixed batches, cut prompts, reused prefixes."""

import asyncio
import random

import pytest

from services.engine.tiny_model import Architecture
from tests.numerics.engine.conftest import EngineStarter, ModelMaker, ReferenceMaker
from tests.numerics.engine.reference import output_logprobs

TOLERANCE = 1e-4


def random_prompts(seed: int, *lengths: int) -> list[list[int]]:
    """Prompts of ordinary tokens, one of each length."""
    source = random.Random(seed)
    return [[source.randrange(3, 512) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
async def test_greedy_answers_of_a_mixed_batch_equal_hugging_face(
    architecture: Architecture, start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    model = make_model(architecture, 1)
    # Fewer slots than requests and a small prefill budget: prompts are cut into chunks, requests queue and interleave.
    engine = await start_engine(model, max_slots=3, max_prefill_tokens_per_step=16)
    prompts = random_prompts(1, 1, 2, 17, 40, 90, 5, 33)
    answers = await asyncio.gather(*(engine.generate(prompt, temperature=0.0, max_new_tokens=24) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["output_ids"] == reference(model).greedy(prompt, 24)
        expected = reference(model).of_output(prompt, answer["output_ids"])
        assert output_logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)
        assert answer["meta_info"]["prompt_tokens"] == len(prompt)
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
async def test_sampled_logprobs_are_those_of_the_scaled_distribution_before_truncation(
    temperature: float,
    truncation: dict[str, float],
    start_engine: EngineStarter,
    make_model: ModelMaker,
    reference: ReferenceMaker,
) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model)
    [prompt] = random_prompts(2, 12)
    answer = await engine.generate(
        prompt, temperature=temperature, max_new_tokens=20, ignore_eos=True, top_logprobs_num=3, **truncation
    )
    rows = reference(model).logprobs(prompt + answer["output_ids"], temperature)[len(prompt) - 1 : -1]
    expected = [rows[index, token].item() for index, token in enumerate(answer["output_ids"])]
    assert output_logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)
    for row, top in zip(rows, answer["meta_info"]["output_top_logprobs"], strict=True):
        values, ids = row.topk(3)
        assert [entry[1] for entry in top] == ids.tolist()
        assert [entry[0] for entry in top] == pytest.approx(values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("start", [0, 20, 39])
async def test_scoring_given_tokens_equals_hugging_face_at_temperature_one(
    architecture: Architecture,
    start: int,
    start_engine: EngineStarter,
    make_model: ModelMaker,
    reference: ReferenceMaker,
) -> None:
    model = make_model(architecture, 1)
    engine = await start_engine(model, max_prefill_tokens_per_step=16)
    [ids] = random_prompts(3, 40)
    answer = await engine.generate(ids, max_new_tokens=0, temperature=0.5, logprob_start_len=start, top_logprobs_num=4)
    assert answer["output_ids"] == []
    assert answer["text"] == ""
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids[start:]
    assert entries[0][0] is None
    rows = reference(model).logprobs(ids)[start:-1]
    expected = [rows[index, token].item() for index, token in enumerate(ids[start + 1 :])]
    assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=TOLERANCE)
    tops = answer["meta_info"]["input_top_logprobs"]
    assert tops[0] is None
    for row, top in zip(rows, tops[1:], strict=True):
        assert [entry[1] for entry in top] == row.topk(4).indices.tolist()


async def test_log_probs_of_given_ids_equal_hugging_face(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model, max_prefill_tokens_per_step=16)
    [ids] = random_prompts(7, 40)
    given = [400, 3, 77]
    answer = await engine.generate(ids, max_new_tokens=0, logprob_start_len=9, token_ids_logprob=given)
    rows = answer["meta_info"]["input_token_ids_logprobs"]
    assert len(rows) == 40 - 9
    assert rows[0] is None
    expected = reference(model).logprobs(ids)[9:-1][:, given]
    for row, values in zip(rows[1:], expected.tolist(), strict=True):
        assert [entry[1] for entry in row] == given
        assert [entry[0] for entry in row] == pytest.approx(values, abs=TOLERANCE)


async def test_an_answer_with_prompt_logprobs_has_both(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model)
    [prompt] = random_prompts(4, 30)
    answer = await engine.generate(prompt, temperature=0.5, max_new_tokens=6, ignore_eos=True, logprob_start_len=10)
    rows = reference(model).logprobs(prompt)[10:-1]
    expected = [rows[index, token].item() for index, token in enumerate(prompt[11:])]
    scored = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    assert scored[0] is None
    assert scored[1:] == pytest.approx(expected, abs=TOLERANCE)
    sampled = reference(model).of_output(prompt, answer["output_ids"], temperature=0.5)
    assert output_logprobs(answer) == pytest.approx(sampled, abs=TOLERANCE)


async def test_a_reused_prefix_changes_no_logprob(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    model = make_model("qwen3", 1)
    engine = await start_engine(model, max_slots=2)
    [shared, one, other] = random_prompts(5, 60, 10, 12)
    await engine.generate(shared + one, temperature=0.0, max_new_tokens=4)
    # In place in the slot that holds it, then copied to another slot while the first is in use.
    answers = await asyncio.gather(
        *(engine.generate(shared + tail, temperature=0.0, max_new_tokens=40, ignore_eos=True) for tail in (one, other))
    )
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [69, 60]
    for tail, answer in zip((one, other), answers, strict=True):
        expected = reference(model).of_output(shared + tail, answer["output_ids"])
        assert output_logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)
    scored = await engine.generate(shared + other, max_new_tokens=0, logprob_start_len=50)
    assert scored["meta_info"]["cached_tokens"] == 50
    rows = reference(model).logprobs(shared + other)[50:-1]
    expected = [rows[index, token].item() for index, token in enumerate((shared + other)[51:])]
    logprobs = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)
    await engine.post("/flush_cache")
    again = await engine.generate(shared + one, temperature=0.0, max_new_tokens=1)
    assert again["meta_info"]["cached_tokens"] == 0


async def test_a_seed_decides_an_answer_whatever_runs_beside_it(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), max_slots=4)
    [prompt, *others] = random_prompts(6, 10, 20, 30)
    seeded = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 7}
    alone = await engine.generate(prompt, **seeded)
    together = await asyncio.gather(
        engine.generate(prompt, **seeded),
        *(engine.generate(other, max_new_tokens=16, ignore_eos=True) for other in others),
        engine.generate(prompt, **(seeded | {"sampling_seed": 8})),
    )
    assert together[0]["output_ids"] == alone["output_ids"]
    assert together[-1]["output_ids"] != alone["output_ids"]


async def test_bfloat16_is_close(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model, dtype="bfloat16")
    [prompt] = random_prompts(7, 20)
    answer = await engine.generate(prompt, temperature=0.0, max_new_tokens=10, ignore_eos=True)
    expected = reference(model).of_output(prompt, answer["output_ids"])
    assert output_logprobs(answer) == pytest.approx(expected, abs=0.5)
    assert output_logprobs(answer) != pytest.approx(expected, abs=1e-5)
