"""The archive gives back exactly what was trained."""

from pathlib import Path

import numpy as np
import pytest

from clawstream.errors import BlobError
from services.trainer.batch_archive import BatchArchive, read_batch, rewrite_without
from services.trainer.sample import IdTargets, TeacherTargets, TrainingSample
from tests.fixtures.training_samples import random_samples, replace_sample


def test_a_batch_comes_back_exactly(tmp_path: Path) -> None:
    samples = random_samples([1.0, -0.25, 0.0], temperature=0.7)
    samples[1].rl_mask[0] = False
    archived = BatchArchive(tmp_path).write("lineage", 3, samples)
    found = read_batch(archived.path, archived.sha256)
    assert [sample.sample_id for sample in found] == ["sample-0", "sample-1", "sample-2"]
    for before, after in zip(samples, found, strict=True):
        for name in ("prompt_ids", "response_ids", "behaviour_log_probs", "rl_mask"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name), strict=True)
        assert (before.reward, before.sampling_temperature) == (after.reward, after.sampling_temperature)


def test_an_old_batch_that_cannot_be_removed_is_told_and_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[OSError] = []
    archive = BatchArchive(tmp_path, keep=1, on_not_removed=told.append)
    archive.write("lineage", 1, random_samples([1.0]))

    def refuse(_: Path) -> None:
        raise PermissionError("Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        archived = archive.write("lineage", 2, random_samples([1.0]))
    assert len(told) == 1
    assert len(read_batch(archived.path, archived.sha256)) == 1
    archive.write("lineage", 3, random_samples([1.0]))
    assert [path.name for path in tmp_path.rglob("step-*")] == ["step-00000003.safetensors"]


def test_teachers_advantages_and_rollouts_come_back_exactly(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rewarded, hinted, both = random_samples([1.0, 0.0, -1.0])

    def targets(sample: TrainingSample, width: int) -> IdTargets:
        shape = (sample.response_ids.size, width)
        return IdTargets(random.integers(-1, 9, shape).astype(np.int32), random.normal(size=shape).astype(np.float32))

    def teacher(
        sample: TrainingSample, top: IdTargets | None = None, support: IdTargets | None = None
    ) -> TeacherTargets:
        tokens = sample.response_ids.size
        log_probs = random.normal(size=tokens).astype(np.float32)
        return TeacherTargets(random.random(tokens) < 0.5, log_probs, top=top, support=support)

    samples = [
        replace_sample(rewarded, rollout_id="r", advantage=0.25),
        replace_sample(hinted, teacher=teacher(hinted, top=targets(hinted, 3))),
        replace_sample(both, teacher=teacher(both, top=targets(both, 2), support=targets(both, 4)), advantage=0.0),
    ]
    archived = BatchArchive(tmp_path).write("lineage", 3, samples)
    found = read_batch(archived.path, archived.sha256)
    assert [sample.rollout_id for sample in found] == ["r", "", ""]
    assert [sample.advantage for sample in found] == [0.25, None, 0.0]
    assert found[0].teacher is None
    for before, after in zip(samples[1:], found[1:], strict=True):
        assert before.teacher is not None
        assert after.teacher is not None
        for name in ("mask", "log_probs"):
            np.testing.assert_array_equal(getattr(before.teacher, name), getattr(after.teacher, name), strict=True)
        for name in ("top", "support"):
            expected, got = getattr(before.teacher, name), getattr(after.teacher, name)
            assert (expected is None) == (got is None)
            if expected is not None:
                np.testing.assert_array_equal(expected.ids, got.ids, strict=True)
                np.testing.assert_array_equal(expected.log_probs, got.log_probs, strict=True)


def test_the_same_batch_has_the_same_checksum(tmp_path: Path) -> None:
    first = BatchArchive(tmp_path / "a").write("lineage", 3, random_samples([1.0, -1.0]))
    second = BatchArchive(tmp_path / "b").write("lineage", 3, random_samples([1.0, -1.0]))
    other = BatchArchive(tmp_path / "c").write("lineage", 3, random_samples([1.0, 1.0]))
    assert first.sha256 == second.sha256 != other.sha256


def test_a_changed_or_missing_batch_is_refused(tmp_path: Path) -> None:
    archived = BatchArchive(tmp_path).write("lineage", 1, random_samples([1.0]))
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
        archive.write("lineage", step, random_samples([1.0]))
    assert kept(tmp_path) == ["lineage/step-00000009.safetensors", "lineage/step-00000010.safetensors"]


def test_a_lineage_that_begins_anew_replaces_nothing_and_its_batches_stay(tmp_path: Path) -> None:
    archive = BatchArchive(tmp_path, keep=2)
    lost = archive.write("lost", 9, random_samples([1.0]))
    archive.write("new", 1, random_samples([-1.0]))
    newest = archive.write("new", 9, random_samples([-1.0]))
    assert kept(tmp_path) == ["new/step-00000001.safetensors", "new/step-00000009.safetensors"]
    assert [sample.reward for sample in read_batch(newest.path, newest.sha256)] == [-1.0]

    whole = BatchArchive(tmp_path)
    assert whole.write("lost", 9, random_samples([1.0])) == lost
    whole.write("another", 9, random_samples([0.5]))
    assert [sample.reward for sample in read_batch(lost.path, lost.sha256)] == [1.0]


def test_a_batch_without_some_samples_is_rewritten_in_place(tmp_path: Path) -> None:
    samples = random_samples([1.0, -0.25, 0.0], temperature=0.7)
    archived = BatchArchive(tmp_path).write("lineage", 3, samples)
    new_sha256 = rewrite_without(archived.path, archived.sha256, frozenset({"sample-1"}))
    assert new_sha256 != archived.sha256
    left = read_batch(archived.path, new_sha256)
    assert [sample.sample_id for sample in left] == ["sample-0", "sample-2"]
    np.testing.assert_array_equal(left[1].response_ids, samples[2].response_ids, strict=True)
    with pytest.raises(BlobError):
        rewrite_without(archived.path, archived.sha256, frozenset({"sample-0"}))
    with pytest.raises(ValueError, match="would be empty"):
        rewrite_without(archived.path, new_sha256, frozenset({"sample-0", "sample-2"}))


def kept(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.safetensors"))
