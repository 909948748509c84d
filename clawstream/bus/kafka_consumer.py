"""Consumers over librdkafka."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

from confluent_kafka import OFFSET_BEGINNING, OFFSET_STORED, KafkaError, KafkaException, Message
from confluent_kafka import Consumer as LibrdkafkaConsumer
from confluent_kafka import TopicPartition as LibrdkafkaTopicPartition

from clawstream.bus.interface import BEGINNING, GroupMetadata, RebalanceCallbacks, Record, TopicPartition
from clawstream.bus.kafka_errors import kafka_error, translate
from clawstream.bus.kafka_properties import SOCKET_TIMEOUT_SECONDS, TRANSACTION_TIMEOUT_SECONDS, Properties
from clawstream.errors import BrokerUnavailable, BusError, FatalBusError, Fenced, OffsetNotRetained
from clawstream.log import get_logger

_PASSING: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)
"""Reported as records, and mended by librdkafka itself (after a rebalance for the second)."""


class KafkaConsumer:
    """Implements `Consumer`."""

    def __init__(
        self,
        properties: Properties,
        *,
        topics: Sequence[str] = (),
        callbacks: RebalanceCallbacks | None = None,
        continue_after_missing_records: bool = False,
    ) -> None:
        """With `topics` and `callbacks` a member of a group, else a reader."""
        self._log = get_logger().bind(client=properties["client.id"])
        self._client = LibrdkafkaConsumer(dict(properties), logger=logging.getLogger("clawstream.librdkafka"))
        self._callbacks = callbacks
        self._continue_after_missing_records = continue_after_missing_records
        self._positions: dict[TopicPartition, int] = {}
        self._started_at: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._told: set[TopicPartition] = set()
        """What the callbacks know to be ours."""
        self._pending_error: BaseException | None = None
        self._closed = False
        if callbacks is not None:
            self._client.subscribe(
                list(topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        self._raise_pending()
        try:
            # librdkafka's `consume` waits until it has all that was asked for: the wait is for the first only.
            first = self._client.poll(timeout_seconds)
            messages = [] if first is None else [first]
            if first is not None and max_records > 1:
                messages += self._client.consume(max_records - 1, 0)
        except KafkaException as exception:
            raise translate(kafka_error(exception), "consuming") from exception
        records: list[Record] = []
        for message in messages:
            error = message.error()
            if error is None:
                record = _record(message)
                self._positions[record.topic_partition] = record.offset + 1
                records.append(record)
            else:
                self._handle(error, message)
        if not records:
            self._raise_pending()
        return records

    def _raise_pending(self) -> None:
        if self._pending_error is not None:
            error, self._pending_error = self._pending_error, None
            raise error

    def _handle(self, error: KafkaError, message: Message) -> None:
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            partition, offset = _topic_partition(message), message.offset()
            assert offset is not None
            self._positions[partition] = max(offset, self._positions.get(partition, 0))
        elif code == KafkaError._AUTO_OFFSET_RESET:
            self._position_is_not_on_the_log(_topic_partition(message))
        elif code in _PASSING and not error.fatal():
            self._log.warning("the consumer met an error and goes on", error=error.str(), code=error.name())
        else:
            self._pending_error = translate(error, f"reading {message.topic() or 'the log'}")

    def _position_is_not_on_the_log(self, partition: TopicPartition) -> None:
        committed = self.committed([partition])[partition] if self._callbacks is not None else None
        wanted = self._positions.get(partition, self._started_at.get(partition, OFFSET_STORED))
        if wanted < 0 and committed is not None:
            wanted = committed
        if wanted < 0:
            self._start([LibrdkafkaTopicPartition(partition.topic, partition.partition, OFFSET_BEGINNING)])
            return
        first, end = self.watermarks(partition)
        missing = f"{partition}@{wanted}: not on the log, which holds {first} to {end}"
        if wanted < first:
            missing += f"; {first - wanted} offset(s) from {wanted} to {first - 1} were removed before they were read"
        if self._callbacks is not None and self._continue_after_missing_records:
            self._log.error("records are missing; continuing from the earliest", position=missing)
            self._restart(partition, OFFSET_BEGINNING)
            return
        self._pending_error = OffsetNotRetained(
            f"{missing}. Raise its topic's retention; kafka.missing_records = 'continue' accepts the loss",
            offset=wanted,
            first=first,
            end=end,
        )

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._resume_before_reassignment(list(self._paused))
        self._positions.clear()
        self._started_at = dict(positions)
        self._client.assign(
            [
                LibrdkafkaTopicPartition(
                    partition.topic, partition.partition, OFFSET_BEGINNING if offset == BEGINNING else offset
                )
                for partition, offset in positions.items()
            ]
        )

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._started_at[partition] = offset
        self._positions.pop(partition, None)
        self._restart(partition, OFFSET_BEGINNING if offset == BEGINNING else offset)

    def _restart(self, partition: TopicPartition, offset: int) -> None:
        """Unlike librdkafka's seek, this works in every state of the partition, and drops what was read ahead."""
        self._positions.pop(partition, None)
        position = LibrdkafkaTopicPartition(partition.topic, partition.partition, offset)
        paused = self._resume_before_reassignment([partition])
        try:
            self._client.incremental_unassign([position])
            self._client.incremental_assign([position])
        except KafkaException as exception:
            raise translate(kafka_error(exception), f"{partition}: seeking {offset}") from exception
        if paused:
            self.pause(paused)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.update(partitions)
        self._client.pause([LibrdkafkaTopicPartition(each.topic, each.partition) for each in partitions])

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        self._client.resume([LibrdkafkaTopicPartition(each.topic, each.partition) for each in partitions])

    def _resume_before_reassignment(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Those of `partitions` that were paused.

        librdkafka keeps a pause across assignments, and a resume that meets a new assignment's start may lose the
        start: the partition then stays silent for good (1 in 4,000 under load). So a pause ends with its assignment.
        """
        paused = [each for each in partitions if each in self._paused]
        if paused:
            self.resume(paused)
        return paused

    def assignment(self) -> list[TopicPartition]:
        return sorted(TopicPartition(each.topic, each.partition) for each in self._client.assignment())

    def position(self, partition: TopicPartition) -> int | None:
        return self._positions.get(partition)

    def committed(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        wanted = [LibrdkafkaTopicPartition(each.topic, each.partition) for each in partitions]
        # A dead member's transaction blocks the answer until it is aborted.
        deadline = time.monotonic() + TRANSACTION_TIMEOUT_SECONDS + SOCKET_TIMEOUT_SECONDS
        while True:
            try:
                found = self._client.committed(wanted, timeout=SOCKET_TIMEOUT_SECONDS)
            except KafkaException as exception:
                error = translate(kafka_error(exception), "reading the group's committed offsets")
                if isinstance(error, BrokerUnavailable) and time.monotonic() < deadline:
                    continue
                raise error from exception
            return {
                TopicPartition(each.topic, each.partition): each.offset if each.offset >= 0 else None for each in found
            }

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        position = LibrdkafkaTopicPartition(partition.topic, partition.partition)
        try:
            return self._client.get_watermark_offsets(position, timeout=SOCKET_TIMEOUT_SECONDS)
        except KafkaException as exception:
            raise translate(kafka_error(exception), f"{partition}: asking for first and end offset") from exception

    def offset_for_time(self, partition: TopicPartition, timestamp_milliseconds: int) -> int:
        # librdkafka takes the timestamp in the place of the offset.
        query = LibrdkafkaTopicPartition(partition.topic, partition.partition, max(0, timestamp_milliseconds))
        try:
            (answer,) = self._client.offsets_for_times([query], timeout=SOCKET_TIMEOUT_SECONDS)
        except KafkaException as exception:
            raise translate(kafka_error(exception), f"{partition}: asking for the offset of a time") from exception
        if answer.error is not None:
            raise translate(answer.error, f"{partition}: asking for the offset of a time")
        return answer.offset if answer.offset >= 0 else self.watermarks(partition)[1]

    def group_metadata(self) -> GroupMetadata:
        return self._client.consumer_group_metadata()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.close()
            self._raise_pending()

    # Exceptions cannot pass through librdkafka: they are kept, and raised from `consume` or `close`.

    def _on_assign(self, _client: LibrdkafkaConsumer, partitions: list[LibrdkafkaTopicPartition]) -> None:
        ours = [TopicPartition(each.topic, each.partition) for each in partitions]
        if self._closed or not ours:
            # Answered, not used: a closing client answers no questions any more, and a cooperative rebalance that
            # changes nothing for us says so with an empty list.
            self._client.incremental_assign(partitions)
            return
        try:
            committed = self.committed(ours)
        except BrokerUnavailable as error:
            self._log.warning("committed offsets are not known yet; librdkafka asks again", error=str(error))
            starts = [LibrdkafkaTopicPartition(each.topic, each.partition, OFFSET_STORED) for each in ours]
        except BusError as error:
            self._pending_error = error
            return
        else:
            starts = [
                LibrdkafkaTopicPartition(
                    each.topic, each.partition, OFFSET_BEGINNING if (offset := committed[each]) is None else offset
                )
                for each in ours
            ]
        self._start(starts)
        self._told.update(ours)
        self._call("assigned", ours)

    def _start(self, positions: list[LibrdkafkaTopicPartition]) -> None:
        for each in positions:
            partition = TopicPartition(each.topic, each.partition)
            self._positions.pop(partition, None)
            self._started_at[partition] = each.offset
        assigned = {(each.topic, each.partition) for each in self._client.assignment()}
        again = [each for each in positions if (each.topic, each.partition) in assigned]
        if again:
            self._resume_before_reassignment([TopicPartition(each.topic, each.partition) for each in again])
            self._client.incremental_unassign(again)
        self._client.incremental_assign(positions)

    def _on_revoke(self, _client: LibrdkafkaConsumer, partitions: list[LibrdkafkaTopicPartition]) -> None:
        ours = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._call("revoked", ours)
        self._resume_before_reassignment(ours)
        self._client.incremental_unassign(partitions)

    def _on_lost(self, _client: LibrdkafkaConsumer, partitions: list[LibrdkafkaTopicPartition]) -> None:
        ours = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._call("lost", ours)
        self._resume_before_reassignment(ours)
        self._client.incremental_unassign(partitions)

    def _call(self, which: str, partitions: list[TopicPartition]) -> None:
        assert self._callbacks is not None
        if which != "assigned":
            partitions = [each for each in partitions if each in self._told]
            self._told.difference_update(partitions)
            for partition in partitions:
                self._positions.pop(partition, None)
            if not partitions:
                return
        try:
            if which == "assigned":
                self._callbacks.assigned(partitions)
            elif which == "revoked":
                self._callbacks.revoked(partitions)
            else:
                self._callbacks.lost(partitions)
        except BaseException as error:  # Raised again by the next call: librdkafka's C code cannot carry it.
            if not isinstance(self._pending_error, Fenced | FatalBusError):
                self._pending_error = error


def _topic_partition(message: Message) -> TopicPartition:
    topic, partition = message.topic(), message.partition()
    assert topic is not None
    assert partition is not None
    return TopicPartition(topic, partition)


def _record(message: Message) -> Record:
    topic_partition, offset = _topic_partition(message), message.offset()
    assert offset is not None
    headers = message.headers() or []
    pairs = headers.items() if isinstance(headers, dict) else headers
    return Record(
        topic=topic_partition.topic,
        partition=topic_partition.partition,
        offset=offset,
        key=message.key(),
        value=message.value(),
        headers=tuple((name, value.encode() if isinstance(value, str) else value or b"") for name, value in pairs),
        timestamp_milliseconds=message.timestamp()[1],
    )
