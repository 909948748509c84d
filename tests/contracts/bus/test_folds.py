"""LogReader, LatestByKey and RecordFetcher on both buses."""

from dataclasses import dataclass

import pytest

from clawstream.bus.fold import LatestByKey, LogReader, latest_by_key
from clawstream.bus.interface import Bus, Consumer, OutgoingRecord, Record, TopicPartition
from clawstream.bus.memory import MemoryBus
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.errors import FatalBusError, OffsetNotRetained
from tests.fixtures.buses import PATIENCE_ROUNDS, create_topic, read_all, write, write_each


@dataclass(frozen=True)
class Reference:
    topic: str
    partition: int
    offset: int


@pytest.mark.parametrize("follows", [False, True])
def test_bootstrap_returns_at_the_end_and_poll_follows(bus: Bus, wide_topic: str, topic: str, follows: bool) -> None:
    write_each(bus, wide_topic, {partition: [b"%d" % partition] for partition in range(12)})
    reader = LogReader(bus, [wide_topic, topic], follows=follows)
    records: list[Record] = []
    assert reader.bootstrap(records.append) == 12
    write(bus, topic, b"new")
    for _ in range(PATIENCE_ROUNDS):
        records += reader.poll(0.1)
        if len(records) == 13:
            break
    assert records[-1].value == b"new"
    assert reader.positions()[TopicPartition(topic, 0)] == 1
    assert len(reader.partitions) == 13
    reader.close()


@pytest.mark.parametrize("follows", [False, True])
def test_bootstrap_ends_behind_an_aborted_tail_and_on_an_empty_topic(
    bus: Bus, topic: str, namespace: str, follows: bool
) -> None:
    reader = LogReader(bus, [topic], follows=follows)
    assert reader.bootstrap(lambda record: None) == 0
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"k", b"aborted"))
    producer.flush(30)
    producer.abort()
    assert read_all(bus, topic) == []
    assert reader.bootstrap(lambda record: None) == 0
    assert reader.positions() == {TopicPartition(topic, 0): 2}
    reader.close()
    producer.close()


def test_a_reader_starts_at_given_offsets(bus: Bus, wide_topic: str) -> None:
    write_each(bus, wide_topic, {each: [b"old", b"new"] for each in (0, 1)})
    reader = LogReader(bus, [wide_topic], start={TopicPartition(wide_topic, 0): 1, TopicPartition(wide_topic, 1): 2})
    records: list[Record] = []
    reader.bootstrap(records.append)
    assert [(record.partition, record.value) for record in records] == [(0, b"new")]
    reader.close()


def test_the_latest_of_each_key_counts_and_a_tombstone_removes(bus: Bus, topic: str) -> None:
    producer = bus.producer()
    for key, value in [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"c", None)]:
        producer.produce(OutgoingRecord(topic, key, value, partition=0))
    producer.flush(30)
    reader = LogReader(bus, [topic])
    fold = LatestByKey(lambda record: (record.value or b"").decode())
    records: list[Record] = []
    reader.bootstrap(records.append)
    for record in records:
        fold.apply(record)
    assert dict(fold.values()) == {b"a": "2"}
    assert fold.get("a") == "2"
    assert fold.get("b") is None
    assert {key: record.offset for key, record in latest_by_key(records).items()} == {b"a": 2}
    reader.close()
    producer.close()


def test_records_are_fetched_in_any_order(bus: Bus, wide_topic: str) -> None:
    write_each(bus, wide_topic, {each: [b"%d/%d" % (each, offset) for offset in range(40)] for each in (0, 5)})
    fetcher = RecordFetcher(bus)
    wanted = [(0, 3), (0, 39), (5, 20), (0, 0), (5, 19), (5, 20), (0, 17)]
    futures = [fetcher.fetch(Reference(wide_topic, partition, offset)) for partition, offset in wanted]
    assert [future.result(60).value for future in futures] == [b"%d/%d" % each for each in wanted]
    fetcher.close()


def test_a_cache_that_holds_nothing_costs_seeks_and_no_answers(bus: Bus, topic: str) -> None:
    write(bus, topic, *(b"%d" % offset for offset in range(20)))
    fetcher = RecordFetcher(bus, cache_bytes=1)
    for offset in (10, 3, 19, 0, 19):
        assert fetcher.fetch(Reference(topic, 0, offset)).result(60).value == b"%d" % offset
    fetcher.close()


def test_what_is_not_there_is_refused_with_the_reason(bus: Bus, topic: str, namespace: str) -> None:
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.produce(OutgoingRecord(topic, b"k", b"aborted"))
    producer.flush(30)
    producer.abort()
    assert read_all(bus, topic) == []
    write(bus, topic, b"there")
    fetcher = RecordFetcher(bus)
    aborted, beyond = fetcher.fetch(Reference(topic, 0, 0)), fetcher.fetch(Reference(topic, 0, 3))
    assert fetcher.fetch(Reference(topic, 0, 2)).result(60).value == b"there"
    with pytest.raises(OffsetNotRetained, match=r"@0: there is no such record: .*never committed"):
        aborted.result(60)
    with pytest.raises(OffsetNotRetained, match=r"@3: there is no such record: it is beyond the end"):
        beyond.result(60)
    fetcher.close()


def test_a_record_beyond_the_end_can_be_fetched_once_it_is_there(bus: Bus, topic: str) -> None:
    write(bus, topic, b"0")
    fetcher = RecordFetcher(bus)
    assert fetcher.fetch(Reference(topic, 0, 0)).result(60).value == b"0"
    write(bus, topic, b"1")
    assert fetcher.fetch(Reference(topic, 0, 1)).result(60).value == b"1"
    fetcher.close()


def test_a_closed_fetcher_fails_who_waits_and_refuses_who_comes(bus: Bus, namespace: str) -> None:
    name = create_topic(bus, f"{namespace}.closed.v1")
    write(bus, name, b"0")
    fetcher = RecordFetcher(bus)
    fetcher.close()
    with pytest.raises(Exception, match="closed"):
        fetcher.fetch(Reference(name, 0, 0))


def test_a_reference_to_nowhere_is_refused_and_others_are_served(bus: Bus, topic: str) -> None:
    write(bus, topic, b"0")
    fetcher = RecordFetcher(bus)
    nowhere = [fetcher.fetch(Reference(topic, 77, 0)), fetcher.fetch(Reference(f"{topic}-nobody-made", 0, 0))]
    for future in nowhere:
        with pytest.raises(OffsetNotRetained):
            future.result(60)
    assert fetcher.fetch(Reference(topic, 0, 0)).result(60).value == b"0"
    fetcher.close()


def test_a_fetcher_that_breaks_says_that_the_process_must_end() -> None:
    class BrokenBus(MemoryBus):
        def reader(self) -> Consumer:
            raise ZeroDivisionError("a bug")

    fetcher = RecordFetcher(BrokenBus())
    with pytest.raises(FatalBusError, match="ZeroDivisionError: a bug"):
        fetcher.fetch(Reference("topic", 0, 0)).result(60)
    fetcher.close()
    with pytest.raises(FatalBusError, match="a bug"):
        fetcher.fetch(Reference("topic", 0, 0))
