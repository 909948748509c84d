"""Which inputs are waiting, under way or done, per partition, and which contiguous prefix may be committed. Pure.

A committed offset says that everything before it is done. So only the prefix of a partition without a gap may be
committed; what is done behind a slow input waits here. Every assignment of a partition has an epoch of its own: a
result that belongs to an older one is late and must not be used, for another process owns its input by then.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from clawstream.bus.interface import Record, TopicPartition
from clawstream.worker.outcomes import Outcome


@dataclass(frozen=True, slots=True)
class Ticket:
    """An input in the worker's hands."""

    record: Record
    epoch: int
    """Of the assignment under which it was read."""

    @property
    def partition(self) -> TopicPartition:
        return self.record.topic_partition


@dataclass(frozen=True, slots=True)
class Prefix:
    """Inputs of one partition that are done, without a gap from the first uncommitted one."""

    partition: TopicPartition
    results: tuple[tuple[Ticket, Outcome], ...]
    """In the order of the log; never empty."""

    @property
    def next_offset(self) -> int:
        """What to commit."""
        return self.results[-1][0].record.offset + 1


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    outcome: Outcome | None = None


@dataclass(slots=True)
class _Partition:
    epoch: int
    entries: deque[_Entry] = field(default_factory=deque[_Entry])
    """Everything that is not committed, in the order of the log: a prefix was dispatched, the rest waits."""
    by_offset: dict[int, _Entry] = field(default_factory=dict[int, _Entry])
    dispatched: int = 0
    completed: int = 0
    """How many of the first entries are resolved, without a gap."""
    resolved: int = 0
    """How many entries are resolved, wherever they stand."""
    highest_offset: int = -1


