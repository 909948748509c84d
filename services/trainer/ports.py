"""What the loop asks of the compute half. No torch here: the loop and its tests run without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from services.trainer.batch_archive import ArchivedBatch
from services.trainer.guards.controls import StepControls
from services.trainer.sample import StepResult, TrainingSample
from services.trainer.turn_ledger import LedgerAddition, LedgerEntry


class Snapshot(Protocol):
    """A copy of everything that training has changed. Later steps do not touch it."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates made."""
        ...


class Policy(Protocol):
    """The policy on all ranks, driven from the first."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates made."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Ids that the model knows."""
        ...

    def taught(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """The samples with what the trainer's own teacher says about those that ask for it. Raises StepInterrupted."""
        ...

    def train_step(
        self,
        samples: Sequence[TrainingSample],
        archived: ArchivedBatch,
        learning_rate: float,
        controls: StepControls,
    ) -> StepResult:
        """One update, or none with the reason. `archived` holds the same samples, for the other ranks.

        Raises StepInterrupted, with everything as it was, when the process is to end.
        """
        ...

    def snapshot(self) -> Snapshot:
        """A copy, for other threads."""
        ...


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Weights that are to be published: what their manifest says of where they come from."""

    weight_version: int
    """Their number."""
    base_version: int | None
    """The version that the step started from; None for version 0."""
    lineage: str
    """The training run."""
    train_step_id: str | None
    """The step that made them; None for version 0."""
    created_at: datetime
    """When they are published."""


class Store(Protocol):
    """Checkpoints, the turn ledger and published weights. One thread writes; any thread may look for turns."""

    def find_turn(self, turn_id: str, entries: int) -> LedgerEntry | None:
        """See `RememberedTurns`. Raises TurnLedgerError."""
        ...

    def append_turns(self, addition: LedgerAddition) -> None:
        """Returns when the entries are on the disk, in place of everything behind the addition's base.

        Comes before the checkpoint that counts them. Raises TurnLedgerError.
        """
        ...

    def save_checkpoint(self, snapshot: Snapshot, progress: dict[str, Any], step: int) -> None:
        """Returns when the atom is on the disk. Raises CheckpointError."""
        ...

    def publish(self, snapshot: Snapshot, version: NewVersion) -> tuple[Path, str]:
        """The artefact's directory and its manifest's sha256. The same content again gives the same answer."""
        ...

    def versions(self) -> list[int]:
        """Versions on the disk."""
        ...

    def delete(self, weight_version: int) -> None:
        """Removes a version from the disk."""
        ...


class Archive(Protocol):
    """The batches as they were trained."""

    def write(self, lineage: str, step: int, samples: Sequence[TrainingSample]) -> ArchivedBatch:
        """Keeps a batch; the same step of the lineage is replaced. Raises BlobError."""
        ...
