"""What must move together with the weights: positions, counters, and which turns left. The document in a checkpoint.

`next_offsets` is where a successor starts to read: the oldest sample that still waits, in every partition. From there
to `seen_offsets` it takes only the samples listed in `waiting`; everything else there was trained or listed as dropped
before. So a sample is neither lost nor trained nor listed twice, whenever the process dies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from clawstream.errors import SettingsError
from schemas.events import TrainStepEvent
from services.trainer.candidates import Candidate
from services.trainer.dead_letters import DeadLetter
from services.trainer.turn_ledger import LedgerMark

FORMAT = 2


class WaitingSample(BaseModel):
    """A sample that was read and neither trained nor dropped."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: int
    offset: int
    sample_id: str
    turn_id: str


class Progress(BaseModel):
    """State of a training run at the end of a step."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    lineage: str
    """The training run."""
    step: int = 0
    """Steps made."""
    weight_version: int = 0
    """Number of these weights."""
    newest_version: int = 0
    """The highest number ever given: the next one is higher."""
    base_version: int | None = None
    """The published version that the weights come from; None for version 0."""
    seen_offsets: dict[int, int] = {}
    """Partition of `samples` to the offset after the last record that was taken in."""
    waiting: list[WaitingSample] = []
    """What was taken in before `seen_offsets` and waits."""
    turns: LedgerMark = LedgerMark()
    """Which entries of the turn ledger are this run's: every turn that left it."""
    baselines: dict[str, tuple[float, float]] = {}
    """See `UserBaselines`."""
    knobs: dict[str, float] = {}
    """What guards have turned; see `guards.knobs`."""
    drop_counts: dict[str, int] = {}
    """Drops by reason since the lineage began."""
    samples_trained: int = 0
    """Samples trained since the lineage began."""
    unannounced: list[TrainStepEvent] = []
    """Steps since the checkpoint before: their events go on the log when this checkpoint is on the disk."""
    dead_letters: list[DeadLetter] = []
    """What those steps read that is no sample; goes on the log in the same transaction."""

    def announced(self) -> "Progress":
        """The same, with nothing left to put on the log."""
        return self.model_copy(update={"unannounced": [], "dead_letters": []})

    @property
    def next_offsets(self) -> dict[int, int]:
        """Partition to the offset where a successor starts to read."""
        offsets = dict(self.seen_offsets)
        for sample in self.waiting:
            offsets[sample.partition] = min(sample.offset, offsets.get(sample.partition, sample.offset))
        return offsets

    def document(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self.model_dump(mode="json")

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "Progress":
        """Reads a checkpoint's document.

        Raises SettingsError for one of another format, pydantic.ValidationError for one that is not ours.
        """
        if document.get("format") != FORMAT:
            raise SettingsError(
                f"a checkpoint of format {document.get('format')}, and this program reads {FORMAT}: move the folder "
                "`checkpoints` away, and the trainer begins anew from the version in service, with all samples that "
                "are retained; or start the program that wrote it"
            )
        return cls.model_validate(document)


def waiting_samples(candidates: Sequence[Candidate]) -> list[WaitingSample]:
    """What a checkpoint remembers of candidates that wait."""
    return [
        WaitingSample(
            partition=candidate.ref.partition,
            offset=candidate.ref.offset,
            sample_id=candidate.sample.sample_id,
            turn_id=candidate.turn_id,
        )
        for candidate in candidates
    ]
