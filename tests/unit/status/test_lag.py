"""The age of the oldest unresolved record, also when there are too many to read."""

from datetime import UTC, datetime, timedelta

from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.status.log_reading import read_log
from clawstream.topics import NEXT_STATES, full_name, topic_definitions
from clawstream.topics_admin import apply_topics

START = datetime(2026, 3, 1, tzinfo=UTC)


def test_the_oldest_unresolved_record_is_found_behind_more_than_are_counted() -> None:
    clock = ManualClock(START)
    bus = MemoryBus(clock=clock)
    admin = bus.admin()
    apply_topics(admin, "clawstream", 1, topic_definitions().values())
    producer = bus.producer()
    topic = full_name("clawstream", NEXT_STATES)
    for number in range(2600):
        # Partition 11 has the oldest record and comes last; partition 0 alone has more than are read.
        partition = 11 if number == 0 else 0
        producer.produce(OutgoingRecord(topic, b"session", b"{}", partition=partition))
        if number == 0:
            clock.advance(600)
    producer.flush(10)
    judge = read_log(bus, "clawstream", "default", START + timedelta(seconds=1000)).lags[0]
    assert judge.is_lower_bound
    assert judge.oldest_seconds == 1000.0
