"""The same batches from the same weights give the same bits: twice, and as they were published at first."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from clawstream.errors import BlobError
from schemas.events import TrainStepEvent
from schemas.events.base import RecordReference
from schemas.events.train_step import DroppedSample, DropReason, GuardAction
from services.trainer.algorithms.binary import Binary
from services.trainer.batch_archive import ArchivedBatch, BatchArchive
from services.trainer.checkpoint import CheckpointStore
from services.trainer.guards.bounds import Bound
from services.trainer.guards.controls import StepControls
from services.trainer.learning_rate import LearningRateSchedule
from services.trainer.policy import PolicyTrainer
from services.trainer.publish import WeightStore
from services.trainer.retrain.plan import Guarded, RetrainingBatch, StepRange, choose_batches, lineage_of
from services.trainer.retrain.training import RetrainedStep, StartingWeights, retrain
from services.trainer.sample import StepResult
from services.trainer.settings import TrainerSettings
from tests.fixtures.training_samples import random_samples
from tests.numerics.trainer.conftest import assert_other_weights, assert_same_weights

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


def entropy(coefficients: Mapping[str, float]) -> Binary:
    return Binary(**coefficients)


def event(step: int, archived: ArchivedBatch, result: StepResult | None, controls: Guarded) -> TrainStepEvent:
    """As the loop writes it."""
    held = result is None
    ref = RecordReference(topic="samples", partition=0, offset=0)
    dropped = [] if result is None else [(name, str(breach)) for name, breach in result.dropped.items()]
    holds = () if result is None else result.held
    return TrainStepEvent(
        train_step_id=f"first-{step}",
        lineage="first",
        policy="default",
        step=step,
        base_version=0,
        weight_version=step if result is not None and result.changed else None,
        unchanged_reason="held" if held else str(result.unchanged_reason or ""),
        closed_by="count",
        samples=[],
        drops=[
            DroppedSample(sample_id=name, turn_id="", ref=ref, reason=DropReason.GUARD, detail=detail)
            for name, detail in dropped
        ],
        guards=[
            GuardAction(
                guard=each.guard, action="hold", measurement=each.measurement, value=each.value, limit=each.limit
            )
            for each in holds
        ],
        knobs=dict(controls.knobs),
        batch_uri=archived.path.as_uri(),
        batch_sha256=archived.sha256,
        started_at=NOW,
        finished_at=NOW,
    )


def test_what_guards_did_is_done_again(
    new_policy: NewPolicy, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Knobs, a dropped sample and a held batch: the same bits again; and other ones without the guards."""
    model, archive = model_directory("qwen3"), BatchArchive(tmp_path / "batches")
    policy = new_policy(with_coefficients=entropy)
    samples = [random_samples([1.0, -1.0, 1.0], seed=seed) for seed in range(4)]
    shifts = [each.mean_absolute_shift for each in new_policy().train_step(samples[1], 1e-9).samples.values()]
    farthest = Bound("shift", "shift_mean_abs", high=sum(sorted(shifts)[-2:]) / 2)
    turned = [{}, {"entropy_coefficient": 0.1}, {}, {"entropy_coefficient": 0.2, "learning_rate": 0.25}]
    drops = [(), (farthest,), (), ()]
    events: list[TrainStepEvent] = []
    for step, (batch, knobs, drop) in enumerate(zip(samples, turned, drops, strict=True), start=1):
        archived = archive.write("first", step, batch)
        guarded = Guarded(knobs)
        result: StepResult | None = None
        if step != 3:  # a guard holds that one before the step
            rate = SCHEDULE.at(policy.optimizer.num_updates) * guarded.learning_rate_factor
            result = policy.train_step(batch, rate, StepControls(guarded.controls().coefficients, drop=drop))
        events.append(event(step, archived, result, guarded))
    assert len(events[1].drops) == 1
    weights = snapshot_of(policy)

    retrained = new_policy(with_coefficients=entropy)
    plan = choose_batches(events, "default", None, StepRange(1, None))
    _, done = again(retrained, StartingWeights(model), plan, tmp_path / "again", model)
    assert [each.unchanged_reason for each in done] == ["", "", "held", ""]
    assert [sorted(each.guarded) for each in done] == [[], ["dropped", "knobs"], ["held"], ["knobs"]]
    assert_same_weights(snapshot_of(retrained), weights)

    plain = choose_batches(events, "default", None, StepRange(1, None), with_guards=False)
    free = new_policy()
    _, done = again(free, StartingWeights(model), plain, tmp_path / "free", model)
    assert [each.changed for each in done] == [True] * 4
    assert_other_weights(snapshot_of(free), weights)
    settings = TrainerSettings(name="trainer", model=model)
    assert lineage_of("w", plan, settings) != lineage_of("w", plain, settings)


def test_a_part_that_a_guard_held_is_held_again(
    new_policy: NewPolicy, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_directory("qwen3")
    batch = random_samples([1.0, -1.0, 1.0, -1.0], seed=5)
    archived = BatchArchive(tmp_path / "batches").write("first", 1, batch)
    policy = new_policy(updates_per_batch=2)
    entropies = [
        new_policy().train_step(part, 1e-9).metrics["entropy_mean"] for part in (batch[:2], batch[2:])
    ]  # of the two parts, before anything was learned
    bound = Bound(
        "exploration", "entropy_mean", **{"high" if entropies[1] > entropies[0] else "low": sum(entropies) / 2}
    )
    result = policy.train_step(batch, SCHEDULE.at(0), StepControls(hold=(bound,)))
    assert (result.changed, result.metrics["num_updates"], len(result.held)) == (True, 1, 1)
    (chosen,) = choose_batches([event(1, archived, result, Guarded())], "default", None, StepRange(1, None))
    retrained = new_policy(updates_per_batch=2)
    again(retrained, StartingWeights(model), [chosen], tmp_path / "again", model)
    assert_same_weights(snapshot_of(retrained), snapshot_of(policy))


def snapshot_of(policy: PolicyTrainer) -> dict[str, torch.Tensor]:
    taken = policy.snapshot()
    assert taken is not None
    return taken.weights


def test_a_batch_of_other_bytes_is_not_trained(
    new_policy: NewPolicy, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_directory("qwen3")
    archived = BatchArchive(tmp_path / "batches").write("first", 1, random_samples([1.0, -1.0]))
    wrong = RetrainingBatch(1, ArchivedBatch(archived.path, "0" * 64), 1, "first")
    with pytest.raises(BlobError, match="checksum"):
        again(new_policy(), StartingWeights(model), [wrong], tmp_path / "again", model)
    assert not (tmp_path / "again").exists()
