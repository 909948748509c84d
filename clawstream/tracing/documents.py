"""A chain as plain data: what `--json` prints and the tree is drawn from. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from clawstream.tracing.archive import BatchCheck
from clawstream.tracing.history import DroppedTurn, TrainedTurn, TrainingHistory
from clawstream.tracing.scan import TurnRecords
from schemas.events import NextStateEvent, SampleEvent, ScoreEvent, TrainStepEvent, TurnEvent
from schemas.events.base import RecordReference

Document = dict[str, Any]


def turn_document(found: TurnRecords, history: TrainingHistory) -> Document:
    """A turn with everything that followed from it, up to the steps that trained it."""
    scores = sorted(found.scores.values(), key=lambda score: (score.promotion_epoch, score.next_state_ref.offset))
    return {
        "turn_id": found.turn_id,
        "turn": None if found.turn is None else _turn(found.turn, found.turn_ref),
        "next_states": [
            _next_state(next_state, reference)
            for next_state, reference in sorted(found.next_states.values(), key=lambda each: each[1].offset)
        ],
        "scores": [score_document(score) for score in scores],
        "samples": [
            _sample(sample, reference)
            for sample, reference in sorted(found.samples.values(), key=lambda each: each[0].revision.order)
        ],
        "trained": [_trained(each) for each in history.trained.get(found.turn_id, ())],
        "dropped": [_dropped(each) for each in history.dropped.get(found.turn_id, ())],
    }


def step_document(step: TrainStepEvent, batch: BatchCheck) -> Document:
    """A step without its samples' chains."""
    return {
        "train_step_id": step.train_step_id,
        "lineage": step.lineage,
        "policy": step.policy,
        "step": step.step,
        "base_version": step.base_version,
        "weight_version": step.weight_version,
        "unchanged_reason": step.unchanged_reason,
        "closed_by": step.closed_by,
        "samples": len(step.samples),
        "drops": len(step.drops),
        "batch": {"uri": step.batch_uri, "sha256": step.batch_sha256, "state": batch.state.value},
        "loss": step.metrics.get("loss"),
        "finished_at": step.finished_at.isoformat(),
    }


def version_document(
    history: TrainingHistory, policy: str, weight_version: int, served: Sequence[str], limit: int
) -> Document:
    """A version, what made it, and whom it answered."""
    event = history.versions.get((policy, weight_version))
    return {
        "policy": policy,
        "weight_version": weight_version,
        "published": None
        if event is None
        else {
            "lineage": event.lineage,
            "base_version": event.base_version,
            "artefact_uri": event.artefact_uri,
            "manifest_sha256": event.manifest_sha256,
            "published_at": event.published_at.isoformat(),
        },
        "artefact_removed": (policy, weight_version) in history.removed,
        "made_by": [step.train_step_id for step in history.makers(policy, weight_version)],
        "served_turns": {"count": len(served), "turn_ids": list(served[:limit])},
    }


def score_document(score: ScoreEvent) -> Document:
    """A score with its votes and hints."""
    return {
        "score_id": score.score_id,
        "next_state_id": score.next_state_id,
        "judge_spec_hash": score.judge_spec_hash,
        "promotion_epoch": score.promotion_epoch,
        "explicit": score.explicit,
        "status": score.status.value,
        "verdict": score.verdict,
        "reward": score.reward,
        "tied": score.tied,
        "votes": [vote.model_dump(mode="json", exclude_none=True) for vote in score.votes],
        "hints": [hint.model_dump(mode="json", exclude_none=True) for hint in score.hints],
        "hint_votes": [vote.model_dump(mode="json", exclude_none=True) for vote in score.hint_votes],
        "judged_at": score.judged_at.isoformat(),
    }


def _turn(turn: TurnEvent, reference: RecordReference | None) -> Document:
    return {
        "ref": None if reference is None else str(reference),
        "session_id": turn.session_id,
        "parent_turn_id": turn.parent_turn_id,
        "principal": turn.principal,
        "policy": turn.policy,
        "turn_type": turn.turn_type.value,
        "request": _text(turn.request_messages[-1]) if turn.request_messages else "",
        "answer": _text(turn.response_message),
        "response_tokens": turn.response_ids.element_count,
        "version_spans": [span.model_dump(mode="json") for span in turn.version_spans],
        "trainable": turn.trainable,
        "untrainable_reason": None if turn.untrainable_reason is None else turn.untrainable_reason.value,
        "finished_at": turn.finished_at.isoformat(),
    }


def _next_state(next_state: NextStateEvent, reference: RecordReference) -> Document:
    return {
        "next_state_id": next_state.next_state_id,
        "ref": str(reference),
        "kind": next_state.kind.value,
        "following": [{"role": each.get("role"), "text": _text(each)} for each in next_state.following_messages],
        "feedback": None if next_state.feedback is None else next_state.feedback.model_dump(mode="json"),
        "child_turn_id": next_state.child_turn_id,
        "observed_at": next_state.observed_at.isoformat(),
    }


def _sample(sample: SampleEvent, reference: RecordReference) -> Document:
    teacher = sample.teacher
    return {
        "sample_id": sample.sample_id,
        "ref": str(reference),
        "revision": sample.revision.model_dump(mode="json"),
        "score_id": sample.score_id,
        "judge_spec_hash": sample.judge_spec_hash,
        "reward": sample.reward,
        "step_reward": sample.step_reward,
        "teacher": None
        if teacher is None
        else {
            "model": teacher.model,
            "engine": teacher.engine,
            "hint": teacher.hint,
            "hint_source": teacher.hint_source,
            "selection": teacher.selection,
        },
        "teacher_inside_the_trainer": sample.teacher_request is not None,
        "created_at": sample.created_at.isoformat(),
    }


def _trained(trained: TrainedTurn) -> Document:
    return {
        "sample_id": trained.sample.sample_id,
        "revision": trained.sample.revision.model_dump(mode="json"),
        "sample_ref": str(trained.sample.ref),
        "age": trained.sample.age,
        "reward": trained.sample.reward,
        "response_tokens": trained.sample.response_tokens,
        "train_step_id": trained.step.train_step_id,
        "lineage": trained.step.lineage,
        "step": trained.step.step,
        "policy": trained.step.policy,
        "weight_version": trained.step.weight_version,
        "unchanged_reason": trained.step.unchanged_reason,
    }


def _dropped(dropped: DroppedTurn) -> Document:
    return {
        "sample_id": dropped.drop.sample_id,
        "reason": dropped.drop.reason.value,
        "detail": dropped.drop.detail,
        "train_step_id": dropped.step.train_step_id,
        "step": dropped.step.step,
    }


def _text(message: Mapping[str, Any]) -> str:
    """The words of a message; of parts that are no text, their type."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in content if isinstance(content, list) else []:  # pyright: ignore[reportUnknownVariableType] - JSON
        if isinstance(part, dict):
            parts.append(str(part.get("text") or f"[{part.get('type')}]"))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType] - JSON
    if message.get("tool_calls"):
        parts.append("[tool calls]")
    return " ".join(parts)