class Tracker:
    """Not thread-safe: the Kafka thread owns it."""

    def __init__(self, *, window_per_partition: int, max_in_flight_per_partition: int) -> None:
        self._window = window_per_partition
        self._max_in_flight = max_in_flight_per_partition
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._epoch = 0
        self._in_flight = 0
        self._completed = 0
        self._turn = 0

    @property
    def in_flight(self) -> int:
        """Inputs that were dispatched, are not resolved, and belong to us."""
        return self._in_flight

    @property
    def completed_count(self) -> int:
        """How many inputs could be committed now. Asked far more often than `completed`."""
        return self._completed

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Starts a new epoch for partitions that have come to us, empty."""
        for partition in partitions:
            self.release([partition])
            self._epoch += 1
            self._partitions[partition] = _Partition(self._epoch)

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Drops everything about partitions that are not ours any more. Results that still come are late."""
        for partition in partitions:
            dropped = self._partitions.pop(partition, None)
            if dropped is not None:
                self._in_flight -= _unresolved(islice(dropped.entries, dropped.dispatched))
                self._completed -= dropped.completed

    def start(self, record: Record) -> bool:
        """Takes in an input that was read. False when its partition is not ours, or when we have it already."""
        partition = self._partitions.get(record.topic_partition)
        if partition is None or record.offset <= partition.highest_offset:
            return False
        entry = _Entry(Ticket(record, partition.epoch))
        partition.entries.append(entry)
        partition.by_offset[record.offset] = entry
        partition.highest_offset = record.offset
        return True

    def dispatch(self, limit: int) -> list[Ticket]:
        """Up to `limit` waiting inputs to be handled now, one partition after the other, within each one's bounds."""
        tickets: list[Ticket] = []
        partitions = list(self._partitions.values())
        self._turn += 1
        start = self._turn % len(partitions) if partitions else 0
        for partition in partitions[start:] + partitions[:start]:
            room = min(limit - len(tickets), self._max_in_flight - (partition.dispatched - partition.resolved))
            window_end = partition.completed + self._window
            end = min(len(partition.entries), window_end, partition.dispatched + room)
            if end > partition.dispatched:
                tickets += [entry.ticket for entry in islice(partition.entries, partition.dispatched, end)]
                partition.dispatched = end
        self._in_flight += len(tickets)
        return tickets

    def resolve(self, ticket: Ticket, outcome: Outcome) -> bool:
        """Notes the outcome of a dispatched input. False when it is late, or was resolved before: then drop it."""
        state = self._partitions.get(ticket.partition)
        entry = None if state is None else self._entry(ticket)
        if state is None or entry is None or entry.outcome is not None:
            return False
        entry.outcome = outcome
        self._in_flight -= 1
        state.resolved += 1
        before = state.completed
        while state.completed < len(state.entries) and state.entries[state.completed].outcome is not None:
            state.completed += 1
        self._completed += state.completed - before
        return True

    def replace_outcome(self, ticket: Ticket, outcome: Outcome) -> None:
        """Another outcome for a resolved input, because the first could not be written. Nothing if it is late."""
        entry = self._entry(ticket)
        if entry is not None and entry.outcome is not None:
            entry.outcome = outcome

    def completed(self, limit: int) -> list[Prefix]:
        """What may be committed now: at most `limit` inputs."""
        prefixes: list[Prefix] = []
        for partition, state in self._partitions.items():
            if limit <= 0:
                break
            results = tuple(
                (entry.ticket, entry.outcome)
                for entry in islice(state.entries, min(state.completed, limit))
                if entry.outcome is not None
            )
            if results:
                prefixes.append(Prefix(partition, results))
                limit -= len(results)
        return prefixes

    def has_completed(self, partitions: Iterable[TopicPartition]) -> bool:
        """Whether something of these could be committed now."""
        states = (self._partitions.get(partition) for partition in partitions)
        return any(state is not None and state.completed > 0 for state in states)

    def advance(self, partition: TopicPartition, next_offset: int) -> list[tuple[Ticket, Outcome]]:
        """Everything before `next_offset` is committed: forgets and returns it. Nothing if the partition is not ours.

        Raises ValueError when an unresolved input would be passed over: it would be lost.
        """
        state = self._partitions.get(partition)
        passed: list[tuple[Ticket, Outcome]] = []
        while state is not None and state.entries and state.entries[0].ticket.record.offset < next_offset:
            entry = state.entries[0]
            if entry.outcome is None:
                raise ValueError(f"{entry.ticket.record} is not resolved and must not be passed over")
            passed.append((entry.ticket, entry.outcome))
            state.entries.popleft()
            del state.by_offset[entry.ticket.record.offset]
            state.dispatched -= 1
            state.completed -= 1
            state.resolved -= 1
            self._completed -= 1
        return passed

    def unfinished(self) -> dict[TopicPartition, int]:
        """For every partition that is ours: inputs that are not committed."""
        return {partition: len(state.entries) for partition, state in self._partitions.items()}

    def occupying(self) -> dict[TopicPartition, int]:
        """Of `unfinished`, what is not resolved or waits for nothing but its transaction.

        What is done behind an unresolved input counts no more: no handler is busy with it, and the window bounds it.
        """
        return {
            partition: len(state.entries) - state.resolved + state.completed
            for partition, state in self._partitions.items()
        }

    def heads(self) -> dict[TopicPartition, int]:
        """Offset of the oldest input that is not resolved, for every partition that has one."""
        return {
            partition: state.entries[state.completed].ticket.record.offset
            for partition, state in self._partitions.items()
            if state.completed < len(state.entries)
        }

    def oldest_unresolved_milliseconds(self) -> int | None:
        """When the oldest input that is not resolved was written (milliseconds since 1970), or None."""
        return min(
            (
                entry.ticket.record.timestamp_milliseconds
                for state in self._partitions.values()
                for entry in islice(state.entries, state.completed, state.completed + 1)
            ),
            default=None,
        )

    def partitions(self) -> Collection[TopicPartition]:
        """What is ours."""
        return self._partitions.keys()

    def _entry(self, ticket: Ticket) -> _Entry | None:
        state = self._partitions.get(ticket.partition)
        if state is None or state.epoch != ticket.epoch:
            return None
        return state.by_offset.get(ticket.record.offset)


def _unresolved(entries: Iterable[_Entry]) -> int:
    return sum(entry.outcome is None for entry in entries)
