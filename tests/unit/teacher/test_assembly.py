"""The table from turn, score and teacher's signal to a sample."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream import ids
from schemas.arrays import float32_array, int32_array
from schemas.events import SampleEvent, ScoreEvent
from schemas.events.base import RolloutPosition
from schemas.events.sample import TeacherRequest, TeacherSignal
from schemas.events.turn import UntrainableReason
from services.teacher.assembly import NoSample, NoSignal, assemble, revision, skip_before_reading
from services.teacher.settings import Mode
from tests.fixtures.judged_log import turn_event

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def score_event(**values: Any) -> ScoreEvent:
    return ScoreEvent.model_validate(
        {
            "score_id": "score-1",
            "next_state_id": "next-state-1",
            "next_state_ref": {"topic": "clawstream.next-states.v1", "partition": 3, "offset": 70},
            "turn_id": "turn-1",
            "turn_ref": {"topic": "clawstream.turns.v1", "partition": 3, "offset": 40},
            "session_id": "session-1",
            "principal": "alice",
            "judge_spec_hash": "spec",
            "promotion_epoch": 2,
            "status": "scored",
            "verdict": -1,
            "reward": -0.5,
            "judged_at": NOW,
            **values,
        }
    )


FAILED = {"status": "failed", "verdict": None, "reward": None}


def signal(tokens: int = 3) -> TeacherSignal:
    return TeacherSignal(
        logprobs=float32_array([-0.1] * tokens), hint="Shorter.", hint_source="user", model="m", engine="e"
    )


def test_a_scored_turn_is_a_reinforcement_sample_with_the_turns_own_numbers() -> None:
    turn = turn_event(1, truncated=True)
    score = score_event()
    sample = assemble(turn, score, NoSignal(), Mode.BINARY, created_at=NOW)
    assert isinstance(sample, SampleEvent)
    assert (sample.reward, sample.teacher) == (-0.5, None)
    assert sample.sample_id == ids.sample_id("turn-1", "score-1")
    assert sample.prompt_ids == turn.prompt_ids
    assert sample.response_ids == turn.response_ids
    assert sample.behaviour_logprobs == turn.response_logprobs
    assert sample.sampling_temperature == 0.7
    assert sample.version_spans == turn.version_spans
    assert sample.truncated
    assert (sample.turn_ref, sample.next_state_ref) == (score.turn_ref, score.next_state_ref)
    assert sample.revision.order == (2, False, 70)
    assert (sample.policy, sample.principal, sample.judge_spec_hash) == ("default", "alice", "spec")
    assert sample.created_at == NOW


NEUTRAL = {"verdict": 0, "reward": 0.0}
REQUEST = TeacherRequest(prompt_ids=int32_array([1, 2]), hint="Shorter.", hint_source="user")
TABLE = [
    # score, what the teacher said, mode, (reward, teacher speaks) or the skip
    ({}, signal(), Mode.BINARY, (-0.5, False)),
    ({}, NoSignal(), Mode.BINARY, (-0.5, False)),
    (NEUTRAL, signal(), Mode.BINARY, (0.0, False)),
    (NEUTRAL, NoSignal(), Mode.BINARY, (0.0, False)),
    (FAILED, signal(), Mode.BINARY, "failed_score"),
    (FAILED, NoSignal(), Mode.BINARY, "failed_score"),
    ({}, signal(), Mode.OPD, (None, True)),
    ({}, NoSignal(), Mode.OPD, "no_hint"),
    (NEUTRAL, signal(), Mode.OPD, (None, True)),
    (NEUTRAL, NoSignal(), Mode.OPD, "no_hint"),
    (FAILED, signal(), Mode.OPD, (None, True)),
    (FAILED, NoSignal(), Mode.OPD, "no_hint"),
    ({}, signal(), Mode.COMBINE, (-0.5, True)),
    ({}, NoSignal(), Mode.COMBINE, (-0.5, False)),
    ({"verdict": 1, "reward": 1.0}, signal(), Mode.COMBINE, (1.0, True)),
    (NEUTRAL, signal(), Mode.COMBINE, (None, True)),
    (NEUTRAL, NoSignal(), Mode.COMBINE, "neutral_without_hint"),
    (FAILED, signal(), Mode.COMBINE, (None, True)),
    (FAILED, NoSignal(), Mode.COMBINE, "failed_score"),
    ({**NEUTRAL, "explicit": True}, NoSignal(), Mode.COMBINE, (0.0, False)),
    ({**NEUTRAL, "explicit": True}, signal(), Mode.COMBINE, (0.0, True)),
    ({}, NoSignal("hint_too_long"), Mode.OPD, "no_signal_hint_too_long"),
    (FAILED, NoSignal("timeout"), Mode.COMBINE, "no_signal_timeout"),
    ({}, NoSignal("timeout"), Mode.COMBINE, (-0.5, False)),
]


@pytest.mark.parametrize(("values", "said", "mode", "expected"), TABLE)
def test_the_table(
    values: dict[str, Any], said: TeacherSignal | NoSignal, mode: Mode, expected: tuple[float | None, bool] | str
) -> None:
    sample = assemble(turn_event(1), score_event(**values), said, mode, created_at=NOW)
    if isinstance(expected, str):
        assert sample == NoSample(expected)
    else:
        assert isinstance(sample, SampleEvent)
        assert (sample.reward, sample.teacher) == (expected[0], said if expected[1] else None)
    asks = skip_before_reading(score_event(**values), mode, has_hint=said != NoSignal())
    if asks is not None:
        assert sample == asks, "what is skipped unread is what would be skipped anyway"


@pytest.mark.parametrize(
    ("values", "mode", "has_hint", "skip"),
    [
        (FAILED, Mode.BINARY, True, "failed_score"),
        (FAILED, Mode.COMBINE, True, None),
        (FAILED, Mode.COMBINE, False, "failed_score"),
        (NEUTRAL, Mode.COMBINE, False, "neutral_without_hint"),
        (NEUTRAL, Mode.BINARY, False, None),
        ({}, Mode.OPD, False, "no_hint"),
        ({}, Mode.OPD, True, None),
    ],
)
def test_a_turn_is_read_only_when_a_sample_may_come_of_it(
    values: dict[str, Any], mode: Mode, has_hint: bool, skip: str | None
) -> None:
    assert skip_before_reading(score_event(**values), mode, has_hint=has_hint) == (NoSample(skip) if skip else None)


def test_a_teacher_inside_the_trainer_gets_the_hinted_prompt() -> None:
    sample = assemble(turn_event(1), score_event(**FAILED), REQUEST, Mode.COMBINE, created_at=NOW)
    assert isinstance(sample, SampleEvent)
    assert (sample.reward, sample.teacher, sample.teacher_request) == (None, None, REQUEST)


@pytest.mark.parametrize("reason", list(UntrainableReason))
@pytest.mark.parametrize("said", [NoSignal(), signal()])
@pytest.mark.parametrize("mode", list(Mode))
def test_an_untrainable_turn_is_skipped_with_its_reason(
    reason: UntrainableReason, said: TeacherSignal | NoSignal, mode: Mode
) -> None:
    turn = turn_event(1, trainable=False, untrainable_reason=reason)
    assert assemble(turn, score_event(), said, mode, created_at=NOW) == NoSample(f"untrainable_{reason.value}")


@pytest.mark.parametrize("values", [{"turn_id": "turn-2"}, {"session_id": "session-9"}])
def test_a_turn_that_is_not_the_scores_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="score-1 is of turn"):
        assemble(turn_event(1), score_event(**values), NoSignal(), Mode.BINARY, created_at=NOW)


def test_a_signal_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 response ids but lengths \{'teacher.logprobs': 2\}"):
        assemble(turn_event(1), score_event(), signal(tokens=2), Mode.COMBINE, created_at=NOW)


EVIDENCE = st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 50))


def revision_of(epoch: int, explicit: bool, offset: int) -> tuple[int, bool, int]:
    reference = {"topic": "t", "partition": 0, "offset": offset}
    return revision(score_event(promotion_epoch=epoch, explicit=explicit, next_state_ref=reference)).order


@given(EVIDENCE, EVIDENCE)
def test_newer_specs_outrank_explicit_evidence_which_outranks_later_evidence(
    first: tuple[int, bool, int], second: tuple[int, bool, int]
) -> None:
    assert (revision_of(*first) < revision_of(*second)) == (first < second)


POSITION = RolloutPosition(task_id="t", group_id="g", rollout_id="r", step_index=1)


def test_in_a_rollout_a_judges_verdict_is_the_steps_reward() -> None:
    sample = assemble(
        turn_event(1, rollout=POSITION), score_event(rollout=POSITION), NoSignal(), Mode.BINARY, created_at=NOW
    )
    assert isinstance(sample, SampleEvent)
    assert (sample.reward, sample.step_reward, sample.rollout) == (None, -0.5, POSITION)


def test_an_outcome_keeps_reward_and_step_reward_apart_and_knows_where_the_rollout_ended() -> None:
    ended = POSITION.model_copy(update={"last_step_index": 1, "trainable_turns": 2})
    score = score_event(rollout=ended, explicit=True, reward=1.0, verdict=1, step_reward=-0.25)
    sample = assemble(turn_event(1, rollout=POSITION), score, NoSignal(), Mode.BINARY, created_at=NOW)
    assert isinstance(sample, SampleEvent)
    assert (sample.reward, sample.step_reward, sample.rollout) == (1.0, -0.25, ended)
    assert ended.is_last
    assert not POSITION.is_last
