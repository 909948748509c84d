"""What every bus promises about records, positions and topics."""

import random

import pytest
from kafka.partitioner.default import murmur2 as reference_murmur2

from clawstream.bus.interface import (
    BEGINNING,
    Bus,
    Delivery,
    OutgoingRecord,
    Producer,
    Record,
    TopicPartition,
    TopicSpecification,
)
from clawstream.errors import BusError, OffsetNotRetained, RecordRejected, TopicDefinitionError
from tests.fixtures.buses import consume_count, consume_until, create_topic, read_all, write


def test_a_record_comes_back_as_it_was_written(bus: Bus, topic: str) -> None:
    headers = (("ce_type", b"x"), ("repeated", b"1"), ("repeated", b"2"), ("empty", b""))
    deliveries: list[Delivery] = []
    producer = bus.producer()
    producer.produce(OutgoingRecord(topic, b"k", b"\x00value", headers), deliveries.append)
    producer.produce(OutgoingRecord(topic, b"k", None), deliveries.append)
    producer.flush(30)

    first, tombstone = read_all(bus, topic)

    assert (first.key, first.value, first.headers) == (b"k", b"\x00value", headers)
    assert first.timestamp_milliseconds > 1_600_000_000_000
    assert tombstone.value is None
    assert [(each.partition, each.offset) for each in deliveries] == [(0, first.offset), (0, tombstone.offset)]
    producer.close()


def test_delivery_is_reported_only_by_poll_or_flush(bus: Bus, topic: str) -> None:
    deliveries: list[Delivery] = []
    producer = bus.producer()
    producer.produce(OutgoingRecord(topic, b"k", b"1"), deliveries.append)
    producer.flush(30)
    assert len(deliveries) == 1
    producer.close()


def test_keys_go_to_the_partition_that_kafka_python_would_choose(bus: Bus, wide_topic: str) -> None:
    keys = [f"session-{number}".encode() for number in range(60)] + ["ключ".encode(), b"", b"a"]
    producer = bus.producer()
    deliveries: list[Delivery] = []
    for key in keys:
        producer.produce(OutgoingRecord(wide_topic, key, b"v"), deliveries.append)
    producer.flush(30)
    found = {each.record.key: each.partition for each in deliveries}
    # librdkafka's murmur2_random treats an empty key as none.
    expected = {key: (reference_murmur2(key) & 0x7FFFFFFF) % 12 for key in keys if key}
    assert {key: found[key] for key in expected} == expected
    producer.close()


def test_an_explicit_partition_wins_over_the_key(bus: Bus, wide_topic: str) -> None:
    write(bus, wide_topic, b"v", key=b"session-1", partition=7)
    assert [record.partition for record in read_all(bus, wide_topic)] == [7]


def test_a_transactional_producer_partitions_alike(bus: Bus, wide_topic: str, namespace: str) -> None:
    keys = [f"session-{number}".encode() for number in range(24)]
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    for key in keys:
        producer.produce(OutgoingRecord(wide_topic, key, b"v"))
    producer.commit()
    found = {record.key: record.partition for record in read_all(bus, wide_topic)}
    assert found == {key: (reference_murmur2(key) & 0x7FFFFFFF) % 12 for key in keys}
    producer.close()


def test_a_reader_starts_where_it_is_told_and_seeks_both_ways(bus: Bus, topic: str) -> None:
    write(bus, topic, *(b"%d" % number for number in range(10)))
    partition = TopicPartition(topic, 0)
    reader = bus.reader()
    reader.assign({partition: 4})
    assert [record.value for record in consume_count(reader, 6)] == [b"4", b"5", b"6", b"7", b"8", b"9"]
    assert reader.position(partition) == 10
    reader.seek(partition, 8)
    assert [record.value for record in consume_count(reader, 2)] == [b"8", b"9"]
    reader.seek(partition, BEGINNING)
    assert [record.offset for record in consume_count(reader, 10)] == list(range(10))
    assert reader.assignment() == [partition]
    reader.close()
    reader.close()


@pytest.mark.timeout(300)
def test_consume_returns_with_the_first_record_and_does_not_wait_for_more(bus: Bus, topic: str) -> None:
    write(bus, topic, b"only")
    reader = bus.reader()
    reader.assign({TopicPartition(topic, 0): 0})
    records: list[Record] = []
    while not records:  # It may also return early with nothing.
        records = reader.consume(100, 3600.0)
    assert [record.value for record in records] == [b"only"]
    reader.close()


def test_what_was_read_ahead_before_a_seek_is_not_delivered(bus: Bus, topic: str) -> None:
    write(bus, topic, *(b"%d" % number for number in range(50)))
    partition = TopicPartition(topic, 0)
    reader = bus.reader()
    reader.assign({partition: 0})
    first = consume_until(reader, lambda records: len(records) >= 1)
    reader.seek(partition, 40)
    assert [record.offset for record in consume_count(reader, 10)] == list(range(40, 50))
    assert first[0].offset == 0
    reader.close()


