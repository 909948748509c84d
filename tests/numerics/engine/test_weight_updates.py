"""New weights while answers run: version spans are exact and mean what they say; a failed update changes nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.tiny_model import write_tiny_model
from tests.numerics.engine.conftest import EngineStarter, EngineUnderTest, ModelMaker, ReferenceMaker
from tests.numerics.engine.reference import output_logprobs

TOLERANCE = 1e-4
PROMPT = list(range(10, 40))
LONG = {"temperature": 1.0, "max_new_tokens": 120, "ignore_eos": True}


async def update_in_mid_answer(
    engine: EngineUnderTest, new_model: Path, mode: str | None, **update: Any
) -> dict[str, Any]:
    """An answer during which the weights change: after its tenth token, paused with `mode` or not paused."""
    chunks: list[dict[str, Any]] = []
    updating: asyncio.Task[None] | None = None

    async def change() -> None:
        if mode is not None:
            await engine.post("/pause_generation", mode=mode)
        await engine.post("/update_weights_from_disk", model_path=str(new_model), weight_version="2", **update)
        if mode is not None:
            await engine.post("/continue_generation")

    async for chunk in engine.stream(PROMPT, **LONG):
        chunks.append(chunk)
        if len(chunks) == 10:
            updating = asyncio.create_task(change())
    assert updating is not None
    await updating
    return chunks[-1]


def switch_of(answer: dict[str, Any]) -> int:
    """The output token at which version 1 became version 2, after a check of the spans."""
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["1", "2"]
    switch = spans[0]["end"]
    assert [(span["start"], span["end"]) for span in spans] == [(0, switch), (switch, 120)]
    assert 10 <= switch < 120
    return switch


@pytest.mark.parametrize("mode", ["retract", None])
async def test_each_span_has_the_logprobs_of_its_version_alone(
    mode: str | None, start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    old, new = make_model("qwen2", 1), make_model("qwen2", 2)
    engine = await start_engine(old, weight_version="1")
    answer = await update_in_mid_answer(engine, new, mode)
    switch = switch_of(answer)
    before = reference(old).of_output(PROMPT, answer["output_ids"])
    after = reference(new).of_output(PROMPT, answer["output_ids"])
    assert output_logprobs(answer) == pytest.approx(before[:switch] + after[switch:], abs=TOLERANCE)
    assert answer["meta_info"]["weight_version"] == "2"


async def test_in_place_goes_on_from_old_keys_and_values(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    old, new = make_model("llama", 1), make_model("llama", 2)
    engine = await start_engine(old, weight_version="1")
    answer = await update_in_mid_answer(engine, new, "in_place")
    switch = switch_of(answer)
    expected = reference(old).in_place_logprobs(reference(new), PROMPT, answer["output_ids"], switch)
    assert output_logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)
    rebuilt = reference(new).of_output(PROMPT, answer["output_ids"])
    assert output_logprobs(answer)[switch:] != pytest.approx(rebuilt[switch:], abs=TOLERANCE)
    # Its slot holds keys of both versions: no later request may start from them.
    later = await engine.generate(PROMPT, temperature=0.0, max_new_tokens=4)
    assert later["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_no_prefix_of_old_weights_is_reused(
    mode: str, start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    old, new = make_model("llama", 1), make_model("llama", 2)
    engine = await start_engine(old, weight_version="1")
    await engine.generate(PROMPT, temperature=0.0, max_new_tokens=4)
    await engine.post("/pause_generation", mode=mode)
    await engine.post("/update_weights_from_disk", model_path=str(new), weight_version="2", flush_cache=False)
    await engine.post("/continue_generation")
    answer = await engine.generate(PROMPT, temperature=0.0, max_new_tokens=8, ignore_eos=True)
    assert answer["meta_info"]["cached_tokens"] == 0
    expected = reference(new).of_output(PROMPT, answer["output_ids"])
    assert output_logprobs(answer) == pytest.approx(expected, abs=TOLERANCE)


async def test_an_update_while_a_prompt_is_scored_scores_all_of_it_anew(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    old, new = make_model("llama", 1), make_model("llama", 2)
    engine = await start_engine(old, weight_version="1", max_prefill_tokens_per_step=1)
    ids = [index % 500 + 3 for index in range(400)]
    scoring = asyncio.create_task(engine.generate(ids, max_new_tokens=0, logprob_start_len=0))
    await engine.until(lambda: engine.engine.worker.num_requests == 1)
    await engine.post("/update_weights_from_disk", model_path=str(new), weight_version="2")
    answer = await scoring
    rows = reference(new).logprobs(ids)[:-1]
    expected = [rows[index, token].item() for index, token in enumerate(ids[1:])]
    logprobs = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)
    assert answer["meta_info"]["weight_version"] == "2"


async def test_requests_sent_while_paused_wait_and_end_under_the_new_weights(
    start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    old, new = make_model("llama", 1), make_model("llama", 2)
    engine = await start_engine(old, weight_version="1")
    await engine.post("/pause_generation", mode="retract")
    waiting = asyncio.create_task(engine.generate(PROMPT, temperature=0.0, max_new_tokens=4))
    await engine.until(lambda: engine.engine.num_in_flight == 1)
    await engine.post("/update_weights_from_disk", model_path=str(new), weight_version="2")
    assert not waiting.done()
    await engine.post("/continue_generation")
    answer = await waiting
    assert answer["output_ids"] == reference(new).greedy(PROMPT, 4)
    assert answer["meta_info"]["weight_versions"] == [{"version": "2", "start": 0, "end": len(answer["output_ids"])}]


async def test_pause_with_abort_ends_running_answers_with_what_they_have(
    start_engine: EngineStarter, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1))
    chunks: list[dict[str, Any]] = []
    async for chunk in engine.stream(PROMPT, **(LONG | {"max_new_tokens": 450})):
        chunks.append(chunk)
        if len(chunks) == 3:
            await engine.post("/pause_generation", mode="abort")
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 3 <= len(chunks[-1]["output_ids"]) < 450
    output_logprobs(chunks[-1])


def break_missing(directory: Path) -> Path:
    """No such directory."""
    return directory / "absent"


def break_shapes(directory: Path) -> Path:
    """Another architecture."""
    return write_tiny_model(directory / "wider", hidden_size=96)


def break_file(directory: Path) -> Path:
    """A torn weights file."""
    model = write_tiny_model(directory / "torn", seed=2)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return model


def break_index(directory: Path) -> Path:
    """An index that names a file which is not there."""
    model = write_tiny_model(directory / "shards", seed=2)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def break_config(directory: Path) -> Path:
    """A config that is not JSON."""
    model = write_tiny_model(directory / "config", seed=2)
    (model / "config.json").write_text("{")
    return model


@pytest.mark.parametrize("break_model", [break_missing, break_shapes, break_file, break_index, break_config])
async def test_a_failed_update_leaves_the_old_weights_in_service(
    break_model: Any, tmp_path: Path, start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    model = make_model("llama", 1)
    engine = await start_engine(model, weight_version="1")
    path = break_model(tmp_path)
    response = await engine.client.post(
        "/update_weights_from_disk", json={"model_path": str(path), "weight_version": "2"}
    )
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert str(path) in response.json()["message"]
    information = (await engine.client.get("/model_info")).json()
    assert information["weight_version"] == "1"
    assert information["model_path"] == str(model)
    answer = await engine.generate(PROMPT, temperature=0.0, max_new_tokens=4)
    assert answer["output_ids"] == reference(model).greedy(PROMPT, 4)
    assert answer["meta_info"]["weight_version"] == "1"


async def test_weights_may_disappear_once_they_are_loaded(
    tmp_path: Path, start_engine: EngineStarter, reference: ReferenceMaker, make_model: ModelMaker
) -> None:
    engine = await start_engine(make_model("llama", 1), weight_version="1")
    new = write_tiny_model(tmp_path / "new", seed=9)
    await engine.post("/update_weights_from_disk", model_path=str(new), weight_version="2")
    expected = reference(new).greedy(PROMPT, 8)
    file = new / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    file.unlink()
    answer = await engine.generate(PROMPT, temperature=0.0, max_new_tokens=8)
    assert answer["output_ids"] == expected


async def test_weights_that_are_not_finite_end_their_answers_and_poison_nobody(
    tmp_path: Path, start_engine: EngineStarter, make_model: ModelMaker, reference: ReferenceMaker
) -> None:
    from safetensors.torch import load_file, save_file

    good = make_model("llama", 1)
    bad = write_tiny_model(tmp_path / "bad", seed=1)
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"].fill_(float("nan"))
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    engine = await start_engine(good, weight_version="1", max_slots=1)
    await engine.post("/update_weights_from_disk", model_path=str(bad), weight_version="2")
    answer = await engine.generate(PROMPT, temperature=0.0, max_new_tokens=4)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert "not finite" in answer["meta_info"]["finish_reason"]["message"]
    await engine.post("/update_weights_from_disk", model_path=str(good), weight_version="1")
    answer = await engine.generate(PROMPT[:5], temperature=0.0, max_new_tokens=4)
    assert answer["output_ids"] == reference(good).greedy(PROMPT[:5], 4)
