"""What the log says about progress: read without a group, bounded, and without disturbing anybody."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from clawstream.bus.fold import LatestByKey, LogReader
from clawstream.bus.interface import Admin, Bus, Record, TopicPartition
from clawstream.bus.ranges import OffsetRange, present_ranges
from clawstream.codec import decode_as
from clawstream.stages import TRAINER, WORKER_STAGES, Stage
from clawstream.status.snapshot import EngineVersion, LogSnapshot, StageLag, Step
from clawstream.topics import (
    SAMPLES,
    TRAIN_STEPS,
    WEIGHTS_APPLIED,
    full_name,
    topic_definitions,
)
from clawstream.weights.on_log import read_weights
from schemas.events.train_step import GuardAction, TrainStepEvent
from schemas.events.weights import WeightsAppliedEvent

_STEPS_READ = 200
_STEPS_SHOWN = 5
_HEARTBEATS_READ = 2000
"""Heartbeats come every few seconds for every engine: the newest of each is among these."""
_LAG_RECORDS_READ = 2000
_WAIT_SECONDS = 0.1


class _Enough(Exception):  # noqa: N818 - ends a bounded read; never leaves this module
    """The bound of a read was reached."""


def read_log(bus: Bus, namespace: str, policy: str, now: datetime) -> LogSnapshot:
    """Raises BrokerUnavailable, and BusError naming a topic that does not exist."""
    admin = bus.admin()
    try:
        definitions = topic_definitions()
        partitions = {topic: admin.partitions(full_name(namespace, topic)) for topic in definitions}
        ranges = present_ranges(bus, [partition for group in partitions.values() for partition in group])
        steps = [
            decode_as(record, TrainStepEvent)
            for record in _read_last(bus, full_name(namespace, TRAIN_STEPS), ranges, _STEPS_READ)
        ]
        steps = [step for step in steps if step.policy == policy]
        lags = _worker_lags(bus, admin, namespace, partitions, ranges, now)
        lags.append(_trainer_lag(bus, partitions[SAMPLES], ranges, steps, now))
        weights = read_weights(bus, namespace, policy)
        rollback = weights.pointer.rollback
        return LogSnapshot(
            offsets={
                topic: sum(ranges[partition][1] - ranges[partition][0] for partition in group)
                for topic, group in partitions.items()
            },
            lags=lags,
            pointer_version=weights.pointer.version,
            newest_version=max(weights.versions, default=None),
            rollback_reason=None if rollback is None else rollback.reason,
            engines=_engines(bus, full_name(namespace, WEIGHTS_APPLIED), ranges, policy, now),
            steps=[_short(step) for step in steps[-_STEPS_SHOWN:]],
            drops=dict(Counter(drop.reason.value for step in steps for drop in step.drops)),
            steps_read=len(steps),
            guard_actions=dict(Counter(f"{act.guard}: {act.action}" for step in steps for act in step.guards)),
        )
    finally:
        admin.close()


Ranges = Mapping[TopicPartition, OffsetRange]


def _read_last(bus: Bus, topic: str, ranges: Ranges, count: int) -> list[Record]:
    """At most the last `count` offsets of each partition of a topic."""
    start = {
        partition: max(first, end - count) for partition, (first, end) in ranges.items() if partition.topic == topic
    }
    return _read(bus, topic, start, limit=None)[0]


def _read(bus: Bus, topic: str, start: Mapping[TopicPartition, int], *, limit: int | None) -> tuple[list[Record], bool]:
    """Records from `start` to the present end, and whether `limit` ended the reading."""
    records: list[Record] = []

    def take(record: Record) -> None:
        records.append(record)
        if limit is not None and len(records) >= limit:
            raise _Enough

    reader = LogReader(bus, [topic], start=start)
    try:
        reader.bootstrap(take)
    except _Enough:
        return records, True
    finally:
        reader.close()
    return records, False


def _worker_lags(
    bus: Bus,
    admin: Admin,
    namespace: str,
    partitions: Mapping[str, list[TopicPartition]],
    ranges: Ranges,
    now: datetime,
) -> list[StageLag]:
    lags: list[StageLag] = []
    for stage in WORKER_STAGES:
        committed = admin.group_offsets(full_name(namespace, stage.name))
        lags.append(_lag(bus, stage, partitions[stage.input_topic], committed, ranges, now))
    return lags


def _trainer_lag(
    bus: Bus, partitions: list[TopicPartition], ranges: Ranges, steps: list[TrainStepEvent], now: datetime
) -> StageLag:
    """The trainer's offsets live in its checkpoint; its last step says them too."""
    offsets = steps[-1].next_offsets if steps else {}
    committed = {
        partition: offsets[str(partition.partition)] for partition in partitions if str(partition.partition) in offsets
    }
    return _lag(bus, TRAINER, partitions, committed, ranges, now)


