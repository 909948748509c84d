"""The compute half without arithmetic: weights are the list of what was trained, disks survive a crash."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.batch_archive import ArchivedBatch
from services.trainer.guards.controls import StepControls
from services.trainer.ledger_file import LedgerFile
from services.trainer.ports import NewVersion, Snapshot
from services.trainer.sample import SampleStatistics, StepResult, TrainingSample, UnchangedReason
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry
from tests.fixtures.turn_ledgers import MemoryTurns


class Crash(BaseException):
    """The process died here. No code may catch it."""


class Faults:
    """Crashes at the nth time that a point is passed."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self._armed: tuple[str, int] | None = None

    def arm(self, point: str, nth: int) -> None:
        self.passed = []
        self._armed = (point, nth)

    @property
    def is_armed(self) -> bool:
        return self._armed is not None

    def at(self, point: str) -> None:
        self.passed.append(point)
        if self._armed is not None and self._armed[0] == point and self.passed.count(point) == self._armed[1]:
            self._armed = None
            raise Crash(point)


@dataclass(frozen=True)
class FakeSnapshot:
    weights: tuple[str, ...]
    num_updates: int


@dataclass
class Disk:
    """What is left after a crash."""

    checkpoints: dict[int, tuple[FakeSnapshot, dict[str, Any]]] = field(default_factory=dict)
    turns: MemoryTurns | LedgerFile = field(default_factory=MemoryTurns)
    artefacts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    makers: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    deleted: list[int] = field(default_factory=list)


class FakePolicy:
    """Learns sample ids by heart."""

    vocabulary_size = 1000

    def __init__(self, faults: Faults, snapshot: FakeSnapshot | None = None) -> None:
        self._faults = faults
        self.weights = list(snapshot.weights) if snapshot else []
        self.num_updates = snapshot.num_updates if snapshot else 0
        self.learning_rates: list[float] = []
        self.controls: list[StepControls] = []
        self.questions: list[tuple[str, list[int]]] = []
        """Sample and hinted prompt that the own teacher was asked about."""
        self.trained: list[TrainingSample] = []
        self.answer: Callable[[Sequence[TrainingSample]], StepResult] | None = None

    def taught(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        asking = [sample for sample in samples if sample.asked_prompt_ids is not None]
        self.questions += [(each.sample_id, list(each.asked_prompt_ids)) for each in asking]  # type: ignore[arg-type] # not None
        return [sample if sample.asked_prompt_ids is None else answered(sample) for sample in samples]

    def train_step(
        self,
        samples: Sequence[TrainingSample],
        archived: ArchivedBatch,
        learning_rate: float,
        controls: StepControls,
    ) -> StepResult:
        self._faults.at("before train")
        self.learning_rates.append(learning_rate)
        self.controls.append(controls)
        result = StepResult(True, None, {"loss": 0.5, "broken": float("nan")}, statistics(samples))
        if self.answer is not None:
            result = self.answer(samples)
            if not result.changed:
                return result
        self.trained += samples
        self.weights += [sample.sample_id for sample in samples]
        self.num_updates += 1
        self._faults.at("after train")
        return result

    def snapshot(self) -> FakeSnapshot:
        self._faults.at("snapshot")
        return FakeSnapshot(tuple(self.weights), self.num_updates)


def answered(sample: TrainingSample) -> TrainingSample:
    assert sample.teacher is not None
    log_probs = np.full(sample.response_ids.size, -0.5, np.float32)
    return replace(sample, teacher=replace(sample.teacher, log_probs=log_probs, asked_prompt_ids=None))


def statistics(samples: Sequence[TrainingSample]) -> dict[str, SampleStatistics]:
    return {sample.sample_id: SampleStatistics(0.1, sample.response_ids.size, 0.0, 1.0, 0.0) for sample in samples}


def unchanged(reason: UnchangedReason, blamed: Sequence[str] = ()) -> Callable[[Sequence[TrainingSample]], StepResult]:
    return lambda samples: StepResult(False, reason, {}, statistics(samples), tuple(blamed))


class FakeStore:
    def __init__(self, disk: Disk, faults: Faults) -> None:
        self._disk = disk
        self._faults = faults

    def find_turn(self, turn_id: str, entries: int) -> LedgerEntry | None:
        return self._disk.turns.find_turn(turn_id, entries)

    def append_turns(self, addition: LedgerAddition) -> None:
        self._faults.at("before turns")
        self._disk.turns.append(addition)
        self._faults.at("after turns")

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        assert isinstance(snapshot, FakeSnapshot)
        self._faults.at("before checkpoint")
        self._disk.checkpoints[step] = (snapshot, copy.deepcopy(progress))
        self._faults.at("after checkpoint")

    def publish(self, snapshot: Snapshot, version: NewVersion) -> tuple[Path, str]:
        assert isinstance(snapshot, FakeSnapshot)
        self._faults.at("before publish")
        before = self._disk.artefacts.setdefault(version.weight_version, snapshot.weights)
        assert before == snapshot.weights, "a version number was used again for other weights"
        self._disk.makers[version.weight_version] = (version.lineage, version.train_step_id)
        self._faults.at("after publish")
        return Path(f"/weights/{version.weight_version}"), "0" * 64

    def versions(self) -> list[int]:
        return sorted(set(self._disk.artefacts) - set(self._disk.deleted))

    def delete(self, weight_version: int) -> None:
        self._faults.at("before delete")
        self._disk.deleted.append(weight_version)
        self._faults.at("after delete")


class FakeArchive:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.batches: list[list[TrainingSample]] = []

    def write(self, lineage: str, step: int, samples: Sequence[TrainingSample]) -> ArchivedBatch:
        self._faults.at("before archive")
        self.batches.append(list(samples))
        self._faults.at("after archive")
        return ArchivedBatch(Path(f"/batches/{lineage}/{step}.safetensors"), f"{step:064x}")
