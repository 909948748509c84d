"""What `status` reads from a real log: versions, steps, and lag that transactions' control records do not distort."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from clawstream.bus.interface import OutgoingRecord, RebalanceCallbacks, TopicPartition
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.codec import encode
from clawstream.errors import BusError
from clawstream.settings import KafkaSettings
from clawstream.status.log_reading import read_log
from clawstream.topics import (
    NEXT_STATES,
    SAMPLES,
    TRAIN_STEPS,
    WEIGHTS,
    WEIGHTS_APPLIED,
    full_name,
    topic_definitions,
)
from clawstream.topics_admin import apply_topics, wait_until_readable
from schemas.events import Event
from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DroppedSample, DropReason, TrainedSample, TrainStepEvent
from schemas.events.weights import EngineState, WeightPointerEvent, WeightsAppliedEvent, WeightVersionEvent

pytestmark = pytest.mark.kafka
NOW = datetime.now(UTC)


@pytest.fixture
def bus(broker: str) -> KafkaBus:
    return KafkaBus(KafkaSettings(bootstrap_servers=broker), client_id="status-test")


@pytest.fixture
def topics(bus: KafkaBus, namespace: str) -> Iterator[str]:
    """The namespace, with all topics."""
    admin = bus.admin()
    apply_topics(admin, namespace, 1, topic_definitions().values())
    wait_until_readable(bus, namespace, topic_definitions().values(), SystemClock(), timeout_seconds=60)
    yield namespace
    admin.close()


def write(bus: KafkaBus, topic: str, *events: tuple[str, Event]) -> None:
    producer = bus.producer()
    for key, event in events:
        producer.produce(encode(event, topic=topic, key=key, event_id=key, source="test"))
    producer.flush(30)
    producer.close()


def write_transaction(bus: KafkaBus, topic: str, partition: int, count: int) -> None:
    producer = bus.transactional_producer(f"{topic}-writer")
    producer.begin()
    for number in range(count):
        producer.produce(OutgoingRecord(topic, f"{number}".encode(), b"{}", partition=partition))
    producer.commit()
    producer.close()


def commit(bus: KafkaBus, group: str, topic: str, offsets: dict[TopicPartition, int]) -> None:
    """As a worker does: in a transaction, as a member of the group."""
    callbacks = RebalanceCallbacks(lambda _: None, lambda _: None, lambda _: None)
    consumer = bus.group_consumer([topic], group=group, instance="one", callbacks=callbacks)
    while not consumer.assignment():
        consumer.consume(1, 0.1)
    producer = bus.transactional_producer(f"{group}-one")
    producer.begin()
    producer.send_offsets(offsets, consumer.group_metadata())
    producer.commit()
    producer.close()
    consumer.close()


def test_without_topics_the_error_says_what_to_do(bus: KafkaBus, namespace: str) -> None:
    with pytest.raises(BusError, match="clawstream topics apply"):
        read_log(bus, namespace, "default", NOW)


def test_an_empty_log(bus: KafkaBus, topics: str) -> None:
    found = read_log(bus, topics, "default", NOW)
    assert set(found.offsets) == set(topic_definitions())
    assert not any(found.offsets.values())
    assert [(lag.stage, lag.records, lag.oldest_seconds) for lag in found.lags] == [
        ("judge", 0, None),
        ("teacher", 0, None),
        ("trainer", 0, None),
    ]
    assert found.pointer_version is None
    assert found.steps == []


def test_lag_counts_records_and_not_control_records(bus: KafkaBus, topics: str) -> None:
    topic = full_name(topics, NEXT_STATES)
    write_transaction(bus, topic, 3, 4)
    write_transaction(bus, topic, 5, 1)
    # Both moments lie after the records, whatever the time is now: their difference is exact.
    moment = datetime.now(UTC) + timedelta(hours=1)
    judge = read_log(bus, topics, "default", moment).lags[0]
    assert judge.records == 5, "nothing was committed yet"
    later = read_log(bus, topics, "default", moment + timedelta(hours=1)).lags[0]
    assert judge.oldest_seconds is not None
    assert later.oldest_seconds == pytest.approx(judge.oldest_seconds + 3600)
    commit(bus, full_name(topics, "judge"), topic, {TopicPartition(topic, 3): 3, TopicPartition(topic, 5): 1})
    assert read_log(bus, topics, "default", NOW).lags[0].records == 1
    commit(bus, full_name(topics, "judge"), topic, {TopicPartition(topic, 3): 4})
    judge = read_log(bus, topics, "default", NOW).lags[0]
    assert (judge.records, judge.oldest_seconds) == (0, None), "a commit marker was taken for a record"


def test_versions_engines_and_steps(bus: KafkaBus, topics: str) -> None:
    revision = SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=0)
    where = RecordReference(topic=full_name(topics, SAMPLES), partition=2, offset=1)
    for number in (0, 1):
        version = WeightVersionEvent(
            policy="default",
            weight_version=number,
            base_version=None,
            lineage="run",
            artefact_uri="file:///weights",
            manifest_sha256="0" * 64,
            published_at=NOW,
        )
        write(bus, full_name(topics, WEIGHTS), (f"default/{number}", version))
    pointer = WeightPointerEvent(policy="default", weight_version=1, pointed_at=NOW)
    write(bus, full_name(topics, WEIGHTS), ("default", pointer))
    beat = WeightsAppliedEvent(
        policy="default",
        engine="engine-1",
        state=EngineState.READY,
        weight_version=1,
        gate_owner="gateway-1",
        observed_at=NOW,
        expires_at=NOW + timedelta(minutes=1),
    )
    other = beat.model_copy(update={"engine": "engine-2", "weight_version": 0, "expires_at": NOW - timedelta(1)})
    write(bus, full_name(topics, WEIGHTS_APPLIED), ("engine-1", beat), ("engine-2", other))
    samples = full_name(topics, SAMPLES)
    write_transaction(bus, samples, 2, 3)
    step = TrainStepEvent(
        train_step_id="s",
        lineage="run",
        policy="default",
        step=1,
        base_version=0,
        weight_version=1,
        closed_by="count",
        samples=[
            TrainedSample(sample_id="a", turn_id="a", revision=revision, ref=where, age=1, reward=r, response_tokens=3)
            for r in (1.0, 0.0)
        ],
        drops=[DroppedSample(sample_id="b", turn_id="b", ref=where, reason=DropReason.TOO_OLD)],
        next_offsets={"2": 2},
        started_at=NOW,
        finished_at=NOW + timedelta(seconds=4),
    )
    write(bus, full_name(topics, TRAIN_STEPS), ("default", step))
    found = read_log(bus, topics, "default", NOW)
    assert (found.pointer_version, found.newest_version) == (1, 1)
    assert [(e.engine, e.weight_version, e.is_expired) for e in found.engines] == [
        ("engine-1", 1, False),
        ("engine-2", 0, True),
    ]
    assert [(s.step, s.samples, s.mean_reward, s.mean_age, s.seconds) for s in found.steps] == [(1, 2, 0.5, 1.0, 4.0)]
    assert found.drops == {"too_old": 1}
    assert found.lags[2].records == 1, "the trainer's offsets are those of its last step"
    assert read_log(bus, topics, "another", NOW).steps == []
