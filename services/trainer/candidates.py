"""From a record of `samples` to something that can be trained, or to the reason why it cannot.

What belongs to somebody else (another policy, another tokenizer) is dropped and listed. What nobody can train on is no
sample: it goes to the dead-letter topic with its id and all its lengths.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray

from clawstream.blobs import BlobReader
from clawstream.bus.interface import Record
from clawstream.codec import decode_as
from clawstream.errors import BlobError, DecodeError, ForgottenContent, UntrainableSample
from clawstream.forgetting.forgotten import Forgotten
from schemas.arrays import NumberArray
from schemas.events import SampleEvent
from schemas.events.base import RecordReference, RolloutPosition, VersionSpan
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.ages import gap_in, newest_version, oldest_version
from services.trainer.algorithms.options import LearningSignal
from services.trainer.given_ids import has_ids
from services.trainer.sample import IdTargets, TeacherTargets, TrainingSample


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
    """Reward of the RL component as far as it is known; None for a sample without one."""
    newest_version: int = 0
    """The version of the answer's newest token."""
    version_spans: tuple[VersionSpan, ...] = ()
    """The weights of every token; empty stands for one span of `oldest_version`."""
    principal: str = ""
    """Whose turn it is."""
    rollout: RolloutPosition | None = None
    """Its place in a rollout; None for a conversation's turn."""
    outcome: float | None = None
    """Reward of the rollout as a whole, if this sample carries it; of a conversation's turn, its reward."""
    step_reward: float | None = None
    """Reward of this step of a rollout."""
    stale_tokens: int = 0
    """Tokens that were left out of a closed batch because their weights were too old."""


@dataclass(frozen=True, slots=True)
class CandidateRules:
    """What a sample must satisfy whatever the batch."""

    policy: str
    tokenizer_fingerprint: str
    """Empty accepts any."""
    vocabulary_size: int
    max_sample_tokens: int
    signal: LearningSignal = field(default_factory=LearningSignal)
    """What the loss learns from."""
    forgotten: Forgotten = field(default_factory=Forgotten)
    """What must not be trained any more."""
    blobs: BlobReader = field(default_factory=BlobReader)
    """Reads what is too large for the log."""
    has_own_teacher: bool = False
    """Whether the trainer has a teacher of its own, for samples that ask for one."""


def reference(record: Record) -> RecordReference:
    """Where a record is."""
    return RecordReference(topic=record.topic, partition=record.partition, offset=record.offset)