def _lag(
    bus: Bus,
    stage: Stage,
    partitions: list[TopicPartition],
    committed: Mapping[TopicPartition, int],
    ranges: Ranges,
    now: datetime,
) -> StageLag:
    """Records between the committed offsets and the last stable offsets.

    Subtracting offsets would count the control records of transactions: a stage that has resolved everything would
    never show 0. So the records themselves are read, up to a bound.
    """
    start: dict[TopicPartition, int] = {}
    for partition in partitions:
        first, end = ranges[partition]
        start[partition] = min(max(committed.get(partition, first), first), end)
    records: list[Record] = []
    was_cut = False
    if any(start[partition] < ranges[partition][1] for partition in partitions):
        records, was_cut = _read(bus, partitions[0].topic, start, limit=_LAG_RECORDS_READ)
    # What was cut off may be older: partitions are read one after the other.
    firsts = _first_of_each(bus, start, ranges) if was_cut else records
    oldest = min((record.timestamp_milliseconds for record in firsts), default=None)
    return StageLag(
        stage=stage.name,
        topic=stage.input_topic,
        records=len(records),
        is_lower_bound=was_cut,
        oldest_seconds=None if oldest is None else max(0.0, now.timestamp() - oldest / 1000),
    )


def _first_of_each(bus: Bus, start: Mapping[TopicPartition, int], ranges: Ranges) -> list[Record]:
    """The first record at or after each start that is there by now."""
    found: list[Record] = []
    consumer = bus.reader()
    try:
        for partition, offset in start.items():
            end = ranges[partition][1]
            if offset >= end:
                continue
            consumer.assign({partition: offset})
            records: list[Record] = []
            while not records and (consumer.position(partition) or offset) < end:
                records = consumer.consume(1, _WAIT_SECONDS)
            found += records
    finally:
        consumer.close()
    return found


def _engines(bus: Bus, topic: str, ranges: Ranges, policy: str, now: datetime) -> list[EngineVersion]:
    fold = LatestByKey[WeightsAppliedEvent](lambda record: decode_as(record, WeightsAppliedEvent))
    for record in _read_last(bus, topic, ranges, _HEARTBEATS_READ):
        fold.apply(record)
    events = [event for event in fold.values().values() if event.policy == policy]
    return [
        EngineVersion(
            engine=event.engine,
            state=event.state,
            weight_version=event.weight_version,
            target_version=event.target_version,
            is_expired=event.expires_at < now,
            error=event.error,
        )
        for event in sorted(events, key=lambda event: event.engine)
    ]


def told(action: GuardAction) -> str:
    """What a guard found and did, in words."""
    words = f"{action.guard}: {action.action}"
    if action.value is not None and action.limit is not None:
        side = "below" if action.value < action.limit else "above"
        words += f", {action.measurement} {action.value:.3g} {side} {action.limit:.3g}"
    if action.samples:
        words += f", {action.samples} samples"
    if action.knob:
        words += f", {action.knob} {action.before:.3g} -> {action.after:.3g}"
    return words


def _short(event: TrainStepEvent) -> Step:
    rewards = [sample.reward for sample in event.samples if sample.reward is not None]
    ages = [sample.age for sample in event.samples]
    return Step(
        step=event.step,
        base_version=event.base_version,
        weight_version=event.weight_version,
        unchanged_reason=event.unchanged_reason,
        closed_by=event.closed_by,
        samples=len(event.samples),
        drops=dict(Counter(drop.reason.value for drop in event.drops)),
        guards=[told(action) for action in event.guards],
        knobs=event.knobs,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        mean_age=sum(ages) / len(ages) if ages else None,
        seconds=(event.finished_at - event.started_at).total_seconds(),
        finished_at=event.finished_at,
    )
