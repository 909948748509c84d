# pyright: basic
# Reason: kafka-python has no type information; this file is a thin adapter around it.
"""The audited log on Kafka, read by kafka-python: the second opinion. Nothing of clawstream's own client is used."""

import time
from collections.abc import Iterator
from typing import Any, Literal

from kafka import KafkaAdminClient, KafkaConsumer
from kafka.errors import CoordinatorLoadInProgressError, CoordinatorNotAvailableError, KafkaError
from kafka.structs import TopicPartition

from clawstream.audit.log import Committed, LogRecord, Partition, Snapshot
from clawstream.errors import BrokerUnavailable, OpenTransaction
from clawstream.stages import WORKER_STAGES
from clawstream.topics import full_name, topic_definitions

_OPEN_TRANSACTION_SECONDS = 60.0
"""Longer than any transaction of ours may stay open: what still is then will not end by itself."""
_SILENT_SECONDS = 60.0
_COORDINATOR_RETRY_SECONDS = 0.2
_POLL_MILLISECONDS = 200
_POLL_RECORDS = 2000


class KafkaLog:
    """Implements `AuditedLog`."""

    def __init__(self, bootstrap_servers: str, namespace: str) -> None:
        """Raises BrokerUnavailable."""
        self.namespace = namespace
        self._servers = bootstrap_servers.split(",")
        try:
            self._reader = self._consumer("read_committed")
        except KafkaError as error:
            raise _unavailable(bootstrap_servers, error) from error
        self._topics = {full_name(namespace, topic): topic for topic in topic_definitions()}

    def snapshot(self) -> Snapshot:
        committed = self.committed()
        try:
            partitions = self._partitions()
            uncommitted = self._consumer("read_uncommitted")
            try:
                high = uncommitted.end_offsets(partitions)
            finally:
                uncommitted.close()
            stable = self._stable_ends(partitions, high)
            starts = self._reader.beginning_offsets(partitions)
        except KafkaError as error:
            raise _unavailable(",".join(self._servers), error) from error
        return Snapshot(
            committed,
            {self._short(each): offset for each, offset in starts.items()},
            {self._short(each): offset for each, offset in stable.items()},
            time.time_ns() // 1_000_000,
        )

    def records(self, snapshot: Snapshot) -> Iterator[LogRecord]:
        ends = {self._full(each): end for each, end in snapshot.ends.items() if end > snapshot.starts[each]}
        self._reader.assign(list(ends))
        for each in ends:
            self._reader.seek(each, snapshot.starts[self._short(each)])
        open_partitions = set(ends)
        last_progress = time.monotonic()
        while open_partitions:
            try:
                batches = self._reader.poll(timeout_ms=_POLL_MILLISECONDS, max_records=_POLL_RECORDS)
            except KafkaError as error:
                raise _unavailable(",".join(self._servers), error) from error
            for partition, records in batches.items():
                topic = self._topics[partition.topic]
                for record in records:
                    if record.offset < ends[partition]:
                        yield LogRecord(
                            topic,
                            record.partition,
                            record.offset,
                            record.timestamp,
                            record.key,
                            record.value,
                            tuple(record.headers),
                        )
            done = {each for each in open_partitions if (self._reader.position(each) or 0) >= ends[each]}
            if done:
                open_partitions -= done
                self._reader.pause(*done)
            if batches or done:
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > _SILENT_SECONDS:
                first = min(open_partitions)
                raise BrokerUnavailable(
                    f"{first.topic}[{first.partition}] could not be read from {self._reader.position(first)} up to "
                    f"{ends[first]}: nothing came for {_SILENT_SECONDS:.0f} seconds"
                )

    def committed(self) -> Committed:
        try:
            admin: Any = KafkaAdminClient(bootstrap_servers=self._servers)
            try:
                found: dict[str, dict[int, int]] = {}
                for stage in WORKER_STAGES:
                    group, topic = full_name(self.namespace, stage.name), full_name(self.namespace, stage.input_topic)
                    offsets = _group_offsets(admin, group)
                    found[stage.name] = {
                        each.partition: position.offset
                        for each, position in offsets.items()
                        if each.topic == topic and position.offset >= 0
                    }
                return found
            finally:
                admin.close()
        except KafkaError as error:
            raise _unavailable(",".join(self._servers), error) from error

    def close(self) -> None:
        """Releases the client."""
        self._reader.close()

    def _consumer(self, isolation_level: Literal["read_committed", "read_uncommitted"]) -> KafkaConsumer:
        return KafkaConsumer(
            bootstrap_servers=self._servers,
            isolation_level=isolation_level,
            enable_auto_commit=False,
            group_id=None,
            max_partition_fetch_bytes=8 * 1024 * 1024,
        )

    def _partitions(self) -> list[TopicPartition]:
        existing = self._reader.topics()
        return [
            TopicPartition(topic, number)
            for topic in self._topics
            if topic in existing
            for number in sorted(self._reader.partitions_for_topic(topic) or ())
        ]

    def _stable_ends(
        self, partitions: list[TopicPartition], high: dict[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Once every transaction that was open when `high` was looked up has ended."""
        deadline = time.monotonic() + _OPEN_TRANSACTION_SECONDS
        while True:
            stable = self._reader.end_offsets(partitions)
            behind = [each for each in partitions if stable[each] < high[each]]
            if not behind:
                return stable
            if time.monotonic() > deadline:
                each = behind[0]
                raise OpenTransaction(
                    f"{each.topic}[{each.partition}]@{stable[each]}: a transaction has been open for more than "
                    f"{_OPEN_TRANSACTION_SECONDS:.0f} seconds, and hides what comes after it from every reader; "
                    "start the process that left it, or abort it with kafka-transactions.sh"
                )
            time.sleep(0.1)

    def _short(self, partition: TopicPartition) -> Partition:
        return self._topics[partition.topic], partition.partition

    def _full(self, partition: Partition) -> TopicPartition:
        return TopicPartition(full_name(self.namespace, partition[0]), partition[1])


def _group_offsets(admin: Any, group: str) -> Any:
    """A fresh broker makes its group coordinator when it is asked for the first time, and meanwhile says so."""
    deadline = time.monotonic() + _SILENT_SECONDS
    while True:
        try:
            return admin.list_group_offsets(group).get(group, {})
        except (CoordinatorNotAvailableError, CoordinatorLoadInProgressError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_COORDINATOR_RETRY_SECONDS)


def _unavailable(servers: str, error: KafkaError) -> BrokerUnavailable:
    told = str(error).removeprefix(f"{type(error).__name__}: ")
    return BrokerUnavailable(f"{servers}: {told}; is a broker there, and is kafka.bootstrap_servers right?")
