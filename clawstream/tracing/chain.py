"""Follows the chain from whatever is named: back to the turns behind it, and on to those that it helped to answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.bus.interface import Bus
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.codec import decode
from clawstream.errors import DecodeError, LineageError, OffsetNotRetained
from clawstream.tracing.archive import check_batch
from clawstream.tracing.documents import step_document, turn_document, version_document
from clawstream.tracing.history import TrainingHistory, read_training_history
from clawstream.tracing.scan import LogScan, ScanProgress, TurnRecords
from schemas.events import SampleEvent, TrainStepEvent, TurnEvent
from schemas.events.base import RecordReference

_FETCH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """What an id names."""

    kind: str
    """`turn`, `sample`, `step`, `version`, or `record` for the id of a next state or a score."""
    turn_ids: tuple[str, ...] = ()
    """Turns whose chains are followed."""
    steps: tuple[TrainStepEvent, ...] = ()
    """Steps that are named, or that made the version."""
    version: tuple[str, int] | None = None
    """Policy and number."""


_ANSWER_ID = re.compile(r"(?:chatcmpl-|resp_|msg_)([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
"""How the gateway's APIs call an answer: a prefix and the id of its turn."""


def resolve(identity: str, history: TrainingHistory, policy: str) -> Target | None:
    """What `identity` is, as far as steps and versions tell; None when only the other topics can.

    `7`, `v7` and `policy/7` are versions; `LINEAGE/step/3` is a step, like a step's id.
    """
    numbered = re.fullmatch(r"(?:([a-z][a-z0-9-]*)/|v)?(\d+)", identity)
    if numbered is not None:
        named = (numbered[1] or policy, int(numbered[2]))
        makers = tuple(history.makers(*named))
        turn_ids = tuple(sample.turn_id for step in makers for sample in step.samples)
        return Target("version", turn_ids, makers, named)
    lineage, _, number = identity.partition("/step/")
    for step in history.steps.values():
        if step.train_step_id == identity or (step.lineage == lineage and number == str(step.step)):
            return Target("step", tuple(sample.turn_id for sample in step.samples), (step,))
    if identity in history.turn_of_sample:
        return Target("sample", (history.turn_of_sample[identity],))
    if identity in history.trained or identity in history.dropped:
        return Target("turn", (identity,))
    return None


def trace(
    bus: Bus, namespace: str, identity: str, *, policy: str, limit: int, progress: ScanProgress
) -> dict[str, Any]:
    """The chain of `identity` as plain data. At most `limit` turns that a version served are named; all are counted.

    The id that a client got with an answer names its turn.

    Raises LineageError when nothing on the log has this id, and BusError.
    """
    answer = _ANSWER_ID.fullmatch(identity)
    identity = answer[1] if answer is not None else identity
    history = read_training_history(bus, namespace, progress("train-steps"))
    target = resolve(identity, history, policy)
    scan = LogScan(bus, namespace, progress)
    try:
        if target is None:
            owner = scan.find_turn_of(identity)
            if owner is None:
                raise LineageError(
                    f"{identity!r}: no turn, next state, score, sample, step or version on the log has this id; "
                    "its retention may have passed"
                )
            found = {owner.turn_id: owner}
            target = Target("turn" if owner.turn_id == identity else "record", (owner.turn_id,))
        else:
            if target.version is not None and not _is_known(target.version, history):
                raise LineageError(f"policy {target.version[0]!r} has no version {target.version[1]} on the log")
            found = {each: TurnRecords(each, history.partition_of(each)) for each in target.turn_ids}
        if found:
            _read_by_reference(bus, found, history)
            scan.read_turns(found)
            scan.read_followers(found)
        versions = _versions(target, history)
        return {
            "id": identity,
            "kind": target.kind,
            "turns": [turn_document(each, history) for each in found.values()],
            "steps": [step_document(step, check_batch(step)) for step in _steps(target, history)],
            "versions": _version_documents(scan, history, versions, limit),
        }
    finally:
        scan.close()


def _is_known(version: tuple[str, int], history: TrainingHistory) -> bool:
    return version in history.versions or version in history.removed or bool(history.makers(*version))


def _steps(target: Target, history: TrainingHistory) -> list[TrainStepEvent]:
    """Those that are named, else those that trained the turn."""
    if target.kind in ("step", "version"):
        return list(target.steps)
    return [trained.step for turn_id in target.turn_ids for trained in history.trained.get(turn_id, ())]


def _versions(target: Target, history: TrainingHistory) -> list[tuple[str, int]]:
    if target.version is not None:
        return [target.version]
    steps = _steps(target, history)
    return list(dict.fromkeys((step.policy, step.weight_version) for step in steps if step.weight_version is not None))


def _version_documents(
    scan: LogScan, history: TrainingHistory, versions: Sequence[tuple[str, int]], limit: int
) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = []
    for policy in dict.fromkeys(policy for policy, _ in versions):
        numbers = [number for each, number in versions if each == policy]
        events = [history.versions.get((policy, number)) for number in numbers]
        times = [int(event.published_at.timestamp() * 1000) for event in events if event is not None]
        since = min(times) if len(times) == len(numbers) else None
        served = scan.read_served(policy, numbers, since)
        documents += [version_document(history, policy, number, served[number], limit) for number in numbers]
    return documents


def _read_by_reference(bus: Bus, found: dict[str, TurnRecords], history: TrainingHistory) -> None:
    """Turns whose sample is still at the place that a step names: its reference leads there without a search.

    A sample that compaction removed is no loss: the turn is found by reading its partition.
    """
    fetcher = RecordFetcher(bus, timeout_seconds=_FETCH_SECONDS)

    def event_at(reference: RecordReference) -> tuple[Any, int] | None:
        try:
            record = fetcher.fetch(reference).result()
            return decode(record), record.timestamp_milliseconds
        except (OffsetNotRetained, DecodeError):
            return None

    try:
        for turn_id, each in found.items():
            references = [trained.sample.ref for trained in history.trained.get(turn_id, ())]
            references += [dropped.drop.ref for dropped in history.dropped.get(turn_id, ())]
            for reference in references:
                at = event_at(reference)
                sample = at[0] if at is not None else None
                if not isinstance(sample, SampleEvent) or sample.turn_id != turn_id:
                    continue
                at_turn = event_at(sample.turn_ref)
                if at_turn is not None and isinstance(at_turn[0], TurnEvent) and at_turn[0].turn_id == turn_id:
                    each.turn, each.since_milliseconds = at_turn
                    each.turn_ref, each.partition = sample.turn_ref, sample.turn_ref.partition
                    break
    finally:
        fetcher.close()
