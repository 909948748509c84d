"""The log as clawstream sees it: records, consumers, producers and transactions.

There are two implementations, `clawstream.bus.kafka` and `clawstream.bus.memory`, and one suite of tests for both.
Offsets are those of the *next* record to read, as in Kafka. All calls block; objects are not thread-safe unless they
say so.
A consumer reads `read_committed` only. Keys are partitioned by murmur2 on every path.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from clawstream.errors import ContractError

Headers = tuple[tuple[str, bytes], ...]

BEGINNING: Final = -2
"""As a position: the first record that is still retained, whatever its offset is by then."""


class TopicPartition(NamedTuple):
    """One partition of a topic (full name). A tuple, since several tables are asked by it for every record."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read."""

    topic: str
    """Full topic name."""
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    """None is a tombstone."""
    headers: Headers
    timestamp_milliseconds: int
    """When its producer made it, since 1970 UTC."""
    encrypted_value: bytes | None = None
    """The value as it lies on the log, when `value` is what was decrypted from it."""
    unreadable: ContractError | None = None
    """Why the value is still encrypted: whoever decodes the record raises it."""

    @property
    def value_on_log(self) -> bytes | None:
        """The value byte for byte as it was written: what a copy of the record must carry."""
        return self.value if self.encrypted_value is None else self.encrypted_value

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """A record to be written."""

    topic: str
    """Full topic name."""
    key: bytes | None
    """Null only in a dead letter whose original had none: compaction and partitioning both need a key."""
    value: bytes | None
    """None writes a tombstone."""
    headers: Headers = ()
    partition: int | None = None
    """Chosen by the key's murmur2 hash when None."""
    timestamp_milliseconds: int | None = None
    """Since 1970 UTC; the time of the call when None. Given only for a record that comes back from an archive."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a record ended up. Inside a transaction the position is final only if the transaction commits."""

    record: OutgoingRecord
    partition: int
    offset: int


DeliveryCallback = Callable[[Delivery], None]


@dataclass(frozen=True, slots=True)
class RebalanceCallbacks:
    """Told inside `Consumer.consume`, on the thread that calls it."""

    assigned: Callable[[Sequence[TopicPartition]], None]
    """Partitions are ours from now on; reading starts at the committed offsets."""
    revoked: Callable[[Sequence[TopicPartition]], None]
    """Partitions are ours until this returns: finish and commit what is done."""
    lost: Callable[[Sequence[TopicPartition]], None]
    """Partitions were taken from us already: commit nothing, drop what was in flight."""


class GroupMetadata(Protocol):
    """Opaque identity of a member at a generation. Passing it to a transaction fences members that lost theirs."""


