"""A real broker's log cleaner: whoever bootstraps from what it left has the same state as who read everything."""

import random
from collections.abc import Iterator

import pytest

from clawstream.bus.fold import LatestByKey, LogReader
from clawstream.bus.interface import Bus, OutgoingRecord, Record
from tests.fixtures.buses import create_topic, kafka_bus, read_all
from tests.fixtures.system import wait_for

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

KEYS = [f"key-{number}".encode() for number in range(40)]
SHORT_SEGMENTS = {
    "cleanup_policy": "compact",
    "segment_ms": "100",
    "min_cleanable_dirty_ratio": "0.01",
    "max_compaction_lag_ms": "100",
    "delete_retention_ms": "0",
}


@pytest.fixture
def bus(broker: str) -> Bus:
    return kafka_bus(broker, "compaction")


def _updates(seed: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Values and tombstones of a few keys, without end."""
    generator = random.Random(seed)
    number = 0
    while True:
        number += 1
        yield generator.choice(KEYS), None if generator.random() < 0.2 else b"value %d" % number


def _fold() -> LatestByKey[bytes]:
    return LatestByKey(lambda record: record.value or b"")


def _bootstrapped(bus: Bus, topic: str) -> tuple[list[Record], dict[bytes, bytes]]:
    """What a new reader is given, and the state that it has then."""
    fold, records = _fold(), read_all(bus, topic)
    for record in records:
        fold.apply(record)
    return records, dict(fold.values())


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_bootstrap_from_a_compacted_log_equals_the_fold_over_all_of_it(
    bus: Bus, namespace: str, partitions: int
) -> None:
    topic = create_topic(bus, f"{namespace}.compacted.v1", partitions, **SHORT_SEGMENTS)
    producer = bus.transactional_producer(f"{namespace}.writer")
    updates, written = _updates(seed=partitions), 0
    followed = _fold()
    follower = LogReader(bus, [topic], follows=True)
    follower.bootstrap(followed.apply)

    def write(count: int, *, commit: bool) -> None:
        nonlocal written
        producer.begin()
        for _ in range(count):
            key, value = next(updates)
            producer.produce(OutgoingRecord(topic, key, value))
        if commit:
            producer.commit()
            written += count
        else:
            producer.abort()

    def is_compacted() -> bool:
        # The newest segment is never cleaned, and is rolled only when something is written after its time.
        write(20, commit=True)
        write(5, commit=False)
        return len(_bootstrapped(bus, topic)[0]) < written / 2

    write(400, commit=True)
    wait_for(is_compacted, "the cleaner took most records away")
    producer.close()
    left, state = _bootstrapped(bus, topic)
    follower.read_to(follower.ends(), followed.apply)
    follower.close()

    assert len(left) < written / 2
    assert state == dict(followed.values())
    assert state.keys() < set(KEYS)  # tombstones count
    offsets = [record.offset for record in left if record.partition == 0]
    assert offsets == sorted(offsets)
    assert offsets[-1] - offsets[0] >= len(offsets)  # there are holes, and no reader minded
