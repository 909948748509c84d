"""The archive gives back exactly what was trained."""

from pathlib import Path

import numpy as np
import pytest

from clawstream.errors import BlobError
from services.trainer.batch_archive import BatchArchive, read_batch
from tests.unit.trainer.tiny_models import random_samples


def test_a_batch_comes_back_exactly(tmp_path: Path) -> None:
    samples = random_samples([1.0, -0.25, 0.0], temperature=0.7)
    samples[1].rl_mask[0] = False
    archived = BatchArchive(tmp_path).write(3, samples)
    found = read_batch(archived.path, archived.sha256)
    assert [sample.sample_id for sample in found] == ["sample-0", "sample-1", "sample-2"]
    for before, after in zip(samples, found, strict=True):
        for name in ("prompt_ids", "response_ids", "behaviour_log_probs", "rl_mask"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name), strict=True)
        assert (before.reward, before.sampling_temperature) == (after.reward, after.sampling_temperature)


def test_the_same_batch_has_the_same_checksum(tmp_path: Path) -> None:
    first = BatchArchive(tmp_path / "a").write(3, random_samples([1.0, -1.0]))
    second = BatchArchive(tmp_path / "b").write(3, random_samples([1.0, -1.0]))
    other = BatchArchive(tmp_path / "c").write(3, random_samples([1.0, 1.0]))
    assert first.sha256 == second.sha256 != other.sha256


def test_a_changed_or_missing_batch_is_refused(tmp_path: Path) -> None:
    archived = BatchArchive(tmp_path).write(1, random_samples([1.0]))
    content = archived.path.read_bytes()
    archived.path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BlobError, match="checksum"):
        read_batch(archived.path, archived.sha256)
    archived.path.unlink()
    with pytest.raises(BlobError, match="missing"):
        read_batch(archived.path, archived.sha256)


def test_only_the_newest_batches_stay(tmp_path: Path) -> None:
    archive = BatchArchive(tmp_path, keep=2)
    for step in (1, 2, 9, 10):
        archive.write(step, random_samples([1.0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000009.safetensors",
        "step-00000010.safetensors",
    ]
