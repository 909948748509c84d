"""Producers of the cluster in memory."""

from collections.abc import Callable, Mapping

from clawstream.bus.interface import Delivery, DeliveryCallback, GroupMetadata, OutgoingRecord, TopicPartition
from clawstream.bus.kafka_properties import SLOW_END_OF_TRANSACTION_SECONDS
from clawstream.bus.memory_cluster import MemoryCluster, OpenTransaction
from clawstream.bus.memory_group import Membership
from clawstream.bus.memory_log import TransactionState
from clawstream.errors import (
    BrokerUnavailable,
    BusError,
    Fenced,
    TransactionAbortable,
    TransactionOutcomeUnknown,
)


class _Reports:
    """Delivery reports that wait for `poll` or `flush`."""

    def __init__(self) -> None:
        self._waiting: list[tuple[DeliveryCallback, Delivery]] = []

    def add(self, callback: DeliveryCallback | None, delivery: Delivery) -> None:
        if callback is not None:
            self._waiting.append((callback, delivery))

    def serve(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback, delivery in waiting:
            callback(delivery)


class MemoryProducer:
    """Implements `Producer`. A record is on the log when `produce` returns, or waits until the cluster is back."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._reports = _Reports()
        self._queue: list[tuple[OutgoingRecord, DeliveryCallback | None]] = []

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        self._queue.append((record, on_delivery))
        self._send()

    def poll(self, timeout_seconds: float = 0.0) -> None:
        self._send()
        self._reports.serve()

    def flush(self, timeout_seconds: float) -> None:
        self._send()
        self._reports.serve()
        if self._queue:
            raise BrokerUnavailable(f"{len(self._queue)} record(s) are not on the log: the cluster in memory is down")

    def close(self) -> None:
        self._send()
        self._reports.serve()

    def _send(self) -> None:
        while self._queue and self._cluster.available:
            record, on_delivery = self._queue.pop(0)
            self._reports.add(on_delivery, self._cluster.append(record, None))


class MemoryTransactionalProducer:
    """Implements `TransactionalProducer`."""

    def __init__(self, cluster: MemoryCluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._reports = _Reports()
        self._needs_replacement = False
        with cluster.changed:
            cluster.check_available()
            cluster.inject("initialise", "before")
            self._epoch = cluster.epochs[transactional_id] = cluster.epochs.get(transactional_id, 0) + 1
            cluster.end(transactional_id, TransactionState.ABORTED)

    @property
    def needs_replacement(self) -> bool:
        return self._needs_replacement

    def begin(self) -> None:
        def begin() -> None:
            if self._id in self._cluster.open:
                raise BusError(f"transactional id {self._id}: a transaction is open already")
            self._cluster.open[self._id] = OpenTransaction()

        self._run("begin", begin)

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        def produce() -> None:
            self._reports.add(on_delivery, self._cluster.append(record, self._open()))

        self._run("produce", produce)

    def flush(self, timeout_seconds: float) -> None:
        self._reports.serve()

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        def send() -> None:
            self._check_member(group)
            assert isinstance(group, Membership)
            self._open().offsets.setdefault(group.group, {}).update(offsets)

        self._run("send_offsets", send)

    def commit(self) -> None:
        self._run("commit", lambda: self._end(TransactionState.COMMITTED))
        self._reports.serve()

    def abort(self) -> None:
        self._run("abort", lambda: self._end(TransactionState.ABORTED))

    def close(self) -> None:
        """An open transaction stays open, as a crashed process would leave it."""

    def _open(self) -> OpenTransaction:
        if self._id not in self._cluster.open:
            raise BusError(f"transactional id {self._id}: no transaction is open")
        return self._cluster.open[self._id]

    def _end(self, state: TransactionState) -> None:
        self._open()
        self._cluster.end(self._id, state)

    def _check_member(self, group: GroupMetadata) -> None:
        if not isinstance(group, Membership):
            raise ValueError(f"group metadata of another bus: {group!r}")
        members = self._cluster.group(group.group).members
        if members.get(group.instance) is group:
            return
        if group.instance in members:
            raise Fenced(f"group {group.group}: another member took the place of instance {group.instance}")
        raise TransactionAbortable(f"group {group.group}: instance {group.instance} is not a member any more")

    def _run(self, operation: str, call: Callable[[], None]) -> None:
        started = self._cluster.clock.monotonic_seconds()
        try:
            self._cluster.inject(operation, "before")
            with self._cluster.changed:
                if self._cluster.epochs[self._id] != self._epoch:
                    raise Fenced(f"transactional id {self._id}: a newer producer has it")
                self._cluster.check_available()
                call()
            self._cluster.inject(operation, "after")
        except BrokerUnavailable as error:
            self._needs_replacement = True
            if operation in {"commit", "abort"}:
                raise TransactionOutcomeUnknown(str(error)) from error
            raise TransactionAbortable(str(error)) from error
        except BaseException:
            self._needs_replacement = True
            raise
        if self._cluster.clock.monotonic_seconds() - started > SLOW_END_OF_TRANSACTION_SECONDS:
            self._needs_replacement = True
