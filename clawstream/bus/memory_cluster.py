"""What the clients in memory share: partitions, groups, transactional ids, and one lock."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from clawstream.bus.interface import Delivery, OutgoingRecord, Record, TopicPartition
from clawstream.bus.memory_group import MemoryGroup
from clawstream.bus.memory_log import PartitionLog, Transaction, TransactionState
from clawstream.clock import Clock
from clawstream.errors import BrokerUnavailable, BusError, RecordRejected
from clawstream.topics import murmur2

_DEFAULT_MAX_MESSAGE_BYTES = 1_048_588

FaultHook = Callable[[str, str], None]
"""Called with an operation (`initialise`, `begin`, `produce`, `send_offsets`, `commit`, `abort`) and `before` or
`after`. What it raises is what the caller gets."""


@dataclass(slots=True)
class MemoryTopic:
    """A topic."""

    config: dict[str, str]
    partitions: list[PartitionLog]


@dataclass(slots=True)
class OpenTransaction:
    """What a transactional producer has open."""

    transaction: Transaction = field(default_factory=Transaction)
    touched: set[TopicPartition] = field(default_factory=set[TopicPartition])
    offsets: dict[str, dict[TopicPartition, int]] = field(default_factory=dict[str, dict[TopicPartition, int]])
    """By group."""


class MemoryCluster:
    """All state. Methods take the lock themselves; `changed` is notified after every change that a reader can see."""

    def __init__(self, clock: Clock, *, session_timeout_seconds: float) -> None:
        self.clock = clock
        self.session_timeout_seconds = session_timeout_seconds
        self.changed = threading.Condition(threading.RLock())
        self.topics: dict[str, MemoryTopic] = {}
        self.groups: dict[str, MemoryGroup] = {}
        self.epochs: dict[str, int] = {}
        """By transactional id."""
        self.open: dict[str, OpenTransaction] = {}
        """By transactional id."""
        self.available = True
        self.fault: FaultHook | None = None

    def check_available(self) -> None:
        """Raises BrokerUnavailable while the cluster is down."""
        if not self.available:
            raise BrokerUnavailable("the cluster in memory is down")

    def inject(self, operation: str, when: str) -> None:
        """Lets a test fail an operation."""
        if self.fault is not None:
            self.fault(operation, when)

    def topic(self, name: str) -> MemoryTopic:
        """Raises BusError when there is none."""
        if name not in self.topics:
            raise BusError(f"topic {name} does not exist; run `clawstream topics apply`")
        return self.topics[name]

    def log(self, partition: TopicPartition) -> PartitionLog:
        """Raises BusError when there is none."""
        partitions = self.topic(partition.topic).partitions
        if not 0 <= partition.partition < len(partitions):
            raise BusError(f"{partition} does not exist: the topic has {len(partitions)} partitions")
        return partitions[partition.partition]

    def group(self, name: str) -> MemoryGroup:
        """The group, made at the first use."""
        with self.changed:
            return self.groups.setdefault(name, MemoryGroup(name, self.session_timeout_seconds))

    def append(self, outgoing: OutgoingRecord, transaction: OpenTransaction | None) -> Delivery:
        """Writes one record."""
        with self.changed:
            self.check_available()
            topic = self.topic(outgoing.topic)
            limit = int(topic.config.get("max.message.bytes", _DEFAULT_MAX_MESSAGE_BYTES))
            size = len(outgoing.value or b"") + len(outgoing.key or b"")
            if size > limit:
                raise RecordRejected(
                    f"{outgoing.topic}: a record of {size} bytes (key {outgoing.key!r}) is larger than {limit}",
                    record=outgoing,
                )
            partition = TopicPartition(outgoing.topic, self._partition_of(outgoing, len(topic.partitions)))
            log = self.log(partition)
            record = Record(
                topic=partition.topic,
                partition=partition.partition,
                offset=log.end_offset,
                key=outgoing.key,
                value=outgoing.value,
                headers=outgoing.headers,
                timestamp_milliseconds=int(self.clock.now().timestamp() * 1000)
                if outgoing.timestamp_milliseconds is None
                else outgoing.timestamp_milliseconds,
            )
            log.append(record, transaction.transaction if transaction is not None else None)
            if transaction is not None:
                transaction.touched.add(partition)
            self.changed.notify_all()
            return Delivery(outgoing, partition.partition, record.offset)

    def end(self, transactional_id: str, state: TransactionState) -> None:
        """Commits or aborts what is open under an id, if anything."""
        with self.changed:
            ended = self.open.pop(transactional_id, None)
            if ended is None:
                return
            ended.transaction.state = state
            for partition in sorted(ended.touched):
                self.log(partition).append_marker(ended.transaction)
            if state is TransactionState.COMMITTED:
                for group, offsets in ended.offsets.items():
                    self.group(group).committed.update(offsets)
            self.changed.notify_all()

    def partitions_of(self, topics: Mapping[str, object] | tuple[str, ...]) -> list[TopicPartition]:
        """All partitions of some topics."""
        return [TopicPartition(name, number) for name in topics for number in range(len(self.topic(name).partitions))]

    @staticmethod
    def _partition_of(outgoing: OutgoingRecord, count: int) -> int:
        if outgoing.partition is not None:
            return outgoing.partition
        return 0 if outgoing.key is None else (murmur2(outgoing.key) & 0x7FFFFFFF) % count