def read_candidate(record: Record, rules: CandidateRules, *, newest_published: int) -> Candidate | DroppedSample:
    """The candidate in a record that is not a tombstone, or why it cannot be one.

    Raises DecodeError (UntrainableSample) for what goes to the dead-letter topic, and BlobUnavailable for what is to be
    read again later.
    """
    try:
        event = decode_as(record, SampleEvent)
    except ForgottenContent:
        return _forgotten(record)
    except DecodeError as error:
        raise UntrainableSample(f"{error}{_found_in(record)}") from error

    def dropped(reason: DropReason, detail: str) -> DroppedSample:
        return DroppedSample(
            sample_id=event.sample_id, turn_id=event.turn_id, ref=reference(record), reason=reason, detail=detail
        )

    # First of all: its blobs may be gone already.
    if rules.forgotten.covers(session_id=event.session_id, principal=event.principal, turn_ref=event.turn_ref):
        return dropped(DropReason.TOMBSTONE, "its session or principal was forgotten")
    if event.policy != rules.policy:
        return dropped(DropReason.OTHER_POLICY, f"policy {event.policy}; this trainer trains {rules.policy}")
    if rules.tokenizer_fingerprint and event.tokenizer_fingerprint != rules.tokenizer_fingerprint:
        return dropped(DropReason.OTHER_TOKENIZER, f"fingerprint {event.tokenizer_fingerprint}")
    arrays = _arrays(record, event, rules.blobs)
    _check(record, event, arrays, rules, newest_published)
    for name in _IDS:
        lowest = -1 if name.startswith("teacher.") else 0  # -1 pads
        if name in arrays and (arrays[name].min() < lowest or arrays[name].max() >= rules.vocabulary_size):
            ids = f"{name} {arrays[name].min()}..{arrays[name].max()}"
            return dropped(DropReason.OTHER_TOKENIZER, f"{ids}, but the vocabulary has {rules.vocabulary_size}")
    teacher = _teacher(arrays) if rules.signal.opd else None
    if teacher is not None and not has_ids(teacher, rules.signal.ids):
        teacher = None
    if _ASKED in arrays and rules.signal.opd and rules.has_own_teacher:
        teacher = TeacherTargets.asked(arrays[_ASKED].astype(np.int32), arrays["response_ids"].size)
    outcome, step_reward = _rewards(event) if rules.signal.rl else (None, None)
    has_reward = outcome is not None or step_reward is not None
    # A step of a rollout may still get a share of the rollout's outcome.
    if teacher is None and not has_reward and (event.rollout is None or not rules.signal.rl):
        return dropped(DropReason.NO_COMPONENT, _carries(event))
    sample = TrainingSample(
        sample_id=event.sample_id,
        prompt_ids=arrays["prompt_ids"].astype(np.int32),
        response_ids=arrays["response_ids"].astype(np.int32),
        behaviour_log_probs=arrays["behaviour_logprobs"].astype(np.float32),
        rl_mask=np.full(arrays["response_ids"].size, has_reward),
        reward=event.reward or 0.0,
        sampling_temperature=event.sampling_temperature,
        teacher=teacher,
        rollout_id="" if event.rollout is None else event.rollout.rollout_id,
    )
    return Candidate(
        sample,
        event.turn_id,
        event.session_id,
        event.revision,
        reference(record),
        oldest_version(event.version_spans),
        event.reward if has_reward else None,
        newest_version=newest_version(event.version_spans),
        version_spans=tuple(event.version_spans),
        principal=event.principal,
        rollout=event.rollout,
        outcome=outcome,
        step_reward=step_reward,
    )


_ASKED = "teacher_request.prompt_ids"
_IDS = ("prompt_ids", "response_ids", _ASKED, "teacher.top_ids", "teacher.support_ids")


def _arrays(record: Record, event: SampleEvent, blobs: BlobReader) -> dict[str, NDArray[Any]]:
    """Every number array of the sample by its field.

    Raises UntrainableSample when a blob is missing or damaged, BlobUnavailable while its store does not answer.
    """
    found: dict[str, NumberArray | None] = {
        "prompt_ids": event.prompt_ids,
        "response_ids": event.response_ids,
        "behaviour_logprobs": event.behaviour_logprobs,
        _ASKED: event.teacher_request and event.teacher_request.prompt_ids,
    }
    teacher = event.teacher
    if teacher is not None:
        found |= {
            "teacher.logprobs": teacher.logprobs,
            "teacher.top_ids": teacher.top_ids,
            "teacher.top_logprobs": teacher.top_logprobs,
            "teacher.support_ids": teacher.support_ids,
            "teacher.support_logprobs": teacher.support_logprobs,
        }
    try:
        return {name: blobs.resolve(array) for name, array in found.items() if array is not None}
    except BlobError as error:
        raise UntrainableSample(f"{record}: sample {event.sample_id}: {error}") from error


