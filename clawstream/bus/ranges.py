"""Reading a bounded stretch of the log: partitions with a first offset and an end, read once and in order."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from clawstream.bus.fold import latest_by_key
from clawstream.bus.interface import Bus, Consumer, Record, TopicPartition
from clawstream.errors import BrokerUnavailable

OffsetRange = tuple[int, int]
"""First offset, and the offset after the last."""
Progress = Callable[[int, int], None]
"""Told how many of how many offsets are read."""

_BATCH_RECORDS = 500
_WAIT_SECONDS = 0.1


def no_progress(_done: int, _of: int) -> None:
    """Nobody watches."""


def partitions_of(bus: Bus, topic: str) -> list[TopicPartition]:
    """All partitions of a topic. Raises BusError when it does not exist."""
    admin = bus.admin()
    try:
        return admin.partitions(topic)
    finally:
        admin.close()


def ranges_since(
    reader: Consumer, partitions: Sequence[TopicPartition], since_milliseconds: int | None = None
) -> dict[TopicPartition, OffsetRange]:
    """From the first record of that time or later (None: the oldest that is retained) to the present end.

    Raises BrokerUnavailable, and BusError for a partition that does not exist.
    """
    ranges: dict[TopicPartition, OffsetRange] = {}
    for partition in partitions:
        first, end = reader.watermarks(partition)
        if since_milliseconds is not None:
            first = max(first, min(end, reader.offset_for_time(partition, since_milliseconds)))
        ranges[partition] = (first, end)
    return ranges


def present_ranges(bus: Bus, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetRange]:
    """First retained offset and present end of each partition. Raises as `ranges_since`."""
    reader = bus.reader()
    try:
        return ranges_since(reader, partitions)
    finally:
        reader.close()


def topic_ranges(bus: Bus, topics: Sequence[str]) -> dict[TopicPartition, OffsetRange]:
    """First retained offset and present end of every partition of these topics. Raises as `ranges_since`."""
    return present_ranges(bus, [partition for topic in topics for partition in partitions_of(bus, topic)])


def read_once(bus: Bus, ranges: Mapping[TopicPartition, OffsetRange]) -> Generator[Record]:
    """`read_ranges` with a reader of its own. Waits while no broker answers."""
    reader = bus.reader()
    try:
        yield from read_ranges(reader, ranges)
    finally:
        reader.close()


def read_ranges(
    reader: Consumer,
    ranges: Mapping[TopicPartition, OffsetRange],
    progress: Progress = no_progress,
    *,
    silence_seconds: float | None = None,
) -> Iterator[Record]:
    """Every committed record inside `ranges`, in order per partition. Replaces the reader's assignment.

    Offsets of transaction markers and aborted records count as read once the reader has passed them. Raises
    BrokerUnavailable when nothing came for `silence_seconds` (None: waits while no broker answers), OffsetNotRetained
    and FatalBusError.
    """
    left = {partition: bounds for partition, bounds in ranges.items() if bounds[0] < bounds[1]}
    total = sum(end - start for start, end in left.values())
    if not left:
        return
    reader.assign({partition: start for partition, (start, _) in left.items()})
    finished = silent_polls = 0
    while left:
        records = reader.consume(_BATCH_RECORDS, _WAIT_SECONDS)
        silent_polls = 0 if records else silent_polls + 1
        for record in records:
            bounds = left.get(record.topic_partition)
            if bounds is not None and record.offset < bounds[1]:
                yield record
        under_way = 0
        for partition, (start, end) in list(left.items()):
            position = reader.position(partition)
            if position is not None and position >= end:
                del left[partition]
                finished += end - start
                reader.pause([partition])
            else:
                under_way += (position or start) - start
        progress(finished + under_way, total)
        if left and silence_seconds is not None and silent_polls * _WAIT_SECONDS > silence_seconds:
            partition, (start, end) = next(iter(left.items()))
            position = reader.position(partition) or start
            raise BrokerUnavailable(f"{partition} could not be read from {position} up to {end}")


def end_of_records(reader: Consumer, partition: TopicPartition, bounds: OffsetRange) -> int:
    """The offset after the last committed record inside `bounds`; their start when there is none.

    The end of a partition may be markers of transactions: whoever waits for a consumer to have handled everything needs
    the last *record*. Reads back in steps that double.
    """
    start, end = bounds
    step = 64
    while start < end:
        from_offset = max(start, end - step)
        found = [record.offset for record in read_ranges(reader, {partition: (from_offset, bounds[1])})]
        if found:
            return max(found) + 1
        if from_offset == start:
            return start
        step *= 8
    return start


def latest_of_topic(bus: Bus, topic: str) -> dict[bytes, Record]:
    """The newest record of every key that a compacted topic holds now, without those whose newest is a tombstone.

    Raises as `read_once`.
    """
    return latest_by_key(read_once(bus, topic_ranges(bus, [topic])))
