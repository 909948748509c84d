"""From a turn, its score and a teacher's signal to a sample: the table of what can be learned. No I/O.

| score          | signal | sample          | reward | teacher |
|----------------|--------|-----------------|--------|---------|
| scored         | none   | reinforcement   | yes    | no      |
| scored         | some   | both            | yes    | yes     |
| failed         | some   | distillation    | no     | yes     |
| failed         | none   | skip: failed_score                     |

before which a turn that must not be trained is skipped with its own reason. A neutral verdict is a sample too: the
trainer drops it as `zero_advantage`, where it can be seen, and a baseline may give it an advantage.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from clawstream import ids
from schemas.events import SampleEvent, ScoreEvent, TurnEvent
from schemas.events.sample import SampleRevision, TeacherSignal
from schemas.events.score import ScoreStatus


class SkipReason(StrEnum):
    """Why a score makes no sample, apart from the turn's own reason (`untrainable_<reason>`)."""

    FAILED_SCORE = "failed_score"
    """The judge came to no verdict, and no teacher has anything to say."""


@dataclass(frozen=True, slots=True)
class NoSample:
    """Nothing to learn: counted, never silent."""

    reason: str
    """A word for the counter."""


def skip_before_reading(score: ScoreEvent) -> NoSample | None:
    """Whether the score alone says that there will be no sample: then its turn need not be read."""
    return NoSample(SkipReason.FAILED_SCORE) if score.status is ScoreStatus.FAILED else None


def assemble(
    turn: TurnEvent, score: ScoreEvent, signal: TeacherSignal | None, *, created_at: datetime
) -> SampleEvent | NoSample:
    """The sample, or why there is none.

    Raises ValueError when score and turn do not belong together, or the signal has another length than the response.
    """
    if (turn.turn_id, turn.session_id) != (score.turn_id, score.session_id):
        raise ValueError(
            f"score {score.score_id} is of turn {score.turn_id} in session {score.session_id}, "
            f"but {score.turn_ref} holds turn {turn.turn_id} in session {turn.session_id}"
        )
    if not turn.trainable:
        assert turn.untrainable_reason is not None
        return NoSample(f"untrainable_{turn.untrainable_reason.value}")
    if score.reward is None and signal is None:
        return NoSample(SkipReason.FAILED_SCORE)
    return SampleEvent(
        sample_id=ids.sample_id(turn.turn_id, score.score_id),
        turn_id=turn.turn_id,
        session_id=turn.session_id,
        principal=turn.principal,
        policy=turn.policy,
        revision=revision(score),
        turn_ref=score.turn_ref,
        next_state_ref=score.next_state_ref,
        score_id=score.score_id,
        judge_spec_hash=score.judge_spec_hash,
        prompt_ids=turn.prompt_ids,
        response_ids=turn.response_ids,
        behaviour_logprobs=turn.response_logprobs,
        sampling_temperature=turn.sampling.temperature,
        version_spans=turn.version_spans,
        truncated=turn.truncated,
        reward=score.reward,
        teacher=signal,
        rollout=turn.rollout,
        tokenizer_fingerprint=turn.tokenizer_fingerprint,
        created_at=created_at,
    )


def revision(score: ScoreEvent) -> SampleRevision:
    """What orders the samples of one turn: newer judge specs first, then explicit evidence, then later evidence."""
    return SampleRevision(
        promotion_epoch=score.promotion_epoch,
        explicit=score.explicit,
        next_state_offset=score.next_state_ref.offset,
    )
