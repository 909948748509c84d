"""Weights that are not finite: whatever they leave in a slot, its next user is answered as by a fresh engine."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from services.engine.answer import Answer
from services.engine.requests import GenerateBody
from services.engine.scheduler import Scheduler
from services.engine.stops import IncrementalText, StopStrings
from services.engine.tiny_model import write_tiny_model
from services.engine.transformer import Transformer
from services.engine.weights import ModelWeights, load_weights

SLOTS = 3
LEFT_TOKENS = 190
"""Of every request that is ended before its prompt is read: three blocks of keys, the last one in part."""
PROMPT_LENGTHS = (5, 64, 130)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    torch.set_num_threads(1)
    directory: Path = write_tiny_model(tmp_path_factory.mktemp("model"))
    return load_weights(directory, dtype=torch.float32, packed=False)


def broken(weights: ModelWeights, value: float) -> ModelWeights:
    """Every key and value is `value`."""
    layers = [
        replace(layer, query_key_value=replace(layer.query_key_value, weight=torch.full_like(weight, value)))
        for layer in weights.layers
        for weight in [layer.query_key_value.weight]
    ]
    return replace(weights, layers=layers)


def scheduler(weights: ModelWeights) -> Scheduler:
    transformer = Transformer(weights.architecture, SLOTS, 256, torch.float32)
    return Scheduler(transformer, weights, weight_version="1", max_slots=SLOTS, max_prefill_tokens_per_step=LEFT_TOKENS)


def request(name: str, prompt_tokens: int, first: int = 0) -> Answer:
    """No two begin alike: none starts from what another has left."""
    sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    prompt_ids = [3 + (7 * index + prompt_tokens + first) % 400 for index in range(prompt_tokens)]
    return Answer(
        rid=name,
        body=GenerateBody.model_validate({"input_ids": prompt_ids, "sampling_params": sampling}),
        prompt_ids=prompt_ids,
        stop_ids={},
        text=IncrementalText(lambda ids: ""),
        stops=StopStrings([]),
        random=Random(0),
        publish=lambda progress: None,
    )


def answers(engine: Scheduler) -> list[list[int]]:
    """Of one request in every slot."""
    asked = [request(f"request-{length}", length) for length in PROMPT_LENGTHS]
    for each in asked:
        engine.add(each)
    while engine.has_work:
        engine.step()
    assert [each.finish_reason for each in asked] == [{"type": "length", "length": 6}] * SLOTS
    return [each.output_ids for each in asked]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("ends", ["by its logits", "before it has logits"])
def test_what_broken_weights_leave_in_any_slot_reaches_nobody(weights: ModelWeights, ends: str, value: float) -> None:
    engine = scheduler(broken(weights, value))
    slots: set[int | None] = set()
    for number in range(SLOTS):
        left = request(f"left-{number}", LEFT_TOKENS + 1, first=number)
        engine.add(left)
        engine.step()
        slots.add(left.slot)
        if ends == "by its logits":
            engine.step()
            assert "not finite" in (left.finish_reason or {})["message"]
        else:
            engine.abort(left.rid, "the client went away")
        assert not engine.has_work
    assert slots == set(range(SLOTS))
    engine.swap_weights(weights, "2", keep_running=False)
    assert answers(engine) == answers(scheduler(weights))
