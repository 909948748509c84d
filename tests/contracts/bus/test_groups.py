"""What every bus promises about consumer groups."""

from clawstream.bus.interface import Bus, Consumer, TopicPartition
from tests.fixtures.buses import PATIENCE_ROUNDS, Rebalances, consume_count, consume_until, write, write_each


def _settle(members: dict[str, tuple[Consumer, Rebalances]], *, shares: set[int]) -> None:
    """Polls all members until each holds a share of one of these sizes."""
    for _ in range(PATIENCE_ROUNDS):
        for consumer, _ in members.values():
            consumer.consume(100, 0.05)
        sizes = {len(rebalances.held) for _, rebalances in members.values()}
        if sizes == shares:
            return
    raise AssertionError({name: rebalances.events for name, (_, rebalances) in members.items()})


def _join(bus: Bus, topic: str, group: str, instance: str) -> tuple[Consumer, Rebalances]:
    rebalances = Rebalances()
    consumer = bus.group_consumer([topic], group=group, instance=instance, callbacks=rebalances.callbacks())
    return consumer, rebalances


def test_a_new_group_starts_at_the_earliest_record(bus: Bus, topic: str, namespace: str) -> None:
    write(bus, topic, b"before")
    consumer, rebalances = _join(bus, topic, f"{namespace}.g", "i-0")
    assert [record.value for record in consume_count(consumer, 1)] == [b"before"]
    assert rebalances.events == [("assigned", (TopicPartition(topic, 0),))]
    assert consumer.assignment() == [TopicPartition(topic, 0)]
    consumer.close()
    assert rebalances.events[-1] == ("revoked", (TopicPartition(topic, 0),))


def test_reading_goes_on_at_the_committed_offset(bus: Bus, topic: str, namespace: str) -> None:
    partition = TopicPartition(topic, 0)
    write(bus, topic, b"a", b"b", b"c")
    consumer, _ = _join(bus, topic, f"{namespace}.g", "i-0")
    consume_count(consumer, 3)
    producer = bus.transactional_producer(f"{namespace}.t")
    producer.begin()
    producer.send_offsets({partition: 1}, consumer.group_metadata())
    producer.commit()
    consumer.close()
    again, _ = _join(bus, topic, f"{namespace}.g", "i-0")
    assert [record.value for record in consume_count(again, 2)] == [b"b", b"c"]
    again.close()
    producer.close()


def test_a_second_member_gets_half_and_nothing_has_two_owners(bus: Bus, wide_topic: str, namespace: str) -> None:
    group = f"{namespace}.g"
    first = _join(bus, wide_topic, group, "i-0")
    _settle({"i-0": first}, shares={12})
    second = _join(bus, wide_topic, group, "i-1")
    _settle({"i-0": first, "i-1": second}, shares={6})
    assert not first[1].held & second[1].held
    assert [kind for kind, _ in first[1].events] == ["assigned", "revoked"], "cooperative: the rest is never revoked"
    first[0].close()
    second[0].close()


def test_a_restarted_static_member_takes_its_place_without_moving_others(
    bus: Bus, wide_topic: str, namespace: str
) -> None:
    group = f"{namespace}.g"
    first = _join(bus, wide_topic, group, "i-0")
    second = _join(bus, wide_topic, group, "i-1")
    _settle({"i-0": first, "i-1": second}, shares={6})
    held = set(second[1].held)
    events_of_first = list(first[1].events)
    second[0].close()
    restarted = _join(bus, wide_topic, group, "i-1")
    _settle({"i-0": first, "i-1": restarted}, shares={6})
    assert restarted[1].held == held
    assert first[1].events == events_of_first
    first[0].close()
    restarted[0].close()


def test_each_record_reaches_one_member(bus: Bus, wide_topic: str, namespace: str) -> None:
    group = f"{namespace}.g"
    first, second = _join(bus, wide_topic, group, "i-0"), _join(bus, wide_topic, group, "i-1")
    _settle({"i-0": first, "i-1": second}, shares={6})
    write_each(bus, wide_topic, {partition: [b"%d" % partition] for partition in range(12)})
    mine = consume_until(first[0], lambda records: len(records) == 6)
    theirs = consume_until(second[0], lambda records: len(records) == 6)
    assert sorted(int(record.value or b"") for record in mine + theirs) == list(range(12))
    first[0].close()
    second[0].close()
