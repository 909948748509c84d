"""Hugging Face weights in and out: the same logits, and the same bits back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from clawstream.errors import SettingsError, WeightsError
from services.trainer.engine.bridge import build_bridge, read_config
from services.trainer.engine.model import PolicyModel
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.engine.weights import load_hugging_face, whole_tensors
from services.trainer.packing import pack
from tests.fixtures.training_samples import VOCABULARY_SIZE
from tests.numerics.trainer.tiny_models import ARCHITECTURES, tiny_config

ModelDirectory = Callable[[str], Path]


def loaded(directory: Path, layout: ParallelLayout) -> PolicyModel:
    model = PolicyModel(read_config(str(directory)))
    load_hugging_face(model, layout, directory)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_a_packed_row_equal_hugging_face_one_sequence_at_a_time(
    architecture: str, model_directory: ModelDirectory, layout: ParallelLayout
) -> None:
    random = np.random.default_rng(0)
    sequences = [
        (random.integers(0, VOCABULARY_SIZE, prompt), random.integers(0, VOCABULARY_SIZE, response))
        for prompt, response in ((5, 3), (1, 1), (40, 60))
    ]
    reference = AutoModelForCausalLM.from_pretrained(model_directory(architecture), dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(model_directory(architecture), layout).logits(pack(sequences))
        expected = torch.cat(
            [
                reference(torch.as_tensor(np.concatenate(pair))[None], use_cache=False).logits[0, len(pair[0]) - 1 : -1]
                for pair in sequences
            ]
        )
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < 1e-4  # 1e-3 is promised; logits here are about 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_after_import_gives_the_same_bits(
    architecture: str, model_directory: ModelDirectory, layout: ParallelLayout
) -> None:
    directory = model_directory(architecture)
    model = loaded(directory, layout)
    exported = dict(whole_tensors(model, layout, model.named_parameters()))
    original = load_file(directory / "model.safetensors")
    assert exported.keys() == original.keys()
    assert [name for name in original if not torch.equal(exported[name], original[name])] == []


def test_an_index_of_several_files_is_followed(
    model_directory: ModelDirectory, layout: ParallelLayout, tmp_path: Path
) -> None:
    original = load_file(model_directory("qwen3") / "model.safetensors")
    names = sorted(original)
    index: dict[str, str] = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: original[name] for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "optimizer.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    shutil.copy(model_directory("qwen3") / "config.json", tmp_path)
    model = loaded(tmp_path, layout)
    exported = dict(whole_tensors(model, layout, model.named_parameters()))
    assert all(torch.equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(33)}), "model.norm.weight"),
        (lambda weights: weights.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(7, 32)}), "k_proj"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(
    damage: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    model_directory: ModelDirectory,
    layout: ParallelLayout,
    tmp_path: Path,
) -> None:
    weights = load_file(model_directory("qwen3") / "model.safetensors")
    damage(weights)
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copy(model_directory("qwen3") / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=message):
        loaded(tmp_path, layout)


def test_a_damaged_file_is_refused_by_name(
    model_directory: ModelDirectory, layout: ParallelLayout, tmp_path: Path
) -> None:
    shutil.copytree(model_directory("qwen3"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match=rf"{file} cannot be read"):
        loaded(tmp_path, layout)


def test_a_directory_without_weights_is_refused(
    model_directory: ModelDirectory, layout: ParallelLayout, tmp_path: Path
) -> None:
    shutil.copy(model_directory("qwen3") / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"holds no \*.safetensors"):
        loaded(tmp_path, layout)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_field(
    architecture: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    tiny_config(architecture).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SettingsError, match=message):
        read_config(str(tmp_path))


def test_heads_that_the_ranks_cannot_share_are_refused(layout: ParallelLayout) -> None:
    config = tiny_config("llama")
    with pytest.raises(SettingsError, match="num_key_value_heads=2"):
        build_bridge(config, dtype=torch.float32, tensor_parallel_size=4, fused_norms=False)
