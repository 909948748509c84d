"""Builds the trainer's events. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from clawstream import ids, topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.codec import encode
from schemas.events import TrainStepEvent, WeightPointerEvent, WeightVersionEvent
from schemas.events.train_step import DroppedSample, GuardAction, TrainedSample
from services.trainer.ages import age
from services.trainer.batcher import ClosedBatch
from services.trainer.candidates import Candidate
from services.trainer.dead_letters import DeadLetter


def trained_sample(candidate: Candidate, current_version: int) -> TrainedSample:
    """A candidate as a train-step event lists it."""
    return TrainedSample(
        sample_id=candidate.sample.sample_id,
        turn_id=candidate.turn_id,
        revision=candidate.revision,
        ref=candidate.ref,
        age=age(candidate.oldest_version, current_version),
        reward=candidate.reward,
        response_tokens=candidate.sample.response_ids.size,
        advantage=candidate.sample.rl_advantage if candidate.sample.rl_mask.any() else None,
        stale_tokens=candidate.stale_tokens,
        has_teacher=bool(candidate.sample.opd_mask.any()),
        principal=candidate.principal,
        sampling_temperature=candidate.sample.sampling_temperature,
    )


def train_step_event(
    batch: ClosedBatch,
    extra_drops: list[DroppedSample],
    *,
    lineage: str,
    policy: str,
    step: int,
    base_version: int,
    weight_version: int | None,
    unchanged_reason: str,
    batch_uri: str,
    batch_sha256: str,
    next_offsets: Mapping[str, int],
    metrics: Mapping[str, float],
    guards: Sequence[GuardAction],
    knobs: Mapping[str, float],
    started_at: datetime,
    finished_at: datetime,
) -> TrainStepEvent:
    """What a step did. Samples in `extra_drops` were in the batch and had no part in it."""
    unusable = {dropped.sample_id for dropped in extra_drops}
    return TrainStepEvent(
        train_step_id=ids.train_step_id(lineage, step),
        lineage=lineage,
        policy=policy,
        step=step,
        base_version=base_version,
        weight_version=weight_version,
        closed_by=batch.closed_by,
        samples=[
            trained_sample(candidate, base_version)
            for candidate in batch.candidates
            if candidate.sample.sample_id not in unusable
        ],
        drops=[*batch.drops, *extra_drops],
        unchanged_reason=unchanged_reason,
        batch_uri=batch_uri,
        batch_sha256=batch_sha256,
        next_offsets=dict(next_offsets),
        metrics=dict(metrics),
        guards=list(guards),
        knobs=dict(knobs),
        started_at=started_at,
        finished_at=finished_at,
    )


class EventRecords:
    """Events to records: topics, keys and ids in one place."""

    def __init__(self, namespace: str, policy: str, process: str) -> None:
        self._policy = policy
        self._source = f"trainer/{process}"
        self.weights_topic = topics.full_name(namespace, topics.WEIGHTS)
        self.train_steps_topic = topics.full_name(namespace, topics.TRAIN_STEPS)
        self.dead_letter_topic = topics.full_name(namespace, topics.TRAINER_DLQ)

    def train_step(self, event: TrainStepEvent) -> OutgoingRecord:
        """On `train-steps`."""
        return encode(
            event,
            topic=self.train_steps_topic,
            key=self._policy,
            event_id=event.train_step_id,
            source=self._source,
        )

    def dead_letter(self, letter: DeadLetter) -> OutgoingRecord:
        """On `trainer.dlq`."""
        return letter.outgoing(self.dead_letter_topic)

    def version_key(self, weight_version: int) -> str:
        """Key of a version on `weights`."""
        return f"{self._policy}/{weight_version}"

    def weight_version(self, event: WeightVersionEvent) -> OutgoingRecord:
        """On `weights`."""
        key = self.version_key(event.weight_version)
        event_id = ids.derive("weight-version", event.lineage, event.weight_version)
        return encode(event, topic=self.weights_topic, key=key, event_id=event_id, source=self._source)

    def pointer(self, weight_version: int, lineage: str, pointed_at: datetime) -> OutgoingRecord:
        """On `weights`: serve this version."""
        event = WeightPointerEvent(
            policy=self._policy,
            weight_version=weight_version,
            reason="trained" if weight_version else "base model",
            pointed_at=pointed_at,
        )
        event_id = ids.derive("weight-pointer", lineage, weight_version)
        return encode(event, topic=self.weights_topic, key=self._policy, event_id=event_id, source=self._source)

    def removed(self, weight_version: int) -> OutgoingRecord:
        """On `weights`: the artefact is gone."""
        return OutgoingRecord(self.weights_topic, self.version_key(weight_version).encode(), None)
