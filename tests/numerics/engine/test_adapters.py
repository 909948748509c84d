"""LoRA adapters: merged beside the weights in service, swapped in, and gone again with the next whole model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clawstream.errors import WeightsError
from services.engine.adapters import CONFIG_NAME
from services.engine.weights import load_weights
from tests.numerics.engine.conftest import EngineStarter, ModelMaker, ReferenceMaker

PROMPT = list(range(10, 30))
RANK, ALPHA = 3, 6.0


def write_adapters(base: Path, directory: Path, *, only: str = "", **config: Any) -> Path:
    """Random adapters of every projection of `base` whose name holds `only`."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if "_proj.weight" in name and only in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.size(1), generator=generator) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.size(0), RANK, generator=generator) / 8
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (directory / CONFIG_NAME).write_text(json.dumps(values))
    return directory


def write_merged(base: Path, adapters: Path, directory: Path) -> Path:
    """The same as a whole model, by the formula."""
    shutil.copytree(base, directory)
    weights, parts = load_file(base / "model.safetensors"), load_file(adapters / "adapter_model.safetensors")
    for name in list(weights):
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in parts:
            product = parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
            weights[name] = weights[name] + ALPHA / RANK * product
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
async def test_adapters_are_served_as_their_merged_model(
    architecture: Any, tmp_path: Path, make_model: ModelMaker, reference: ReferenceMaker, start_engine: EngineStarter
) -> None:
    base = make_model(architecture, 1)
    adapters = write_adapters(base, tmp_path / "adapters")
    merged = write_merged(base, adapters, tmp_path / "merged")
    engine = await start_engine(base)

    async def logprobs_of(ids: list[int]) -> list[float]:
        start = len(PROMPT) - 1
        answer = await engine.generate([*PROMPT, *ids], max_new_tokens=0, logprob_start_len=start)
        return [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]

    ids = reference(merged).greedy(PROMPT, 8)
    await engine.post("/update_weights_from_disk", model_path=str(adapters), weight_version="1")
    assert await logprobs_of(ids) == pytest.approx(reference(merged).of_output(PROMPT, ids), abs=1e-4)
    # Twice: onto the base, and not onto what is in service.
    await engine.post("/update_weights_from_disk", model_path=str(adapters), weight_version="2")
    assert await logprobs_of(ids) == pytest.approx(reference(merged).of_output(PROMPT, ids), abs=1e-4)
    await engine.post("/update_weights_from_disk", model_path=str(base), weight_version="3")
    found = await logprobs_of(ids)
    assert found == pytest.approx(reference(base).of_output(PROMPT, ids), abs=1e-4)
    assert found != pytest.approx(reference(merged).of_output(PROMPT, ids), abs=1e-2), "the adapters do something"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": None}, "r=None"),
    ],
    ids=str,
)
def test_adapters_of_another_formula_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path, make_model: ModelMaker
) -> None:
    base = make_model("llama", 1)
    adapters = write_adapters(base, tmp_path / "adapters", **config)
    with pytest.raises(WeightsError, match=message):
        load_weights(adapters, dtype=torch.float32, packed=False, base_directory=base)


def test_adapters_that_fit_no_weight_are_refused(tmp_path: Path, make_model: ModelMaker) -> None:
    base = make_model("llama", 1)
    adapters = write_adapters(base, tmp_path / "adapters", only="q_proj")
    with pytest.raises(WeightsError, match="adapters without a model"):
        load_weights(adapters, dtype=torch.float32, packed=False)
    file = adapters / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    for change, message in (
        ({name: tensors[name][1:].contiguous()}, "do not fit"),
        ({name.replace("q_proj", "x_proj"): tensors[name].clone()}, "unknown modules"),
    ):
        save_file(tensors | change, file)
        with pytest.raises(WeightsError, match=message):
            load_weights(adapters, dtype=torch.float32, packed=False, base_directory=base)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    with pytest.raises(WeightsError, match="None"):
        load_weights(adapters, dtype=torch.float32, packed=False, base_directory=base)