@pytest.mark.parametrize("offset", [11, 5000])
def test_a_position_beyond_the_end_is_an_error_not_a_jump(bus: Bus, topic: str, offset: int) -> None:
    write(bus, topic, *(b"%d" % number for number in range(10)))
    reader = bus.reader()
    reader.assign({TopicPartition(topic, 0): offset})
    with pytest.raises(OffsetNotRetained, match=f"@{offset}: not on the log, which holds 0 to 10") as caught:
        consume_count(reader, 1)
    assert (caught.value.offset, caught.value.first, caught.value.end) == (offset, 0, 10)
    reader.close()


def test_an_offset_is_found_by_time(bus: Bus, topic: str) -> None:
    partition = TopicPartition(topic, 0)
    write(bus, topic, b"0", b"1")
    times = [record.timestamp_milliseconds for record in read_all(bus, topic)]
    reader = bus.reader()
    assert reader.offset_for_time(partition, times[0] - 1000) == 0
    assert reader.offset_for_time(partition, times[1] + 1000) == 2
    assert reader.offset_for_time(partition, times[1]) == times.index(times[1])
    with pytest.raises(BusError):
        reader.offset_for_time(TopicPartition(topic, 7), 0)
    reader.close()


def test_a_paused_partition_delivers_nothing_until_resumed(bus: Bus, wide_topic: str) -> None:
    paused, other = TopicPartition(wide_topic, 0), TopicPartition(wide_topic, 1)
    write(bus, wide_topic, b"a", b"b", partition=0)
    reader = bus.reader()
    reader.assign({paused: 0, other: 0})
    reader.pause([paused])
    write(bus, wide_topic, b"c", partition=1)
    assert [record.value for record in consume_count(reader, 1)] == [b"c"]
    assert reader.consume(10, 0.3) == []
    reader.resume([paused])
    assert [record.value for record in consume_count(reader, 2)] == [b"a", b"b"]
    reader.close()


def test_an_assignment_undoes_a_pause_and_a_seek_does_not(bus: Bus, topic: str) -> None:
    partition = TopicPartition(topic, 0)
    write(bus, topic, b"a", b"b")
    reader = bus.reader()
    for _ in range(3):  # Nothing may be left over from the time before.
        reader.assign({partition: 0})
        assert [record.value for record in consume_count(reader, 2)] == [b"a", b"b"]
        reader.pause([partition])
        reader.seek(partition, 1)
        assert reader.consume(10, 0.2) == []
        reader.resume([partition])
        assert [record.value for record in consume_count(reader, 1)] == [b"b"]
        reader.pause([partition])
    reader.close()


def test_too_large_a_record_is_refused_by_name(bus: Bus, namespace: str) -> None:
    small = create_topic(bus, f"{namespace}.small.v1", max_message_bytes="2000")
    record = OutgoingRecord(small, b"big", random.Random(1).randbytes(10_000))
    producer = bus.producer()
    with pytest.raises(RecordRejected, match=r"1000[03] bytes") as caught:
        _write_and_flush(producer, record)
    assert caught.value.record is record
    producer.produce(OutgoingRecord(small, b"small", b"fits"))
    producer.flush(30)
    assert [found.key for found in read_all(bus, small)] == [b"small"]
    producer.close()


def test_topics_are_described_changed_and_created_once(bus: Bus, namespace: str) -> None:
    name = f"{namespace}.made.v1"
    admin = bus.admin()
    admin.create_topics([TopicSpecification(name, 3, {"cleanup.policy": "compact"})])
    admin.alter_topic_config(name, {"segment.ms": "7000"})

    description = admin.describe_topics([name, f"{namespace}.absent.v1"])

    assert list(description) == [name]
    assert description[name].partitions == 3
    assert description[name].config["cleanup.policy"] == "compact"
    assert description[name].config["segment.ms"] == "7000"
    assert admin.partitions(name) == [TopicPartition(name, number) for number in range(3)]
    with pytest.raises(TopicDefinitionError, match="exists"):
        admin.create_topics([TopicSpecification(name, 3)])
    with pytest.raises(BusError, match="does not exist"):
        admin.partitions(f"{namespace}.absent.v1")
    admin.close()


def _write_and_flush(producer: Producer, record: OutgoingRecord) -> None:
    producer.produce(record)
    producer.flush(30)


def test_the_offset_of_a_time_is_that_of_the_first_record_so_old_or_younger(bus: Bus, topic: str) -> None:
    partition = TopicPartition(topic, 0)
    reader = bus.reader()
    assert reader.offset_for_time(partition, 0) == 0, "the end of an empty partition"
    write(bus, topic, b"first", b"second")
    first, second = read_all(bus, topic)
    assert reader.offset_for_time(partition, 0) == 0
    assert reader.offset_for_time(partition, -1) == 0
    assert reader.offset_for_time(partition, first.timestamp_milliseconds) == 0
    assert reader.offset_for_time(partition, second.timestamp_milliseconds + 1) == 2
    reader.close()


def test_the_offset_of_a_time_in_a_partition_that_does_not_exist_is_an_error(bus: Bus, topic: str) -> None:
    reader = bus.reader()
    with pytest.raises(BusError):
        reader.offset_for_time(TopicPartition(topic, 99), 0)
    reader.close()
