# pyright: basic
# Reason: drives torch through the trainer's compute half.
"""Trains the chosen batches and publishes what comes of it, under version numbers of its own folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from clawstream import ids
from clawstream.durable_files import sha256_of_file
from services.trainer.batch_archive import read_batch
from services.trainer.checkpoint import read_checkpoint
from services.trainer.engine.adapter_weights import CONFIG_NAME
from services.trainer.learning_rate import LearningRateSchedule
from services.trainer.policy import PolicyTrainer
from services.trainer.publish import WeightStore
from services.trainer.retrain.plan import RetrainingBatch
from services.trainer.sample import StepResult, UnchangedReason


@dataclass(frozen=True, slots=True)
class StartingWeights:
    """Where training begins."""

    model: Path
    """The base model: its configuration, and its weights where nothing is laid over them."""
    weights: Path | None = None
    """A published version over it: a whole model, or adapters."""
    checkpoint: Path | None = None
    """A checkpoint over it: with the optimizer's moments and the number of updates."""

    def identity(self) -> str:
        """Checksums of the files that hold the weights."""
        directory = self.checkpoint or self.weights or self.model
        files = sorted(directory.glob("*.safetensors"))
        return " ".join(f"{file.name}:{sha256_of_file(file)}" for file in files)

    def open(self, policy: PolicyTrainer) -> None:
        """Raises WeightsError, CheckpointError and SettingsError for what does not fit the settings."""
        if self.checkpoint is not None:
            policy.load(self.model)
            read_checkpoint(self.checkpoint).restore(policy)
        elif self.weights is not None and (self.weights / CONFIG_NAME).exists():
            policy.load(self.model)
            policy.load_published_adapters(self.weights)
        else:
            policy.load(self.weights or self.model)


@dataclass(frozen=True, slots=True)
class RetrainedStep:
    """What one batch did."""

    step: int
    """Of the new lineage, from 1."""
    repeats: int
    """Step of the old lineage whose batch it was."""
    changed: bool
    unchanged_reason: str
    weight_version: int | None
    """The new version that was written after it; null when none was."""
    loss: float | None
    old_weight_version: int | None
    """The version that the batch made in the old lineage."""
    guarded: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What guards had done there and was done again; empty for nothing."""


def _step(policy: PolicyTrainer, batch: RetrainingBatch, schedule: LearningRateSchedule) -> StepResult:
    """The step once more, with what guards did to it."""
    samples = read_batch(batch.archived.path, batch.archived.sha256)
    guarded = batch.guarded
    if guarded.held:
        return StepResult(changed=False, unchanged_reason=UnchangedReason.HELD, metrics={}, samples={})
    samples = [sample.masked() if sample.sample_id in guarded.dropped else sample for sample in samples]
    rate = schedule.at(policy.optimizer.num_updates) * guarded.learning_rate_factor
    return policy.train_step(samples, rate, guarded.controls())


def retrain(
    policy: PolicyTrainer,
    batches: Sequence[RetrainingBatch],
    schedule: LearningRateSchedule,
    store: WeightStore,
    base_model: Path,
    *,
    lineage: str,
    every_step: bool,
    now: Callable[[], datetime],
    progress: Callable[[RetrainedStep], None],
) -> list[RetrainedStep]:
    """Trains the batches in order. Versions count from 1; the last is always written, with `every_step` all are.

    Raises BlobError for a batch that is missing or is not what its step says, and WeightsError.
    """
    done: list[RetrainedStep] = []
    base_version = 0
    for step, batch in enumerate(batches, start=1):
        result = _step(policy, batch, schedule)
        version: int | None = None
        if step == len(batches) or (every_step and result.changed):
            snapshot = policy.snapshot()
            assert snapshot is not None, "the only rank has it"
            version = step
            store.publish(
                snapshot,
                base_model,
                weight_version=version,
                base_version=base_version,
                lineage=lineage,
                train_step_id=ids.train_step_id(lineage, step),
                created_at=now(),
            )
            base_version = version
        done.append(
            RetrainedStep(
                step=step,
                repeats=batch.step,
                changed=result.changed,
                unchanged_reason=str(result.unchanged_reason or ""),
                guarded=batch.guarded.as_document(),
                weight_version=version,
                loss=result.metrics.get("loss"),
                old_weight_version=batch.weight_version,
            )
        )
        progress(done[-1])
    return done
