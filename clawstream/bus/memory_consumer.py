"""Consumers of the cluster in memory."""

import time
from collections.abc import Mapping, Sequence

from clawstream.bus.interface import BEGINNING, GroupMetadata, RebalanceCallbacks, Record, TopicPartition
from clawstream.bus.memory_cluster import MemoryCluster
from clawstream.bus.memory_group import Membership, MemoryGroup
from clawstream.errors import Fenced, OffsetNotRetained


class MemoryConsumer:
    """Implements `Consumer`."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._delivered: set[TopicPartition] = set()
        self._closed = False

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._take_part()
            with self._cluster.changed:
                records = self._read(max_records) if self._cluster.available else []
                remaining = deadline - time.monotonic()
                if records or remaining <= 0:
                    return records
                self._cluster.changed.wait(remaining)

    def _take_part(self) -> None:
        """A reader has no group."""

    def _read(self, max_records: int) -> list[Record]:
        records: list[Record] = []
        # The partition that was read last goes to the end, so that a full one does not starve the others.
        for partition in list(self._positions):
            if partition in self._paused or len(records) >= max_records:
                continue
            offset = self._start_of(partition, self._positions[partition])
            found, position = self._cluster.log(partition).read(offset, max_records - len(records))
            del self._positions[partition]
            self._positions[partition] = position
            self._delivered.add(partition)
            records += found
        return records

    def _start_of(self, partition: TopicPartition, offset: int) -> int:
        log = self._cluster.log(partition)
        if offset == BEGINNING:
            return log.first_offset
        if not log.first_offset <= offset <= log.end_offset:
            return self._missing(partition, offset)
        return offset

    def _missing(self, partition: TopicPartition, offset: int) -> int:
        first, end = self.watermarks(partition)
        raise OffsetNotRetained(
            f"{partition}@{offset}: not on the log, which holds {first} to {end}", offset=offset, first=first, end=end
        )

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._positions = dict(positions)
        self._delivered.clear()
        self._paused.clear()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._positions[partition] = offset
        self._delivered.discard(partition)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)

    def assignment(self) -> list[TopicPartition]:
        return sorted(self._positions)

    def position(self, partition: TopicPartition) -> int | None:
        return self._positions.get(partition) if partition in self._delivered else None

    def committed(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        return dict.fromkeys(partitions)

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        with self._cluster.changed:
            self._cluster.check_available()
            log = self._cluster.log(partition)
            return log.first_offset, log.last_stable_offset

    def offset_for_time(self, partition: TopicPartition, timestamp_milliseconds: int) -> int:
        with self._cluster.changed:
            self._cluster.check_available()
            return self._cluster.log(partition).offset_for_time(timestamp_milliseconds)

    def group_metadata(self) -> GroupMetadata:
        raise ValueError("a reader is in no group")

    def close(self) -> None:
        self._closed = True
        self._positions.clear()


class MemoryGroupConsumer(MemoryConsumer):
    """A member of a group."""

    def __init__(
        self,
        cluster: MemoryCluster,
        topics: tuple[str, ...],
        *,
        group: str,
        instance: str,
        callbacks: RebalanceCallbacks,
        continue_after_missing_records: bool,
    ) -> None:
        super().__init__(cluster)
        self._topics = topics
        self._callbacks = callbacks
        self._continue_after_missing_records = continue_after_missing_records
        with cluster.changed:
            self._group: MemoryGroup = cluster.group(group)
            self._membership: Membership = self._group.join(instance, topics)
            cluster.changed.notify_all()

    def _take_part(self) -> None:
        """One step of the rebalance: what must go goes before anything comes. Callbacks run without the lock."""
        instance = self._membership.instance
        with self._cluster.changed:
            if not self._cluster.available:
                return
            self._group.expire(self._cluster.clock.monotonic_seconds())
            present = self._group.members.get(instance)
            if present is not None and present is not self._membership:
                raise Fenced(f"group {self._group.name}: another member took the place of instance {instance}")
            lost = list(self._positions) if present is None else []
            if present is None:
                self._membership = self._group.join(instance, self._topics)
            target = self._group.target(instance, self._cluster.partitions_of(self._topics))
            revoked = [] if lost else sorted(self._positions.keys() - target)
        if lost:
            self._callbacks.lost(lost)
        if revoked:
            self._callbacks.revoked(revoked)
        self._release(lost or revoked)
        self._acquire()

    def _acquire(self) -> None:
        instance = self._membership.instance
        with self._cluster.changed:
            target = self._group.target(instance, self._cluster.partitions_of(self._topics))
            assigned = sorted(
                partition
                for partition in target - self._positions.keys()
                if self._group.owners.get(partition, instance) == instance
            )
            for partition in assigned:
                self._group.owners[partition] = instance
                self._positions[partition] = self._group.committed.get(partition, BEGINNING)
        if assigned:
            self._callbacks.assigned(assigned)

    def _release(self, partitions: Sequence[TopicPartition]) -> None:
        with self._cluster.changed:
            for partition in partitions:
                self._positions.pop(partition, None)
                self._delivered.discard(partition)
                self._paused.discard(partition)
                if self._group.owners.get(partition) == self._membership.instance:
                    del self._group.owners[partition]
            if partitions:
                self._cluster.changed.notify_all()

    def _missing(self, partition: TopicPartition, offset: int) -> int:
        if self._continue_after_missing_records:
            return self._cluster.log(partition).first_offset
        return super()._missing(partition, offset)

    def committed(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        with self._cluster.changed:
            self._cluster.check_available()
            return {partition: self._group.committed.get(partition) for partition in partitions}

    def group_metadata(self) -> GroupMetadata:
        return self._membership

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._cluster.changed:
            is_member = self._group.is_member(self._membership)
            held = sorted(self._positions)
        if held and is_member:
            self._callbacks.revoked(held)
        self._positions.clear()
        with self._cluster.changed:
            self._group.leave(self._membership, self._cluster.clock.monotonic_seconds())
            self._cluster.changed.notify_all()
