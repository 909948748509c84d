"""From a record of `samples` to something that can be trained, or to the reason why it cannot."""

from dataclasses import dataclass

import numpy as np

from clawstream.blobs import resolve
from clawstream.bus.interface import Record
from clawstream.codec import decode_as
from clawstream.errors import BlobError, DecodeError
from schemas.events import SampleEvent
from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.ages import newest_version, oldest_version
from services.trainer.sample import TrainingSample


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample that may be trained."""

    sample: TrainingSample
    turn_id: str
    session_id: str
    revision: SampleRevision
    ref: RecordReference
    oldest_version: int
    """The version of the answer's oldest token."""
    reward: float | None
    """None for a sample without an RL component."""

    @property
    def has_signal(self) -> bool:
        """Whether it can have a gradient: an unmasked token, and an advantage that is not 0."""
        return bool(self.sample.rl_mask.any()) and self.sample.reward != 0.0


@dataclass(frozen=True, slots=True)
class CandidateRules:
    """What a sample must satisfy whatever the batch."""

    policy: str
    tokenizer_fingerprint: str
    """Empty accepts any."""
    vocabulary_size: int
    max_sample_tokens: int


def reference(record: Record) -> RecordReference:
    """Where a record is."""
    return RecordReference(topic=record.topic, partition=record.partition, offset=record.offset)


def read_candidate(record: Record, rules: CandidateRules, *, newest_published: int) -> Candidate | DroppedSample:
    """The candidate in a record that is not a tombstone, or why it cannot be one.

    Raises DecodeError for what is no sample at all: such a record goes to the dead-letter topic.
    """
    event = decode_as(record, SampleEvent)
    try:
        prompt_ids = resolve(event.prompt_ids).astype(np.int32)
        response_ids = resolve(event.response_ids).astype(np.int32)
        behaviour = resolve(event.behaviour_logprobs).astype(np.float32)
    except BlobError as error:
        raise DecodeError(f"{record}: sample {event.sample_id}: {error}") from error
    dropped = _reason_to_drop(event, prompt_ids, response_ids, behaviour, rules, newest_published)
    if dropped is not None:
        reason, detail = dropped
        return DroppedSample(
            sample_id=event.sample_id, turn_id=event.turn_id, ref=reference(record), reason=reason, detail=detail
        )
    sample = TrainingSample(
        sample_id=event.sample_id,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        behaviour_log_probs=behaviour,
        rl_mask=np.full(response_ids.size, event.reward is not None),
        reward=event.reward or 0.0,
        sampling_temperature=event.sampling_temperature,
    )
    return Candidate(
        sample,
        event.turn_id,
        event.session_id,
        event.revision,
        reference(record),
        oldest_version(event.version_spans),
        event.reward,
    )


def _reason_to_drop(
    event: SampleEvent,
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    behaviour: np.ndarray,
    rules: CandidateRules,
    newest_published: int,
) -> tuple[DropReason, str] | None:
    if event.policy != rules.policy:
        return DropReason.OTHER_POLICY, f"policy {event.policy}; this trainer trains {rules.policy}"
    if rules.tokenizer_fingerprint and event.tokenizer_fingerprint != rules.tokenizer_fingerprint:
        return DropReason.OTHER_TOKENIZER, f"fingerprint {event.tokenizer_fingerprint}"
    tokens = prompt_ids.size + response_ids.size
    if tokens > rules.max_sample_tokens:
        lengths = f"prompt of {prompt_ids.size} and response of {response_ids.size} tokens"
        return DropReason.TOO_LONG, f"{lengths}, but max_sample_tokens is {rules.max_sample_tokens}"
    lowest = int(min(prompt_ids.min(), response_ids.min()))
    highest = int(max(prompt_ids.max(), response_ids.max()))
    if lowest < 0 or highest >= rules.vocabulary_size:
        return DropReason.OTHER_TOKENIZER, f"ids {lowest}..{highest}, but the vocabulary has {rules.vocabulary_size}"
    if not np.isfinite(behaviour).all() or not np.isfinite(event.sampling_temperature):
        wrong = int((~np.isfinite(behaviour)).sum())
        return DropReason.NON_FINITE, f"{wrong} of {behaviour.size} behaviour log-probs are not finite"
    newest = newest_version(event.version_spans)
    if newest > newest_published:
        return DropReason.FUTURE_VERSION, f"claims version {newest}; the newest that exists is {newest_published}"
    return None
