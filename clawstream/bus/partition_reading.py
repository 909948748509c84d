"""Reading partitions once, up to the end that they have now, without a group and in bounded memory."""

from collections.abc import Generator, Mapping, Sequence

from clawstream.bus.interface import Bus, Record, TopicPartition

_BATCH_RECORDS = 500
_WAIT_SECONDS = 0.1


def partition_ranges(bus: Bus, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
    """First retained offset and present end of every partition of these topics.

    Raises BrokerUnavailable, and BusError for a topic that does not exist.
    """
    admin, consumer = bus.admin(), bus.reader()
    try:
        partitions = [partition for topic in topics for partition in admin.partitions(topic)]
        return {partition: consumer.watermarks(partition) for partition in partitions}
    finally:
        consumer.close()
        admin.close()


def read_range(bus: Bus, ranges: Mapping[TopicPartition, tuple[int, int]]) -> Generator[Record]:
    """Committed records from the first to before the second offset of each partition, in order per partition.

    Raises OffsetNotRetained and BusError. Waits while no broker answers.
    """
    open_ends = {partition: end for partition, (first, end) in ranges.items() if first < end}
    if not open_ends:
        return
    consumer = bus.reader()
    try:
        consumer.assign({partition: ranges[partition][0] for partition in open_ends})
        while open_ends:
            for record in consumer.consume(_BATCH_RECORDS, _WAIT_SECONDS):
                if record.offset < ranges[record.topic_partition][1]:
                    yield record
            for partition in list(open_ends):
                position = consumer.position(partition)
                if position is not None and position >= open_ends[partition]:
                    del open_ends[partition]
    finally:
        consumer.close()
