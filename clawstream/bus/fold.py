"""Reading whole topics without a group: first what is there, then what comes. State is a fold over the log."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from clawstream.bus.interface import BEGINNING, Bus, Record, TopicPartition

State = TypeVar("State")

_BATCH_RECORDS = 500
_WAIT_SECONDS = 0.1


class LogReader:
    """Reads all partitions of some topics. Not thread-safe.

    reader = LogReader(bus, ["clawstream.weights.v1"])
    reader.bootstrap(fold.apply)         # everything up to the end as it was at this call
    while running:
        for record in reader.poll(0.5):  # then what is new
            fold.apply(record)
    """

    def __init__(
        self,
        bus: Bus,
        topics: Sequence[str],
        *,
        start: Mapping[TopicPartition, int] | None = None,
        follows: bool = False,
    ) -> None:
        """Starts at `start` where it names a partition, else at the earliest record. `follows` says that it is kept to
        poll for what comes: see `Bus.follower`.

        Raises BrokerUnavailable, or BusError when a topic does not exist.
        """
        admin = bus.admin()
        try:
            self._partitions = [partition for topic in topics for partition in admin.partitions(topic)]
        finally:
            admin.close()
        self._consumer = bus.follower() if follows else bus.reader()
        self._next: dict[TopicPartition, int] = {
            partition: (start or {}).get(partition, BEGINNING) for partition in self._partitions
        }
        self._consumer.assign(self._next)

    @property
    def partitions(self) -> Sequence[TopicPartition]:
        """Every partition that is read."""
        return self._partitions

    def positions(self) -> dict[TopicPartition, int]:
        """For each partition that was read from, the next offset: where a successor may start."""
        found = {partition: self._consumer.position(partition) for partition in self._partitions}
        return {
            partition: offset if offset is not None else self._next[partition]
            for partition, offset in found.items()
            if offset is not None or self._next[partition] != BEGINNING
        }

    def bootstrap(self, apply: Callable[[Record], None], *, stopped: Callable[[], bool] = lambda: False) -> int:
        """Hands over every record up to the end as it is now, and perhaps some that came since. Returns how many.

        Blocks while no broker answers, unless `stopped` says that nobody waits for it any more: then it returns early.
        Raises OffsetNotRetained, FatalBusError, and what `apply` raises.
        """
        return self.read_to(self.ends(), apply, stopped=stopped)

    def read_to(
        self,
        ends: Mapping[TopicPartition, int],
        apply: Callable[[Record], None],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> int:
        """`bootstrap` up to these ends."""
        count = 0
        while not self.has_reached(ends) and not stopped():
            for record in self._consumer.consume(_BATCH_RECORDS, _WAIT_SECONDS):
                apply(record)
                count += 1
        return count

    def poll(self, timeout_seconds: float, max_records: int = _BATCH_RECORDS) -> list[Record]:
        """What is new, waiting at most so long for the first."""
        return self._consumer.consume(max_records, timeout_seconds)

    def ends(self) -> dict[TopicPartition, int]:
        """The end of each partition now."""
        return {partition: self._consumer.watermarks(partition)[1] for partition in self._partitions}

    def close(self) -> None:
        """Releases the client."""
        self._consumer.close()

    def has_reached(self, ends: Mapping[TopicPartition, int]) -> bool:
        """Whether everything before these ends was handed over."""
        for partition, end in ends.items():
            position = self._consumer.position(partition)
            started_at = self._next[partition]
            if end == 0 or started_at >= end or (position is not None and position >= end):
                continue
            return False
        return True


class LatestByKey(Generic[State]):
    """The newest value of every key, as a reader of a compacted topic sees it."""

    def __init__(self, decode: Callable[[Record], State]) -> None:
        """`decode` makes a value of a record that is not a tombstone."""
        self._decode = decode
        self._values: dict[bytes, State] = {}

    def apply(self, record: Record) -> None:
        """Takes a record in. A tombstone removes its key; a record without a key is not part of the state."""
        if record.key is None:
            return
        if record.value is None:
            self._values.pop(record.key, None)
        else:
            self._values[record.key] = self._decode(record)

    def get(self, key: str) -> State | None:
        """The value of `key`, if any."""
        return self._values.get(key.encode())

    def values(self) -> Mapping[bytes, State]:
        """Everything, by key. A view: it changes with the next `apply`."""
        return self._values


def latest_by_key(records: Iterable[Record]) -> dict[bytes, Record]:
    """The newest record of every key, without those whose newest is a tombstone."""
    fold = LatestByKey[Record](lambda record: record)
    for record in records:
        fold.apply(record)
    return dict(fold.values())