def _check(
    record: Record,
    event: SampleEvent,
    arrays: dict[str, NDArray[Any]],
    rules: CandidateRules,
    newest_published: int,
) -> None:
    """Raises UntrainableSample, naming the sample and the shape of everything in it."""
    prompt_tokens, tokens = arrays["prompt_ids"].size, arrays["response_ids"].size
    mistakes: list[str] = []
    for name, array in arrays.items():
        wanted_dimensions = 2 if name.startswith(("teacher.top", "teacher.support")) else 1
        if array.ndim != wanted_dimensions or array.size == 0:
            mistakes.append(f"{name} is not an array of {wanted_dimensions} dimensions with something in it")
        elif name not in ("prompt_ids", _ASKED) and array.shape[0] != tokens:
            mistakes.append(f"{name} has {array.shape[0]} tokens, the response {tokens}")
        if name in _IDS and array.dtype.kind not in "iu":
            mistakes.append(f"{name} holds {array.dtype}, not ids")
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            mistakes.append(f"{int((~np.isfinite(array)).sum())} of {array.size} {name} are not finite")
    for ids, log_probs in (("top_ids", "top_logprobs"), ("support_ids", "support_logprobs")):
        shapes = [arrays[name].shape if name in arrays else None for name in (f"teacher.{ids}", f"teacher.{log_probs}")]
        if shapes[0] != shapes[1]:
            mistakes.append(f"teacher.{ids} and teacher.{log_probs} have shapes {shapes[0]} and {shapes[1]}")
    if not np.isfinite(event.sampling_temperature):
        mistakes.append(f"sampling_temperature is {event.sampling_temperature}")
    if prompt_tokens + tokens > rules.max_sample_tokens:
        mistakes.append(f"{prompt_tokens + tokens} tokens, but max_sample_tokens is {rules.max_sample_tokens}")
    if _ASKED in arrays and rules.has_own_teacher and arrays[_ASKED].size + tokens > rules.max_sample_tokens:
        mistakes.append(
            f"{arrays[_ASKED].size + tokens} tokens with the hinted prompt, but max_sample_tokens is "
            f"{rules.max_sample_tokens}: lower teacher.model.context_tokens"
        )
    gap = gap_in(event.version_spans, tokens)
    if gap is not None:
        mistakes.append(f"tokens of unknown version: {gap}")
    elif newest_version(event.version_spans) > newest_published:
        claimed = newest_version(event.version_spans)
        mistakes.append(f"claims version {claimed}; the newest that exists is {newest_published}")
    if mistakes:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise UntrainableSample(f"{record}: sample {event.sample_id} ({shapes}): {'; '.join(mistakes)}")


def _rewards(event: SampleEvent) -> tuple[float | None, float | None]:
    """(outcome, step reward). In a rollout explicit evidence speaks of the whole, and what a judge infers of a step."""
    if event.rollout is None or event.revision.explicit:
        return event.reward, event.step_reward
    return None, event.step_reward if event.step_reward is not None else event.reward


def _teacher(arrays: dict[str, NDArray[Any]]) -> TeacherTargets | None:
    if "teacher.logprobs" not in arrays:
        return None

    def targets(name: str) -> IdTargets | None:
        if f"teacher.{name}_ids" not in arrays:
            return None
        ids, log_probs = arrays[f"teacher.{name}_ids"], arrays[f"teacher.{name}_logprobs"]
        return IdTargets(ids.astype(np.int32), log_probs.astype(np.float32))

    log_probs = arrays["teacher.logprobs"].astype(np.float32)
    return TeacherTargets(np.ones(log_probs.size, np.bool_), log_probs, targets("top"), targets("support"))


def _forgotten(record: Record) -> DroppedSample:
    """A sample whose content nobody can read any more: its ids still stand beside it."""
    fields = cast("dict[str, str]", orjson.loads(record.value or b""))
    return DroppedSample(
        sample_id=fields["sample_id"],
        turn_id=fields["turn_id"],
        ref=reference(record),
        reason=DropReason.TOMBSTONE,
        detail="the key of its session was deleted",
    )


def _found_in(record: Record) -> str:
    """The sample's id and the shapes of its arrays, as far as a record that is no valid sample tells them."""
    try:
        document: object = orjson.loads(record.value or b"")
    except orjson.JSONDecodeError:
        return ""
    if not isinstance(document, dict):
        return ""
    fields = cast("dict[str, object]", document)
    shapes: list[str] = []
    parts = {"": fields} | {f"{name}.": fields.get(name) for name in ("teacher", "teacher_request")}
    for prefix, part in parts.items():
        if isinstance(part, dict):
            for name, array in cast("dict[str, object]", part).items():
                if isinstance(array, dict) and "shape" in array:
                    shapes.append(f"{prefix}{name} {cast('dict[str, object]', array)['shape']}")
    return f" (sample {fields.get('sample_id')}: {', '.join(shapes)})"


def _carries(event: SampleEvent) -> str:
    parts = {
        "a reward": event.reward,
        "a step's reward": event.step_reward,
        "a teacher's log-probs": event.teacher,
        "a teacher's top ids": event.teacher and event.teacher.top_ids,
        "a teacher's log-probs at the policy's ids": event.teacher and event.teacher.support_ids,
        "a request for the trainer's own teacher": event.teacher_request,
    }
    return "it carries " + ", ".join(name for name, part in parts.items() if part is not None)
