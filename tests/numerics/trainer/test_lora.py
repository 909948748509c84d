"""LoRA: only adapters learn, and what is published merges into what was trained."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from clawstream.errors import WeightsError
from clawstream.weights.manifest import verify
from services.trainer.checkpoint import CheckpointStore
from services.trainer.engine.lora import LoraSettings
from services.trainer.packing import pack
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from services.trainer.publish import WeightStore
from tests.fixtures.training_samples import VOCABULARY_SIZE, random_samples
from tests.numerics.trainer.conftest import assert_same_weights, snapshot
from tests.numerics.trainer.tiny_models import ARCHITECTURES

LORA = LoraSettings(rank=3, alpha=12.0)
ADAPTERS = ModelOptions(lora=LORA)
RATE = 1e-2

NewPolicy = Callable[..., PolicyTrainer]
ModelDirectory = Callable[[str], Path]


def trained(new_policy: NewPolicy, architecture: str = "qwen3", steps: int = 3) -> PolicyTrainer:
    policy = new_policy(architecture, model_options=ModelOptions(lora=LORA, seed=5))
    for step in range(steps):
        assert policy.train_step(random_samples([1.0, -1.0, 1.0], seed=step), RATE).changed
    return policy


def publish(policy: PolicyTrainer, base: Path, root: Path, version: int = 1) -> Path:
    published = WeightStore(root, "tiny").publish(
        snapshot(policy),
        base,
        weight_version=version,
        base_version=0,
        lineage="lineage",
        train_step_id="step",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return published.directory


def test_before_the_first_step_the_policy_is_its_base(new_policy: NewPolicy) -> None:
    samples = random_samples([1.0, -1.0])
    for plain, adapted in zip(
        new_policy().score(samples), new_policy(model_options=ADAPTERS).score(samples), strict=True
    ):
        np.testing.assert_array_equal(plain, adapted)


def test_only_adapters_change(new_policy: NewPolicy) -> None:
    untouched = {name: each.detach().clone() for name, each in new_policy("qwen3").model.named_parameters().items()}
    policy = trained(new_policy)
    assert_same_weights(untouched, dict[str, torch.Tensor](policy.model.named_parameters()))
    weights = snapshot(policy).weights
    assert all(".lora_" in name for name in weights)
    assert len(weights) == 2 * 2 * 7, "two layers, A and B of seven projections"
    assert all(tensor.abs().max() > 0 for tensor in weights.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_published_adapters_merged_by_the_formula_are_the_trained_policy(
    architecture: str, new_policy: NewPolicy, model_directory: ModelDirectory, tmp_path: Path
) -> None:
    """W + (alpha / r) B A into Hugging Face's own model, which knows nothing of how Megatron fuses projections."""
    policy = trained(new_policy, architecture)
    directory = publish(policy, model_directory(architecture), tmp_path)
    assert {file.name for file in verify(directory).files} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 12.0)
    assert config["base_model_name_or_path"] == str(model_directory(architecture).resolve())
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    reference = AutoModelForCausalLM.from_pretrained(model_directory(architecture), dtype=torch.float32)
    adapters = load_file(directory / "adapter_model.safetensors")
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        module = reference.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        with torch.no_grad():
            assert isinstance(module, torch.nn.Linear)
            module.weight += 12.0 / 3 * adapters[name.replace("lora_A", "lora_B")] @ adapters[name]
    random = np.random.default_rng(0)
    prompt, response = (random.integers(0, VOCABULARY_SIZE, size) for size in (9, 12))
    with torch.no_grad():
        logits = policy.model.logits(pack([(prompt, response)]))
        expected = reference(torch.as_tensor([[*prompt, *response]]), use_cache=False).logits[0, 8:-1]
        base = AutoModelForCausalLM.from_pretrained(model_directory(architecture), dtype=torch.float32)
        unadapted = base(torch.as_tensor([[*prompt, *response]]), use_cache=False).logits[0, 8:-1]
    assert (expected - unadapted).abs().max() > 0.05, "the adapters do something"
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_checkpoint_holds_adapters_and_continues_bit_for_bit(new_policy: NewPolicy, tmp_path: Path) -> None:
    policy = trained(new_policy, steps=2)
    CheckpointStore(tmp_path).save(snapshot(policy), {}, step=2)
    checkpoint = CheckpointStore(tmp_path).latest_good()
    assert checkpoint is not None
    resumed = new_policy("qwen3", model_options=ModelOptions(lora=LORA, seed=99))
    checkpoint.restore(resumed)
    for each in (policy, resumed):
        each.train_step(random_samples([1.0, -1.0], seed=7), RATE)
    assert_same_weights(snapshot(policy).weights, snapshot(resumed).weights)


def test_published_adapters_can_be_continued_without_a_checkpoint(
    new_policy: NewPolicy, model_directory: ModelDirectory, tmp_path: Path
) -> None:
    policy = trained(new_policy)
    directory = publish(policy, model_directory("qwen3"), tmp_path)
    other = new_policy("qwen3", model_options=ADAPTERS)
    other.load_published_adapters(directory)
    assert_same_weights(snapshot(policy).weights, snapshot(other).weights)
    other_alpha = ModelOptions(lora=LoraSettings(rank=3, alpha=6.0))
    with pytest.raises(WeightsError, match=r"lora_alpha is 12\.0"):
        new_policy("qwen3", model_options=other_alpha).load_published_adapters(directory)


def test_chosen_modules_only(new_policy: NewPolicy) -> None:
    lora = LoraSettings(rank=2, alpha=2.0, modules=("linear_qkv",))
    policy = new_policy("llama", model_options=ModelOptions(lora=lora))
    assert {name.split(".")[-3] for name in snapshot(policy).weights} == {"q_proj", "k_proj", "v_proj"}
