"""Published weights: loadable by Hugging Face, complete or absent, one content per number."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from clawstream.errors import WeightsError
from clawstream.weights.manifest import verify
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_models import ModelOptions
from services.trainer.policy_snapshot import PolicySnapshot
from services.trainer.publish import PublishedWeights, WeightStore
from tests.fixtures.training_samples import random_samples

NewPolicy = Callable[..., PolicyTrainer]


def trained(new_policy: NewPolicy, **options: Any) -> PolicySnapshot:
    policy = new_policy(**options)
    policy.train_step(random_samples([1.0, -1.0]), 1e-3)
    snapshot = policy.snapshot()
    assert snapshot is not None
    return snapshot


@pytest.fixture
def publish(tmp_path: Path, model_directory: Callable[[str], Path]) -> Callable[..., PublishedWeights]:
    def call(snapshot: PolicySnapshot, version: int = 1, step: str = "step-id") -> PublishedWeights:
        return WeightStore(tmp_path, "main").publish(
            snapshot,
            model_directory("qwen3"),
            weight_version=version,
            base_version=version - 1,
            lineage="run",
            train_step_id=step,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )

    return call


def test_hugging_face_loads_what_was_trained(new_policy: NewPolicy, publish: Callable[..., PublishedWeights]) -> None:
    snapshot = trained(new_policy)
    published = publish(snapshot)
    model = AutoModelForCausalLM.from_pretrained(published.directory, dtype=torch.float32)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in snapshot.weights.items())
    manifest = verify(published.directory, published.manifest_sha256)
    assert (manifest.policy, manifest.weight_version, manifest.base_version) == ("main", 1, 0)
    names = {file.name for file in manifest.files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_bf16_policy_publishes_bf16(new_policy: NewPolicy, publish: Callable[..., PublishedWeights]) -> None:
    published = publish(trained(new_policy, model_options=ModelOptions(dtype=torch.bfloat16)))
    model = AutoModelForCausalLM.from_pretrained(published.directory, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} <= {torch.bfloat16, torch.float32}
    size_bytes = (published.directory / "model.safetensors").stat().st_size
    assert size_bytes < 3 * sum(parameter.numel() for parameter in model.parameters()) + 10_000


def test_publishing_again_after_a_restart_gives_the_same_answer(
    new_policy: NewPolicy, publish: Callable[..., PublishedWeights]
) -> None:
    snapshot = trained(new_policy)
    assert publish(snapshot) == publish(snapshot)


def test_a_number_is_never_used_for_other_weights(
    new_policy: NewPolicy, publish: Callable[..., PublishedWeights]
) -> None:
    snapshot = trained(new_policy)
    publish(snapshot)
    snapshot.weights["model.norm.weight"][0] += 1
    with pytest.raises(WeightsError, match="never used twice"):
        publish(snapshot)
    with pytest.raises(WeightsError, match="never used twice"):
        publish(trained(new_policy), step="another-step")


def test_a_full_disk_publishes_nothing_and_leaves_no_litter(
    new_policy: NewPolicy, publish: Callable[..., PublishedWeights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = trained(new_policy)
    publish(snapshot)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(WeightsError, match="No space left"):
            publish(snapshot, version=2)
    assert [path.name for path in (tmp_path / "main").iterdir()] == ["00000001"]
    assert publish(snapshot, version=2).directory.name == "00000002"


def test_versions_are_listed_and_removed(
    new_policy: NewPolicy, publish: Callable[..., PublishedWeights], tmp_path: Path
) -> None:
    store = WeightStore(tmp_path, "main")
    assert store.versions() == []
    snapshot = trained(new_policy)
    for version in (1, 2, 10):
        publish(snapshot, version=version)
    store.delete(2)
    store.delete(2)
    assert store.versions() == [1, 10]
    assert sorted(path.name for path in (tmp_path / "main").iterdir()) == ["00000001", "00000010"]


@pytest.mark.parametrize("policy", ["", "a/b", ".hidden"])
def test_a_policy_must_be_a_directory_name(policy: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be the name"):
        WeightStore(tmp_path, policy)
