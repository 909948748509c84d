"""Clients that pass everything on to another one: what changes some of their methods derives from them."""

from collections.abc import Mapping, Sequence

from clawstream.bus.interface import (
    Consumer,
    DeliveryCallback,
    GroupMetadata,
    OutgoingRecord,
    Record,
    TopicPartition,
    TransactionalProducer,
)


class ForwardingConsumer:
    """Implements `Consumer`."""

    def __init__(self, inner: Consumer) -> None:
        self._inner = inner

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        return self._inner.consume(max_records, timeout_seconds)

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._inner.assign(positions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._inner.seek(partition, offset)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._inner.pause(partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._inner.resume(partitions)

    def assignment(self) -> list[TopicPartition]:
        return self._inner.assignment()

    def position(self, partition: TopicPartition) -> int | None:
        return self._inner.position(partition)

    def committed(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        return self._inner.committed(partitions)

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        return self._inner.watermarks(partition)

    def offset_for_time(self, partition: TopicPartition, timestamp_milliseconds: int) -> int:
        return self._inner.offset_for_time(partition, timestamp_milliseconds)

    def group_metadata(self) -> GroupMetadata:
        return self._inner.group_metadata()

    def close(self) -> None:
        self._inner.close()


class ForwardingTransactionalProducer:
    """Implements `TransactionalProducer`."""

    def __init__(self, inner: TransactionalProducer) -> None:
        self._inner = inner

    @property
    def needs_replacement(self) -> bool:
        return self._inner.needs_replacement

    def begin(self) -> None:
        self._inner.begin()

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        self._inner.produce(record, on_delivery)

    def flush(self, timeout_seconds: float) -> None:
        self._inner.flush(timeout_seconds)

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        self._inner.send_offsets(offsets, group)

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()
