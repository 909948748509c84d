"""Tiny random models in Hugging Face's format, and samples for them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.trainer.algorithms.binary import Binary
from services.trainer.engine.parallel import ParallelLayout
from services.trainer.policy import PolicyTrainer
from services.trainer.policy_snapshot import PolicySnapshot
from services.trainer.sample import TrainingSample
from tests.numerics.trainer.tiny_models import save_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def layout() -> ParallelLayout:
    return ParallelLayout.start(seed=0)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def directory(architecture: str) -> Path:
        return save_tiny_model(architecture, tmp_path_factory.mktemp(architecture))

    return directory


@pytest.fixture
def new_policy(layout: ParallelLayout, model_directory: Callable[[str], Path]) -> Callable[..., PolicyTrainer]:
    def make(architecture: str = "qwen3", **options: object) -> PolicyTrainer:
        policy = PolicyTrainer(layout, Binary(), **options)  # type: ignore[arg-type] # forwarded as they are
        policy.load(model_directory(architecture))
        return policy

    return make


def snapshot(policy: PolicyTrainer) -> PolicySnapshot:
    """What rank 0 takes."""
    taken = policy.snapshot()
    assert taken is not None
    return taken


def padded(samples: Sequence[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with responses as Hugging Face takes them: ids and attention mask, [samples, longest] each."""
    longest = max(sample.prompt_ids.size + sample.response_ids.size for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        sequence = np.concatenate([sample.prompt_ids, sample.response_ids])
        ids[row, : sequence.size] = torch.as_tensor(sequence)
        attention[row, : sequence.size] = 1
    return ids, attention


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def assert_other_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert any(not torch.equal(left[name], right[name]) for name in left)
