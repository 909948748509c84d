"""Makes a plan: from people's words (since, until, offsets) to offsets on the log."""

from collections.abc import Mapping
from datetime import datetime

from clawstream import ids
from clawstream.bus.interface import Bus, Consumer, TopicPartition
from clawstream.bus.ranges import OffsetRange, end_of_records, partitions_of, ranges_since, read_ranges
from clawstream.topics import NEXT_STATES, full_name
from schemas.judge_spec import JudgeSpec
from services.judge.replay.plan import ReplayPlan


def make_plan(
    bus: Bus,
    *,
    namespace: str,
    name: str,
    spec: JudgeSpec,
    baseline_epoch: int,
    now: datetime,
    since: datetime | None = None,
    until: datetime | None = None,
    offsets: Mapping[int, OffsetRange] | None = None,
) -> ReplayPlan:
    """Everything that is retained, from `since` to before `until`, or exactly these `offsets` by partition.

    Raises BusError.
    """
    reader = bus.reader()
    try:
        partitions = partitions_of(bus, full_name(namespace, NEXT_STATES))
        ranges = ranges_since(reader, partitions, None if since is None else _milliseconds(since))
        bounds: dict[int, OffsetRange] = {}
        oldest: list[int] = []
        for partition, (start, end) in ranges.items():
            if until is not None:
                end = min(end, max(start, reader.offset_for_time(partition, _milliseconds(until))))
            if offsets is not None:
                wanted = offsets.get(partition.partition, (start, start))
                end = max(start, min(end, wanted[1]))
                start = min(max(start, wanted[0]), end)
            end = end_of_records(reader, partition, (start, end))
            bounds[partition.partition] = (start, end)
            if start < end:
                oldest.append(_first_time(reader, partition, (start, end)))
    finally:
        reader.close()
    return ReplayPlan(
        name=name,
        replay_id=ids.derive("replay", name, now.isoformat(), spec.spec_hash),
        namespace=namespace,
        spec=spec,
        baseline_epoch=baseline_epoch,
        created_at=now,
        oldest_milliseconds=min(oldest, default=None),
        bounds=bounds,
    )


def _first_time(reader: Consumer, partition: TopicPartition, bounds: OffsetRange) -> int:
    """Time of the first record inside `bounds`, which hold one."""
    for record in read_ranges(reader, {partition: bounds}):
        return record.timestamp_milliseconds
    raise AssertionError(f"{partition} has no record in {bounds}, though its end was found by one")


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
