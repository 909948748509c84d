"""The bus in memory: the twin of `clawstream.bus.kafka` for tests, held to it by one suite for both."""

from collections.abc import Mapping, Sequence

from clawstream.bus.interface import (
    Admin,
    Consumer,
    Producer,
    RebalanceCallbacks,
    TopicDescription,
    TopicPartition,
    TopicSpecification,
    TransactionalProducer,
)
from clawstream.bus.memory_cluster import FaultHook, MemoryCluster, MemoryTopic
from clawstream.bus.memory_consumer import MemoryConsumer, MemoryGroupConsumer
from clawstream.bus.memory_log import PartitionLog
from clawstream.bus.memory_producer import MemoryProducer, MemoryTransactionalProducer
from clawstream.clock import Clock, SystemClock
from clawstream.errors import BusError, TopicDefinitionError


class MemoryBus:
    """Implements `Bus`. Thread-safe. Beside the interface it has what a test does to a cluster."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        session_timeout_seconds: float = 15.0,
        missing_records: str = "stop",
    ) -> None:
        """An empty cluster. `missing_records` as in the settings."""
        self._cluster = MemoryCluster(clock or SystemClock(), session_timeout_seconds=session_timeout_seconds)
        self._continue_after_missing_records = missing_records == "continue"

    def group_consumer(
        self,
        topics: Sequence[str],
        *,
        group: str,
        instance: str,
        callbacks: RebalanceCallbacks,
    ) -> Consumer:
        return MemoryGroupConsumer(
            self._cluster,
            tuple(topics),
            group=group,
            instance=instance,
            callbacks=callbacks,
            continue_after_missing_records=self._continue_after_missing_records,
        )

    def reader(self) -> Consumer:
        return MemoryConsumer(self._cluster)

    def follower(self) -> Consumer:
        return self.reader()

    def producer(self) -> Producer:
        return MemoryProducer(self._cluster)

    def transactional_producer(self, transactional_id: str) -> TransactionalProducer:
        return MemoryTransactionalProducer(self._cluster, transactional_id)

    def admin(self) -> Admin:
        return _MemoryAdmin(self._cluster)

    def set_available(self, available: bool) -> None:
        """Takes the cluster down, or brings it back with everything that was on it."""
        with self._cluster.changed:
            self._cluster.available = available
            self._cluster.changed.notify_all()

    def set_fault(self, hook: FaultHook | None) -> None:
        """From now on `hook` is asked before and after every step of a transaction."""
        self._cluster.fault = hook

    def expel(self, group: str, instance: str) -> None:
        """What a broker does with a member that was silent for too long."""
        with self._cluster.changed:
            self._cluster.group(group).remove(instance)
            self._cluster.changed.notify_all()

    def truncate_before(self, partition: TopicPartition, offset: int) -> None:
        """What retention does."""
        with self._cluster.changed:
            self._cluster.log(partition).truncate_before(offset)


class _MemoryAdmin:
    """Implements `Admin`."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    def create_topics(self, topics: Sequence[TopicSpecification]) -> None:
        with self._cluster.changed:
            self._cluster.check_available()
            for topic in topics:
                if topic.name in self._cluster.topics:
                    raise TopicDefinitionError(f"topic {topic.name} exists already")
                self._cluster.topics[topic.name] = MemoryTopic(
                    dict(topic.config), [PartitionLog() for _ in range(topic.partitions)]
                )
            self._cluster.changed.notify_all()

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicDescription]:
        with self._cluster.changed:
            self._cluster.check_available()
            return {
                name: TopicDescription(name, len(found.partitions), dict(found.config))
                for name in names
                if (found := self._cluster.topics.get(name)) is not None
            }

    def alter_topic_config(self, name: str, config: Mapping[str, str]) -> None:
        with self._cluster.changed:
            self._cluster.check_available()
            self._cluster.topic(name).config.update(config)

    def partitions(self, topic: str) -> list[TopicPartition]:
        with self._cluster.changed:
            self._cluster.check_available()
            return self._cluster.partitions_of((topic,))

    def high_watermarks(self, topic: str) -> dict[TopicPartition, int]:
        with self._cluster.changed:
            self._cluster.check_available()
            places = self._cluster.partitions_of((topic,))
            return {partition: self._cluster.log(partition).end_offset for partition in places}

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        with self._cluster.changed:
            self._cluster.check_available()
            return dict(self._cluster.group(group).committed)

    def set_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        with self._cluster.changed:
            self._cluster.check_available()
            found = self._cluster.group(group)
            if found.members:
                raise BusError(f"group {group} has members: their offsets are not for others to set")
            found.committed.update(offsets)

    def close(self) -> None:
        """There is nothing to release."""
