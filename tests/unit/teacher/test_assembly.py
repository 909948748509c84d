"""The table from turn, score and teacher's signal to a sample."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream import ids
from schemas.arrays import float32_array
from schemas.events import SampleEvent, ScoreEvent
from schemas.events.sample import TeacherSignal
from schemas.events.turn import UntrainableReason
from services.teacher.assembly import NoSample, assemble, revision, skip_before_reading
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
    sample = assemble(turn, score, None, created_at=NOW)
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


def test_score_and_signal_make_both_components() -> None:
    sample = assemble(turn_event(1), score_event(), signal(), created_at=NOW)
    assert isinstance(sample, SampleEvent)
    assert (sample.reward, sample.teacher) == (-0.5, signal())


def test_a_signal_without_a_verdict_is_distillation_alone() -> None:
    sample = assemble(turn_event(1), score_event(**FAILED), signal(), created_at=NOW)
    assert isinstance(sample, SampleEvent)
    assert (sample.reward, sample.teacher) == (None, signal())


def test_neither_verdict_nor_signal_is_nothing() -> None:
    assert assemble(turn_event(1), score_event(**FAILED), None, created_at=NOW) == NoSample("failed_score")
    assert skip_before_reading(score_event(**FAILED)) == NoSample("failed_score")
    assert skip_before_reading(score_event()) is None


def test_a_neutral_verdict_is_a_sample_that_the_trainer_decides_about() -> None:
    sample = assemble(turn_event(1), score_event(verdict=0, reward=0.0), None, created_at=NOW)
    assert isinstance(sample, SampleEvent)
    assert sample.reward == 0.0


@pytest.mark.parametrize("reason", list(UntrainableReason))
@pytest.mark.parametrize("teacher", [None, signal()])
def test_an_untrainable_turn_is_skipped_with_its_reason(
    reason: UntrainableReason, teacher: TeacherSignal | None
) -> None:
    turn = turn_event(1, trainable=False, untrainable_reason=reason)
    assert assemble(turn, score_event(), teacher, created_at=NOW) == NoSample(f"untrainable_{reason.value}")


@pytest.mark.parametrize("values", [{"turn_id": "turn-2"}, {"session_id": "session-9"}])
def test_a_turn_that_is_not_the_scores_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="score-1 is of turn"):
        assemble(turn_event(1), score_event(**values), None, created_at=NOW)


def test_a_signal_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 response ids but lengths \{'teacher.logprobs': 2\}"):
        assemble(turn_event(1), score_event(), signal(tokens=2), created_at=NOW)


EVIDENCE = st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 50))


def revision_of(epoch: int, explicit: bool, offset: int) -> tuple[int, bool, int]:
    reference = {"topic": "t", "partition": 0, "offset": offset}
    return revision(score_event(promotion_epoch=epoch, explicit=explicit, next_state_ref=reference)).order


@given(EVIDENCE, EVIDENCE)
def test_newer_specs_outrank_explicit_evidence_which_outranks_later_evidence(
    first: tuple[int, bool, int], second: tuple[int, bool, int]
) -> None:
    assert (revision_of(*first) < revision_of(*second)) == (first < second)
