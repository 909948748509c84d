"""The bytes of a log as anybody sees them who has no key, read by the client that shares no code with ours."""

from dataclasses import dataclass

from kafka import KafkaConsumer
from kafka.structs import TopicPartition

from clawstream.topics import topic_definitions


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record, as bytes."""

    topic: str
    """Without namespace."""
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]

    def holds(self, words: bytes) -> bool:
        """Whether they stand in any part of it."""
        parts = [self.key or b"", self.value or b"", *(value for _, value in self.headers)]
        return any(words in part for part in parts)


def read_raw(bootstrap_servers: str, namespace: str) -> list[RawRecord]:
    """Every record of every topic, also those that no transaction committed, in the order of each partition."""
    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap_servers, isolation_level="read_uncommitted", enable_auto_commit=False
    )
    try:
        partitions = [
            TopicPartition(f"{namespace}.{topic}", number)
            for topic, definition in topic_definitions().items()
            for number in range(definition.partitions)
        ]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        consumer.seek_to_beginning(*partitions)
        found: list[RawRecord] = []
        while any((consumer.position(partition) or 0) < ends[partition] for partition in partitions):
            for records in consumer.poll(timeout_ms=200).values():
                found += [
                    RawRecord(
                        record.topic.removeprefix(f"{namespace}."),
                        record.partition,
                        record.offset,
                        record.key,
                        record.value,
                        tuple(record.headers),
                    )
                    for record in records
                ]
        return found
    finally:
        consumer.close()