class Consumer(Protocol):
    """Reads records, either as a member of a group or at positions of its own."""

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        """Up to `max_records`, waiting at most `timeout_seconds` for the first.

        Must be called at least every five minutes by a member of a group, also while there is no capacity (with a
        small number). Rebalance callbacks run inside. A broker that is away is no error here: reading goes on when it
        is back. Raises Fenced, FatalBusError, BusError, and OffsetNotRetained when the position is no longer (or not)
        on the log: a record is never skipped silently.
        """
        ...

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Reads these partitions from these offsets (or BEGINNING), without a group.

        Replaces an earlier assignment, and undoes every `pause`.
        """
        ...

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Reads `partition`, which must be assigned, from `offset` on."""
        ...

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Delivers nothing of `partitions` until resumed or assigned anew. Costly: use with hysteresis."""
        ...

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Undoes `pause`."""
        ...

    def assignment(self) -> list[TopicPartition]:
        """What is read now."""
        ...

    def position(self, partition: TopicPartition) -> int | None:
        """Everything before this offset was delivered or holds nothing for us; None before the first delivery.

        Aborted records and transaction markers take offsets too. Once the reader reached the end, they are counted, so
        that `position(p) >= watermarks(p)[1]` means: caught up.
        """
        ...

    def committed(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The group's committed offsets; None where there is none. Waits for transactions that are being decided.

        Raises BrokerUnavailable.
        """
        ...

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        """First offset that is still retained, and the end for read_committed readers (last stable offset).

        Asks the broker. Raises BrokerUnavailable, or BusError when there is no such partition.
        """
        ...

    def offset_for_time(self, partition: TopicPartition, timestamp_milliseconds: int) -> int:
        """Offset of the first record whose timestamp is that or later; the end when there is none.

        Asks the broker. Raises BrokerUnavailable, or BusError when there is no such partition.
        """
        ...

    def group_metadata(self) -> GroupMetadata:
        """For `TransactionalProducer.send_offsets`."""
        ...

    def close(self) -> None:
        """Stops reading; a member's `revoked` callback runs first. May be called twice.

        The group keeps a static member's place for the session timeout (15 s), so that a restart moves no partition.
        """
        ...


class Producer(Protocol):
    """Idempotent producer, acks from all replicas."""

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        """Queues a record. `on_delivery` runs inside `poll` or `flush`; the next `flush` raises a failed one.

        Raises RecordRejected for one that is too large, and BusError when the local queue is full and stays full.
        """
        ...

    def poll(self, timeout_seconds: float = 0.0) -> None:
        """Serves delivery callbacks."""
        ...

    def flush(self, timeout_seconds: float) -> None:
        """Returns when every queued record is on the log.

        Raises BrokerUnavailable when the time is over (delivery goes on) and BusError naming the first that failed.
        """
        ...

    def close(self) -> None:
        """Flushes for a few seconds and releases the client."""
        ...


class TransactionalProducer(Protocol):
    """One open transaction at a time; nothing of it is visible before it commits.

    After any call that raised, or an end of transaction that took long, the instance must be closed and a new one made
    (reference: Jepsen's reports on Kafka transactions; without KIP-890 a late EndTxn may end the *next* transaction).
    `needs_replacement` says so. A Fenced that may be the broker's own, because the transaction was open for longer than
    its timeout, is a TransactionTimedOut.
    """

    @property
    def needs_replacement(self) -> bool:
        """True after a slow or failed end of transaction."""
        ...

    def begin(self) -> None:
        """Opens a transaction. Raises Fenced or FatalBusError."""
        ...

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        """Queues a record in the open transaction.

        Raises RecordRejected for one that is too large, TransactionAbortable, Fenced, FatalBusError.
        """
        ...

    def flush(self, timeout_seconds: float) -> None:
        """Waits for the deliveries, so that their offsets are known.

        Raises TransactionAbortable, Fenced, FatalBusError.
        """
        ...

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        """Commits consumer offsets with the transaction. Raises TransactionAbortable, Fenced, FatalBusError."""
        ...

    def commit(self) -> None:
        """Makes the transaction visible.

        Raises TransactionAbortable (then `abort`; RecordRejected names the record), Fenced, FatalBusError, and
        TransactionOutcomeUnknown: then only the group's committed offsets, read after a successor is initialised, tell.
        """
        ...

    def abort(self) -> None:
        """Discards the transaction. Raises Fenced, FatalBusError, or TransactionOutcomeUnknown (then `close`)."""
        ...

    def close(self) -> None:
        """Releases the client. An open transaction is aborted by the broker or the successor."""
        ...


@dataclass(frozen=True, slots=True)
class TopicSpecification:
    """A topic to be created."""

    name: str
    """Full name."""
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict[str, str])
    replication_factor: int = 1


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as the broker has it."""

    name: str
    partitions: int
    config: Mapping[str, str]


class Admin(Protocol):
    """Topics of the broker. All calls raise BrokerUnavailable when none answers within seconds."""

    def create_topics(self, topics: Sequence[TopicSpecification]) -> None:
        """Creates topics. One that exists is an error (TopicDefinitionError)."""
        ...

    def describe_topics(self, names: Sequence[str]) -> dict[str, TopicDescription]:
        """Those of `names` that exist."""
        ...

    def alter_topic_config(self, name: str, config: Mapping[str, str]) -> None:
        """Sets these values and leaves the others."""
        ...

    def partitions(self, topic: str) -> list[TopicPartition]:
        """All partitions of a topic. Raises BusError when it does not exist."""
        ...

    def high_watermarks(self, topic: str) -> dict[TopicPartition, int]:
        """Of all partitions the offset after the last record, of transactions that are still open, too.

        Raises BusError when it does not exist.
        """
        ...

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Committed offsets of a group, for lag; empty when it has none."""
        ...

    def set_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commits offsets for a group that has no members: where it is to begin. Raises BusError when it has some."""
        ...

    def close(self) -> None:
        """Releases the client."""
        ...


class Bus(Protocol):
    """Makes clients for one cluster. Thread-safe."""

    def group_consumer(
        self,
        topics: Sequence[str],
        *,
        group: str,
        instance: str,
        callbacks: RebalanceCallbacks,
    ) -> Consumer:
        """A member of `group` (classic protocol, cooperative-sticky, static membership under `instance`).

        Starts at the earliest record where nothing was committed. Never commits by itself.
        """
        ...

    def reader(self) -> Consumer:
        """A consumer without a group, for `assign`: for reading a stretch, or here and there."""
        ...

    def follower(self) -> Consumer:
        """A reader for what comes: it is assigned once and waits at the end. Cheap for the broker while nothing comes,
        slow to seek, and slow to see that it passed a transaction's marker."""
        ...

    def producer(self) -> Producer:
        """An idempotent producer."""
        ...

    def transactional_producer(self, transactional_id: str) -> TransactionalProducer:
        """Initialised: fences and aborts what a predecessor with this id left open.

        Raises BrokerUnavailable when no coordinator answers in time.
        """
        ...

    def admin(self) -> Admin:
        """Topic administration."""
        ...
