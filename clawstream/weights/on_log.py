"""What the log says of a policy's weights: versions, the pointer, and what people may put on it."""

from dataclasses import dataclass
from datetime import datetime

from clawstream import ids
from clawstream.bus.fold import LatestByKey, LogReader
from clawstream.bus.interface import Bus, OutgoingRecord, Record
from clawstream.codec import decode, decode_as, encode
from clawstream.errors import WeightsError
from clawstream.topics import WEIGHTS, WEIGHTS_APPLIED, full_name
from clawstream.weights.pointer import PointerFold, rollback_key
from schemas.events import WeightPointerEvent, WeightsAppliedEvent, WeightVersionEvent

_FLUSH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WeightsOnLog:
    """As of one moment."""

    versions: dict[int, WeightVersionEvent]
    """Published and not removed, by number, ascending."""
    pointer: PointerFold
    """Which one should be in service."""


def read_weights(bus: Bus, namespace: str, policy: str) -> WeightsOnLog:
    """Reads `weights` to its end. Raises BusError and DecodeError."""
    pointer = PointerFold(policy)
    versions: dict[int, WeightVersionEvent] = {}

    def apply(record: Record) -> None:
        key = (record.key or b"").decode(errors="replace")
        event = decode(record) if record.value is not None else None
        pointer.apply(key, event)
        if isinstance(event, WeightVersionEvent) and event.policy == policy:
            versions[event.weight_version] = event
        owner, _, number = key.rpartition("/")
        if event is None and owner == policy and number.isdecimal():
            versions.pop(int(number), None)

    reader = LogReader(bus, [full_name(namespace, WEIGHTS)])
    try:
        reader.bootstrap(apply)
    finally:
        reader.close()
    return WeightsOnLog(dict(sorted(versions.items())), pointer)


def read_heartbeats(bus: Bus, namespace: str, policy: str) -> list[WeightsAppliedEvent]:
    """The newest heartbeat of every engine, by name; expired ones too. Raises BusError and DecodeError."""
    fold = LatestByKey[WeightsAppliedEvent](lambda record: decode_as(record, WeightsAppliedEvent))
    reader = LogReader(bus, [full_name(namespace, WEIGHTS_APPLIED)])
    try:
        reader.bootstrap(fold.apply)
    finally:
        reader.close()
    return sorted((beat for beat in fold.values().values() if beat.policy == policy), key=lambda beat: beat.engine)


def roll_back(
    bus: Bus, namespace: str, policy: str, weight_version: int, *, reason: str, now: datetime
) -> WeightPointerEvent:
    """Puts a rollback on the log: `weight_version` is served, and held, until it is released.

    Raises WeightsError when there is no such version, or its files are gone; BusError unless it is on the log.
    """
    found = read_weights(bus, namespace, policy)
    if weight_version not in found.versions:
        present = ", ".join(map(str, found.versions)) or "none"
        raise WeightsError(
            f"version {weight_version} of {policy} is not on the log: it was never published, or its files were "
            f"removed (trainer.weights_keep); there are: {present}"
        )
    event = WeightPointerEvent(
        policy=policy, weight_version=weight_version, rollback=True, reason=reason, pointed_at=now
    )
    record = encode(
        event,
        topic=full_name(namespace, WEIGHTS),
        key=rollback_key(policy),
        event_id=ids.derive("weight-rollback", policy, weight_version, now.isoformat()),
        source="cli",
    )
    _write(bus, record)
    return event


def release(bus: Bus, namespace: str, policy: str) -> int | None:
    """Ends a rollback: the newest trained version is served again, and its number is returned; None before any.

    Raises WeightsError when no rollback holds; BusError unless the release is on the log.
    """
    found = read_weights(bus, namespace, policy)
    if found.pointer.rollback is None:
        raise WeightsError(f"no rollback of {policy} holds: there is nothing to release")
    _write(bus, OutgoingRecord(full_name(namespace, WEIGHTS), rollback_key(policy).encode(), None))
    return found.pointer.trained_version


def _write(bus: Bus, record: OutgoingRecord) -> None:
    producer = bus.producer()
    try:
        producer.produce(record)
        producer.flush(_FLUSH_SECONDS)
    finally:
        producer.close()
