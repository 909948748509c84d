"""What was trained and published: a fold over `train-steps` and `weights`.

The compacted topic of samples never decides what was trained: it forgets.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from clawstream.bus.interface import Bus, Record
from clawstream.bus.ranges import Progress, no_progress, partitions_of, ranges_since, read_ranges
from clawstream.codec import decode
from clawstream.topics import TRAIN_STEPS, WEIGHTS, full_name
from schemas.events import TrainStepEvent, WeightVersionEvent
from schemas.events.train_step import DroppedSample, TrainedSample


@dataclass(frozen=True, slots=True)
class TrainedTurn:
    """One sample of a turn in a step."""

    step: TrainStepEvent
    sample: TrainedSample


@dataclass(frozen=True, slots=True)
class DroppedTurn:
    """One sample of a turn that a step lists as not trained."""

    step: TrainStepEvent
    drop: DroppedSample


@dataclass(slots=True)
class TrainingHistory:
    """All policies and lineages that the log knows."""

    steps: dict[str, TrainStepEvent] = field(default_factory=dict[str, TrainStepEvent])
    """By id."""
    versions: dict[tuple[str, int], WeightVersionEvent] = field(
        default_factory=dict[tuple[str, int], WeightVersionEvent]
    )
    """By policy and number; also those whose artefact is gone, as long as the log has their event."""
    removed: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Versions whose artefact was removed."""
    trained: defaultdict[str, list[TrainedTurn]] = field(
        default_factory=lambda: defaultdict[str, list[TrainedTurn]](list)
    )
    """By turn id: one per lineage."""
    dropped: defaultdict[str, list[DroppedTurn]] = field(
        default_factory=lambda: defaultdict[str, list[DroppedTurn]](list)
    )
    """By turn id."""
    turn_of_sample: dict[str, str] = field(default_factory=dict[str, str])
    """Every sample that a step names."""

    def apply(self, record: Record) -> None:
        """Takes in a record of either topic. Raises DecodeError."""
        if record.value is None:
            policy, _, number = (record.key or b"").decode(errors="replace").rpartition("/")
            if number.isdecimal():
                self.removed.add((policy, int(number)))
            return
        event = decode(record)
        if isinstance(event, WeightVersionEvent):
            self.versions[event.policy, event.weight_version] = event
        elif isinstance(event, TrainStepEvent) and event.train_step_id not in self.steps:
            self.steps[event.train_step_id] = event
            for sample in event.samples:
                self.trained[sample.turn_id].append(TrainedTurn(event, sample))
                self.turn_of_sample[sample.sample_id] = sample.turn_id
            for drop in event.drops:
                self.dropped[drop.turn_id].append(DroppedTurn(event, drop))
                self.turn_of_sample[drop.sample_id] = drop.turn_id

    def makers(self, policy: str, weight_version: int) -> list[TrainStepEvent]:
        """The steps that made a version, in order: several where not every step makes a checkpoint."""
        found = [
            step for step in self.steps.values() if step.policy == policy and step.weight_version == weight_version
        ]
        version = self.versions.get((policy, weight_version))
        if version is not None:  # A lineage that was lost may have used the number for weights never published.
            found = [step for step in found if step.lineage == version.lineage]
        return sorted(found, key=lambda step: step.step)

    def partition_of(self, turn_id: str) -> int | None:
        """The session's partition: topics that are partitioned by session have it in common."""
        for trained in self.trained.get(turn_id, ()):
            return trained.sample.ref.partition
        for dropped in self.dropped.get(turn_id, ()):
            return dropped.drop.ref.partition
        return None


def read_training_history(bus: Bus, namespace: str, progress: Progress = no_progress) -> TrainingHistory:
    """Reads both topics up to their ends as they are now. Raises BusError, and DecodeError for a foreign record."""
    history = TrainingHistory()
    reader = bus.reader()
    try:
        for topic in (WEIGHTS, TRAIN_STEPS):
            ranges = ranges_since(reader, partitions_of(bus, full_name(namespace, topic)))
            for record in read_ranges(reader, ranges, progress):
                history.apply(record)
    finally:
        reader.close()
    return history
