"""The same batches from the same weights give the same bits: twice, and as they were published at first."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream.errors import BlobError
from services.trainer.batch_archive import ArchivedBatch, BatchArchive
from services.trainer.checkpoint import CheckpointStore
from services.trainer.learning_rate import LearningRateSchedule
from services.trainer.policy import PolicyTrainer
from services.trainer.publish import WeightStore
from services.trainer.retrain.plan import RetrainingBatch
from services.trainer.retrain.training import RetrainedStep, StartingWeights, retrain
from tests.unit.trainer.tiny_models import random_samples

NewPolicy = Callable[..., PolicyTrainer]
NOW = datetime(2026, 3, 1, tzinfo=UTC)
SCHEDULE = LearningRateSchedule(peak=1e-3, shape="cosine", decay_updates=4)
REWARDS = [[1.0, -1.0, 1.0], [0.0, 0.0], [-1.0, 1.0]]


def original_run(policy: PolicyTrainer, model: Path, root: Path) -> tuple[list[RetrainingBatch], WeightStore]:
    """As the trainer's loop does it: archive, step, checkpoint, publish."""
    archive, store = BatchArchive(root / "batches"), WeightStore(root / "weights", "default")
    checkpoints = CheckpointStore(root / "checkpoints", keep=5)
    batches: list[RetrainingBatch] = []
    for step, rewards in enumerate(REWARDS, start=1):
        samples = random_samples(rewards, seed=step)
        archived = archive.write("first", step, samples)
        result = policy.train_step(samples, SCHEDULE.at(policy.optimizer.num_updates))
        snapshot = policy.snapshot()
        assert snapshot is not None
        checkpoints.save(snapshot, {}, step)
        if result.changed:
            publish(store, snapshot, model, step)
        batches.append(RetrainingBatch(step, archived, step if result.changed else None, "first"))
    return batches, store


def publish(store: WeightStore, snapshot: object, model: Path, version: int) -> None:
    store.publish(
        snapshot,  # pyright: ignore[reportArgumentType] - a PolicySnapshot
        model,
        weight_version=version,
        base_version=0,
        lineage="first",
        train_step_id=None,
        created_at=NOW,
    )


def again(
    policy: PolicyTrainer, start: StartingWeights, batches: list[RetrainingBatch], folder: Path, model: Path
) -> tuple[WeightStore, list[RetrainedStep]]:
    start.open(policy)
    store = WeightStore(folder, "default")
    done = retrain(
        policy,
        batches,
        SCHEDULE,
        store,
        model,
        lineage="again",
        every_step=True,
        now=lambda: NOW,
        progress=lambda _: None,
    )
    return store, done


def bits(store: WeightStore, version: int) -> bytes:
    return (store.directory_of(version) / "model.safetensors").read_bytes()


def test_two_retrainings_and_the_original_have_the_same_bits(
    new_policy: NewPolicy, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_directory("qwen3")
    batches, original = original_run(new_policy(), model, tmp_path / "run")
    assert original.versions() == [1, 3], "the second batch has nothing to learn from"
    base = StartingWeights(model)
    stores = [again(new_policy(), base, batches, tmp_path / name, model) for name in ("one", "two")]
    for store, done in stores:
        assert [(each.repeats, each.changed, each.weight_version) for each in done] == [
            (1, True, 1),
            (2, False, None),
            (3, True, 3),
        ]
        assert bits(store, 1) == bits(original, 1)
        assert bits(store, 3) == bits(original, 3)

    # From the checkpoint in the middle too: it has the optimizer. A published version has not.
    first = tmp_path / "run/checkpoints/step-00000001"
    resumed, _ = again(new_policy(), StartingWeights(model, checkpoint=first), batches[1:], tmp_path / "resumed", model)
    assert bits(resumed, 2) == bits(original, 3)
    fresh, _ = again(
        new_policy(), StartingWeights(model, weights=original.directory_of(1)), batches[1:], tmp_path / "fresh", model
    )
    assert bits(fresh, 2) != bits(original, 3)
    assert StartingWeights(model, checkpoint=first).identity() != base.identity()
    other, _ = again(new_policy(), base, batches[2:], tmp_path / "other", model)
    assert bits(other, 1) != bits(original, 3)


def test_a_batch_of_other_bytes_is_not_trained(
    new_policy: NewPolicy, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_directory("qwen3")
    archived = BatchArchive(tmp_path / "batches").write("first", 1, random_samples([1.0, -1.0]))
    wrong = RetrainingBatch(1, ArchivedBatch(archived.path, "0" * 64), 1, "first")
    with pytest.raises(BlobError, match="checksum"):
        again(new_policy(), StartingWeights(model), [wrong], tmp_path / "again", model)
    assert not (tmp_path / "again").exists()
