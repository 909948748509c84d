"""What every bus promises about transactions."""

import time

import pytest

from clawstream.bus.interface import (
    Bus,
    Delivery,
    OutgoingRecord,
    RebalanceCallbacks,
    TopicPartition,
    TransactionalProducer,
)
from clawstream.bus.kafka_properties import SLOW_END_OF_TRANSACTION_SECONDS
from clawstream.errors import Fenced, RecordRejected, TransactionAbortable, TransactionOutcomeUnknown
from tests.fixtures.buses import consume_count, consume_until, create_topic, read_all, write


def _ignore(_: object) -> None:
    """A rebalance that nobody cares about."""


SILENT = RebalanceCallbacks(_ignore, _ignore, _ignore)


def test_nothing_is_visible_before_the_commit_and_all_after_it(bus: Bus, wide_topic: str, namespace: str) -> None:
    partitions = {TopicPartition(wide_topic, number): 0 for number in range(12)}
    reader = bus.reader()
    reader.assign(partitions)
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    deliveries: list[Delivery] = []
    for number in range(12):
        producer.produce(OutgoingRecord(wide_topic, b"k", b"v", partition=number), deliveries.append)
    producer.flush(30)
    assert [each.offset for each in deliveries] == [0] * 12
    assert reader.consume(100, 0.5) == []
    assert reader.watermarks(TopicPartition(wide_topic, 0)) == (0, 0), "the end that counts is the last stable offset"
    admin = bus.admin()
    assert admin.high_watermarks(wide_topic) == dict.fromkeys(partitions, 1), "what is not decided counts, too"
    admin.close()
    began_seconds = time.monotonic()
    producer.commit()
    was_slow = time.monotonic() - began_seconds > SLOW_END_OF_TRANSACTION_SECONDS
    assert {record.partition for record in consume_count(reader, 12)} == set(range(12))
    assert was_slow or not producer.needs_replacement
    producer.close()
    reader.close()


def test_aborted_records_are_never_seen_and_a_position_passes_them(bus: Bus, topic: str, namespace: str) -> None:
    partition = TopicPartition(topic, 0)
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"k", b"aborted"))
    producer.flush(30)
    producer.abort()
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"k", b"committed"))
    producer.commit()

    assert [record.value for record in read_all(bus, topic)] == [b"committed"]
    reader = bus.reader()
    reader.assign({partition: 0})
    consume_count(reader, 1)
    consume_until(reader, lambda _: reader.position(partition) == 4)
    assert reader.watermarks(partition) == (0, 4), "two records and two markers"
    producer.close()
    reader.close()


def test_what_was_hardly_begun_can_be_aborted(bus: Bus, wide_topic: str, namespace: str) -> None:
    """Its partitions may be on their way to a broker that still ends the transaction before it."""
    name = f"{namespace}.t"
    producer = bus.transactional_producer(name)
    for number in range(100):
        producer.begin()
        for partition in range(12):
            producer.produce(OutgoingRecord(wide_topic, b"k", b"committed", partition=partition))
        producer.commit()
        producer.begin()
        for partition in range(5):
            producer.produce(OutgoingRecord(wide_topic, b"k", b"aborted", partition=partition))
        time.sleep(number % 10 / 1000)  # Each time a little later: one of them is the wrong moment.
        try:
            producer.abort()
        except TransactionOutcomeUnknown:
            producer.close()
            producer = bus.transactional_producer(name)
    assert [record.value for record in read_all(bus, wide_topic)] == [b"committed"] * 100 * 12
    producer.close()


def test_an_open_transaction_hides_what_others_write_after_it(bus: Bus, topic: str, namespace: str) -> None:
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"k", b"open"))
    producer.flush(30)
    write(bus, topic, b"later")
    assert read_all(bus, topic, settled=False) == []
    producer.abort()
    assert [record.value for record in read_all(bus, topic)] == [b"later"]
    producer.close()


def test_a_successor_aborts_what_its_predecessor_left_open_and_fences_it(bus: Bus, topic: str, namespace: str) -> None:
    old = bus.transactional_producer(f"{namespace}.t")
    old.begin()
    old.produce(OutgoingRecord(topic, b"k", b"left open"))
    old.flush(30)
    new = bus.transactional_producer(f"{namespace}.t")
    new.begin()
    new.produce(OutgoingRecord(topic, b"k", b"new"))
    new.commit()
    assert [record.value for record in read_all(bus, topic)] == [b"new"]
    with pytest.raises(Fenced, match=r"t: .*took over|newer producer"):
        _write_and_commit(old, OutgoingRecord(topic, b"k", b"zombie"))
    assert old.needs_replacement
    old.close()
    new.close()


def test_offsets_are_committed_with_the_records_or_not_at_all(bus: Bus, topic: str, namespace: str) -> None:
    partition = TopicPartition(topic, 0)
    write(bus, topic, b"a", b"b", b"c")
    consumer = bus.group_consumer([topic], group=f"{namespace}.g", instance="i-0", callbacks=SILENT)
    consume_count(consumer, 3)
    assert consumer.committed([partition]) == {partition: None}
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.send_offsets({partition: 2}, consumer.group_metadata())
    producer.abort()
    assert consumer.committed([partition]) == {partition: None}
    producer.begin()
    producer.send_offsets({partition: 2}, consumer.group_metadata())
    producer.commit()
    assert consumer.committed([partition]) == {partition: 2}
    admin = bus.admin()
    assert admin.group_offsets(f"{namespace}.g") == {partition: 2}
    admin.close()
    consumer.close()
    producer.close()


def test_a_record_that_is_too_large_is_named_and_the_next_producer_works(bus: Bus, topic: str, namespace: str) -> None:
    small = create_topic(bus, f"{namespace}.small.v1", max_message_bytes="2000")
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"k", b"fits"))
    rejected = OutgoingRecord(small, b"k", b"x" * 6_000_000)
    with pytest.raises(RecordRejected) as caught:
        _write_and_commit(producer, rejected)
    assert caught.value.record is rejected
    producer.abort()
    assert producer.needs_replacement
    producer.close()
    successor = bus.transactional_producer(f"{namespace}.t")
    successor.begin()
    successor.produce(OutgoingRecord(topic, b"k", b"again"))
    successor.commit()
    assert [record.value for record in read_all(bus, topic)] == [b"again"]
    successor.close()


def test_a_member_whose_place_was_taken_can_commit_nothing(bus: Bus, topic: str, namespace: str) -> None:
    partition = TopicPartition(topic, 0)
    write(bus, topic, b"a")
    old = bus.group_consumer([topic], group=f"{namespace}.g", instance="i-0", callbacks=SILENT)
    consume_count(old, 1)
    metadata = old.group_metadata()
    new = bus.group_consumer([topic], group=f"{namespace}.g", instance="i-0", callbacks=SILENT)
    consume_count(new, 1)
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    with pytest.raises((TransactionAbortable, Fenced)):
        producer.send_offsets({partition: 1}, metadata)
    assert new.committed([partition]) == {partition: None}
    producer.close()
    with pytest.raises(Fenced):
        consume_until(old, lambda _: False)
    old.close()
    new.close()


def _write_and_commit(producer: TransactionalProducer, record: OutgoingRecord) -> None:
    producer.produce(record)
    producer.commit()
