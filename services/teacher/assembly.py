"""From a turn, its score and a teacher's signal to a sample: the table of what can be learned. No I/O.

| score           | signal | binary       | opd           | combine           |
|-----------------|--------|--------------|---------------|-------------------|
| a reward        | some   | reward       | signal        | reward and signal |
| a reward        | none   | reward       | skip: no hint | reward            |
| neutral verdict | some   | reward       | signal        | signal            |
| neutral verdict | none   | reward       | skip: no hint | skip: neutral     |
| failed          | some   | skip: failed | signal        | signal            |
| failed          | none   | skip: failed | skip: no hint | skip: failed      |

before which a turn that must not be trained is skipped with its own reason. A neutral verdict is a judge's 0; explicit
evidence of 0 is a reward like any other, which the other rollouts of its group may turn into an advantage. In binary
mode a neutral verdict is a sample too: the trainer drops it as `zero_advantage`, where it can be seen, and a baseline
may give it an advantage. In combine mode it has nothing to say beside a hint (OpenClaw-RL's four cases): no sample.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from clawstream import ids
from schemas.events import SampleEvent, ScoreEvent, TurnEvent
from schemas.events.sample import SampleRevision, TeacherRequest, TeacherSignal
from schemas.events.score import ScoreStatus
from services.teacher.settings import Mode


class SkipReason(StrEnum):
    """Why a score makes no sample, apart from the turn's own reason (`untrainable_<reason>`)."""

    FAILED_SCORE = "failed_score"
    """The judge came to no verdict, and no teacher has anything to say."""
    NEUTRAL_WITHOUT_HINT = "neutral_without_hint"
    """The verdict is neutral, and no teacher has anything to say."""
    NO_HINT = "no_hint"
    """Nothing for a teacher to say, and the reward is not asked for."""


@dataclass(frozen=True, slots=True)
class NoSample:
    """Nothing to learn: counted, never silent."""

    reason: str
    """A word for the counter."""


@dataclass(frozen=True, slots=True)
class NoSignal:
    """No teacher spoke."""

    reason: str = "no_hint"
    """Why: `no_hint`, or what kept a hint from being used."""


Signal = TeacherSignal | TeacherRequest | NoSignal


def skip_before_reading(score: ScoreEvent, mode: Mode, *, has_hint: bool) -> NoSample | None:
    """Whether the score alone says that there will be no sample: then its turn need not be read."""
    return None if has_hint and mode is not Mode.BINARY else _components_without_signal(score, mode)


def assemble(
    turn: TurnEvent, score: ScoreEvent, signal: Signal, mode: Mode, *, created_at: datetime
) -> SampleEvent | NoSample:
    """The sample, or why there is none.

    Raises ValueError when score and turn do not belong together, or the signal has another length than the response.
    """
    if (turn.turn_id, turn.session_id) != (score.turn_id, score.session_id):
        raise ValueError(
            f"score {score.score_id} is of turn {score.turn_id} in session {score.session_id}, "
            f"but {score.turn_ref} holds turn {turn.turn_id} in session {turn.session_id}"
        )
    untrainable = skip_untrainable(turn)
    if untrainable is not None:
        return untrainable
    if mode is Mode.BINARY or isinstance(signal, NoSignal):
        nothing = _components_without_signal(score, mode)
        if nothing is not None:
            if isinstance(signal, NoSignal) and signal.reason != NoSignal().reason:
                return NoSample(f"no_signal_{signal.reason}")
            return nothing
    has_reward = mode is Mode.BINARY or (mode is Mode.COMBINE and not _is_neutral(score))
    used = NoSignal() if mode is Mode.BINARY else signal
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
        reward=score.reward if has_reward else None,
        teacher=used if isinstance(used, TeacherSignal) else None,
        teacher_request=used if isinstance(used, TeacherRequest) else None,
        rollout=turn.rollout,
        tokenizer_fingerprint=turn.tokenizer_fingerprint,
        created_at=created_at,
    )


def skip_untrainable(turn: TurnEvent) -> NoSample | None:
    """The skip of a turn that must not be trained."""
    if turn.trainable:
        return None
    assert turn.untrainable_reason is not None
    return NoSample(f"untrainable_{turn.untrainable_reason.value}")


def _components_without_signal(score: ScoreEvent, mode: Mode) -> NoSample | None:
    """The table's rows without a signal: the skip, or None for a sample of the reward alone."""
    if mode is Mode.OPD:
        return NoSample(SkipReason.NO_HINT)
    if score.status is ScoreStatus.FAILED:
        return NoSample(SkipReason.FAILED_SCORE)
    if mode is Mode.COMBINE and _is_neutral(score):
        return NoSample(SkipReason.NEUTRAL_WITHOUT_HINT)
    return None


def _is_neutral(score: ScoreEvent) -> bool:
    return score.reward == 0 and not score.explicit


def revision(score: ScoreEvent) -> SampleRevision:
    """What orders the samples of one turn: newer judge specs first, then explicit evidence, then later evidence."""
    return SampleRevision(
        promotion_epoch=score.promotion_epoch,
        explicit=score.explicit,
        next_state_offset=score.next_state_ref.offset,
    )
