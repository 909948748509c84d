"""Bounded stretches of the log, and where a group is to begin."""

import pytest

from clawstream.bus.interface import Bus, OutgoingRecord, RebalanceCallbacks, TopicPartition
from clawstream.bus.ranges import end_of_records, ranges_since, read_ranges
from clawstream.errors import BrokerUnavailable, BusError
from tests.fixtures.buses import consume_count, consume_until, read_all, write, write_each


def _ignore(_: object) -> None:
    """A rebalance that nobody cares about."""


SILENT = RebalanceCallbacks(_ignore, _ignore, _ignore)


def aborted(bus: Bus, topic: str, namespace: str, *, count: int) -> None:
    producer = bus.transactional_producer(f"{namespace}.t")
    for _ in range(count):
        producer.begin()
        producer.produce(OutgoingRecord(topic, b"k", b"aborted", partition=0))
        producer.flush(30)
        producer.abort()
    producer.close()


def test_a_stretch_is_read_whole_and_again_and_nothing_beyond_it(bus: Bus, wide_topic: str) -> None:
    write_each(bus, wide_topic, {0: [b"a", b"b", b"c"], 5: [b"d"], 7: [b"e", b"f"]})
    reader = bus.reader()
    ranges = {
        TopicPartition(wide_topic, 0): (1, 3),
        TopicPartition(wide_topic, 3): (0, 0),
        TopicPartition(wide_topic, 5): (0, 1),
        TopicPartition(wide_topic, 7): (0, 1),
    }
    seen: list[tuple[int, int]] = []
    for _ in range(2):  # The first reading pauses what it has finished.
        values = sorted(record.value or b"" for record in read_ranges(reader, ranges, lambda *at: seen.append(at)))
        assert values == [b"b", b"c", b"d", b"e"]
        assert seen[-1] == (4, 4)
    assert list(read_ranges(reader, {})) == []
    reader.close()


def test_a_stretch_that_stays_silent_ends_with_where_it_stood(bus: Bus, topic: str) -> None:
    write(bus, topic, b"a")
    reader = bus.reader()
    found: list[bytes | None] = []
    silence_seconds, where = 0.3, ""
    while not found and silence_seconds < 60:  # On a busy machine a broker is silent before the first record, too.
        with pytest.raises(BrokerUnavailable) as caught:
            for record in read_ranges(reader, {TopicPartition(topic, 0): (0, 2)}, silence_seconds=silence_seconds):
                found.append(record.value)
        where, silence_seconds = str(caught.value), 3 * silence_seconds
    assert found == [b"a"]
    assert "[0] could not be read from 1 up to 2" in where
    reader.close()


def test_the_last_record_is_found_behind_markers_and_aborted_ones(bus: Bus, topic: str, namespace: str) -> None:
    partition = TopicPartition(topic, 0)
    reader = bus.reader()
    write(bus, topic, b"a", b"b")
    aborted(bus, topic, namespace, count=40)
    assert len(read_all(bus, topic)) == 2  # Waits for the markers, which an abort does not.
    (bounds,) = ranges_since(reader, [partition]).values()
    assert bounds == (0, 82)
    assert end_of_records(reader, partition, bounds) == 2
    assert end_of_records(reader, partition, (2, 82)) == 2, "no record: the start"
    assert end_of_records(reader, partition, (0, 1)) == 1
    reader.close()


def test_a_group_begins_where_it_was_told_and_nobody_moves_one_that_has_members(
    bus: Bus, topic: str, namespace: str
) -> None:
    partition = TopicPartition(topic, 0)
    write(bus, topic, b"a", b"b", b"c")
    admin = bus.admin()
    admin.set_group_offsets(f"{namespace}.g", {partition: 2})
    assert admin.group_offsets(f"{namespace}.g") == {partition: 2}
    consumer = bus.group_consumer([topic], group=f"{namespace}.g", instance="i-0", callbacks=SILENT)
    assert [record.value for record in consume_count(consumer, 1)] == [b"c"]
    consume_until(consumer, lambda _: consumer.assignment() == [partition])
    with pytest.raises(BusError):
        admin.set_group_offsets(f"{namespace}.g", {partition: 0})
    consumer.close()
    admin.close()
