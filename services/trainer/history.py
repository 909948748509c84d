"""What the log already knows of a policy when its trainer starts: versions, pointer and the last steps."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.bus.ranges import present_ranges, read_ranges
from clawstream.codec import decode
from clawstream.weights.pointer import PointerFold
from schemas.events import TrainStepEvent, WeightPointerEvent, WeightVersionEvent

MAX_UNANNOUNCED_STEPS = 100
"""A checkpoint leaves no more of them: so many of the policy's last steps must be known at the start."""
_FIRST_WINDOW = 2 * MAX_UNANNOUNCED_STEPS
"""Offsets of `train-steps` looked at from its end; ten times more each time that other policies' steps fill them."""
_SILENCE_SECONDS = 10.0


@dataclass(slots=True)
class History:
    """A fold over `weights` and the end of `train-steps`, for one policy."""

    policy: str
    versions: dict[int, WeightVersionEvent] = field(default_factory=dict[int, WeightVersionEvent])
    """Published and not removed."""
    newest_number: int = -1
    """The highest number that was ever published, removed ones included; -1 when there is none."""
    steps: dict[str, TrainStepEvent] = field(default_factory=dict[str, TrainStepEvent])
    """The last steps by id."""
    pointer: PointerFold = field(init=False)
    """What should be in service."""

    def __post_init__(self) -> None:
        self.pointer = PointerFold(self.policy)

    @property
    def pointer_version(self) -> int | None:
        """What should be in service; None when nothing was published."""
        return self.pointer.version

    def apply(self, record: Record) -> None:
        """Takes in a record of either topic. Raises DecodeError."""
        key = (record.key or b"").decode(errors="replace")
        policy, _, number = key.rpartition("/")
        if policy == self.policy and number.isdecimal():
            self.newest_number = max(self.newest_number, int(number))
            if record.value is None:
                self.versions.pop(int(number), None)
        event = decode(record) if record.value is not None else None
        self.pointer.apply(key, event)
        if isinstance(event, WeightVersionEvent) and event.policy == self.policy:
            self.versions[event.weight_version] = event
        elif isinstance(event, WeightPointerEvent) and event.policy == self.policy:
            self.newest_number = max(self.newest_number, event.weight_version)
        elif isinstance(event, TrainStepEvent) and event.policy == self.policy:
            self.steps[event.train_step_id] = event

    def is_ahead_of(self, lineage: str, step: int, newest_version: int) -> bool:
        """Whether this lineage got further than a checkpoint knows: the checkpoints after it were lost."""
        return any(event.lineage == lineage and event.step > step for event in self.steps.values()) or any(
            event.lineage == lineage and number > newest_version for number, event in self.versions.items()
        )


def read_history(bus: Bus, *, weights_topic: str, train_steps_topic: str, policy: str) -> History:
    """Reads both topics up to their ends as they are now. Raises BusError, and DecodeError for a foreign record."""
    history = History(policy)
    for record in _records(bus, TopicPartition(weights_topic, 0), None):
        history.apply(record)
    partition, window, is_enough = TopicPartition(train_steps_topic, 0), _FIRST_WINDOW, False
    while not is_enough:
        for record in _records(bus, partition, window):
            history.apply(record)
        is_enough = len(history.steps) >= MAX_UNANNOUNCED_STEPS or window >= _length(bus, partition)
        window *= 10
    return history


def _length(bus: Bus, partition: TopicPartition) -> int:
    first, end = present_ranges(bus, [partition])[partition]
    return end - first


def _records(bus: Bus, partition: TopicPartition, last_offsets: int | None) -> Iterator[Record]:
    reader = bus.reader()
    try:
        first, end = reader.watermarks(partition)
        position = first if last_offsets is None else max(first, end - last_offsets)
        yield from read_ranges(reader, {partition: (position, end)}, silence_seconds=_SILENCE_SECONDS)
    finally:
        reader.close()
