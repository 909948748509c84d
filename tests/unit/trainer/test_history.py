"""What a trainer reads of its own past when it starts."""

from datetime import UTC, datetime

from clawstream import topics
from clawstream.bus.memory import MemoryBus
from services.trainer.batcher import ClosedBatch
from services.trainer.events import EventRecords, train_step_event
from services.trainer.history import MAX_UNANNOUNCED_STEPS, read_history
from tests.fixtures.conversations import NAMESPACE, create_topics

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


def put_steps(bus: MemoryBus, policy: str, count: int) -> None:
    records = EventRecords(NAMESPACE, policy, "trainer")
    producer = bus.producer()
    for step in range(1, count + 1):
        event = train_step_event(
            ClosedBatch([], [], "drops"),
            [],
            lineage=policy,
            policy=policy,
            step=step,
            base_version=0,
            weight_version=None,
            unchanged_reason="no_samples",
            batch_uri="",
            batch_sha256="",
            next_offsets={},
            metrics={},
            guards=[],
            knobs={},
            started_at=MOMENT,
            finished_at=MOMENT,
        )
        producer.produce(records.train_step(event))
    producer.flush(10)
    producer.close()


def test_the_last_steps_are_found_behind_those_of_another_policy() -> None:
    bus = MemoryBus()
    create_topics(bus)
    put_steps(bus, "first", MAX_UNANNOUNCED_STEPS + 1)
    put_steps(bus, "second", 1000)
    history = read_history(
        bus,
        weights_topic=topics.full_name(NAMESPACE, topics.WEIGHTS),
        train_steps_topic=topics.full_name(NAMESPACE, topics.TRAIN_STEPS),
        policy="first",
    )
    steps = {event.step for event in history.steps.values()}
    assert steps >= set(range(2, MAX_UNANNOUNCED_STEPS + 2))
