"""The judge against explicit evidence and held-out truth."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from clawstream.errors import SettingsError
from clawstream.reports.evaluation_file import read_evaluation
from clawstream.reports.judge_gap import judge_gap, version_number
from schemas.events import ScoreEvent
from schemas.events.base import RecordReference
from tests.fixtures.judged_log import NOW, turn_event


def score(turn: str, verdict: int | None, *, explicit: bool = False, offset: int = 0, **values: Any) -> ScoreEvent:
    reference = RecordReference(topic="next-states", partition=0, offset=offset)
    return ScoreEvent.model_validate(
        {
            "score_id": f"{turn}-{explicit}-{offset}-{values.get('judge_spec_hash', '')}",
            "next_state_id": turn,
            "next_state_ref": reference,
            "turn_id": turn,
            "turn_ref": RecordReference(topic="turns", partition=0, offset=0),
            "session_id": "session",
            "principal": "alice",
            "judge_spec_hash": "spec",
            "explicit": explicit,
            "status": "failed" if verdict is None else "scored",
            "verdict": verdict,
            "reward": None if verdict is None else float(verdict),
            "judged_at": NOW,
            **values,
        }
    )


def pairs(*verdicts: tuple[int, int]) -> list[ScoreEvent]:
    found: list[ScoreEvent] = []
    for number, (judge, truth) in enumerate(verdicts):
        found += [score(str(number), judge), score(str(number), truth, explicit=True, offset=1)]
    return found


def test_a_kind_judge_is_found_out() -> None:
    report = judge_gap(pairs((1, -1), (1, 1), (1, -1), (1, 1), (-1, -1), (1, -1)))
    whole = report.overall
    assert (whole.judged, whole.pairs, whole.false_praise, whole.false_blame) == (6, 6, 3, 0)
    assert whole.agreement == pytest.approx(0.5)
    assert whole.kappa == pytest.approx((1 / 2 - (5 * 2 + 1 * 4) / 36) / (1 - 14 / 36))
    assert whole.gap == pytest.approx(1.0)
    assert whole.gap_standard_error == pytest.approx(1.0954451 / 6**0.5)
    assert whole.confusion == {"+1/+1": 2, "+1/-1": 3, "-1/-1": 1}
    assert "agrees with explicit evidence on 50% of 6 turns and is too kind by 1.00 +- 0.45" in report.headline


def test_an_honest_judge_has_no_gap() -> None:
    report = judge_gap(pairs((1, 1), (-1, -1), (0, 0)))
    assert (report.overall.gap, report.overall.agreement, report.overall.kappa) == (0.0, 1.0, 1.0)
    assert "not distinguishable from none" in report.headline


def test_agreement_that_chance_explains_has_no_kappa() -> None:
    assert judge_gap(pairs((1, 1), (1, 1))).overall.kappa is None


def test_of_each_turn_the_newest_scores_count_in_any_order() -> None:
    events = [
        score("t", 1, offset=5, promotion_epoch=1, judge_spec_hash="new"),
        score("t", -1, offset=9, judge_spec_hash="old"),
        score("t", -1, offset=3, explicit=True),
        score("t", 1, offset=7, explicit=True),
    ]
    for order in (events, events[::-1]):
        whole = judge_gap(order).overall
        assert (whole.pairs, whole.agreement) == (1, 1.0)


def test_specs_are_told_apart_and_failed_scores_counted() -> None:
    events = [
        score("a", 1, judge_spec_hash="kind"),
        score("b", -1, judge_spec_hash="strict"),
        score("a", -1, explicit=True, offset=1),
        score("b", -1, explicit=True, offset=1),
        score("c", None),
    ]
    report = judge_gap(events)
    assert {row.judge_spec_hash: row.agreement for row in report.by_spec} == {"kind": 0.0, "strict": 1.0}
    assert report.failed == 1


def test_without_explicit_evidence_nothing_is_claimed() -> None:
    report = judge_gap([score("a", 1)])
    assert report.overall.gap is None
    assert "nothing says whether the judge is right" in report.headline
    assert "one pair says nothing" in judge_gap(pairs((1, 1))).headline


def test_a_version_that_pleases_only_the_judge_shows_against_held_out_truth(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    versions = [
        {"name": "control", "estimates": {"satisfied": {"mean": 0.2}, "correct": {"mean": 0.9}}},
        {"name": "version-4", "estimates": {"satisfied": {"mean": 0.25}, "correct": None}},
        {"name": "mine", "estimates": {"satisfied": {"mean": 0.5}, "correct": {"mean": 0.5}}},
    ]
    file.write_bytes(orjson.dumps({"comparison": {"versions": versions}}))
    spans = [{"weight_version": 4, "start": 0, "end": 3}]
    events = [
        turn_event(1),
        turn_event(2, version_spans=spans),
        turn_event(3, version_spans=spans),
        score("turn-1", -1),
        score("turn-2", 1),
        score("turn-3", 1),
    ]
    control, fourth, mine = judge_gap(events, read_evaluation(file)).versions
    assert (control.judged, control.judge_reward, control.held_out_reward) == (1, -1.0, pytest.approx(-0.6))
    assert (fourth.judged, fourth.judge_reward, fourth.gap, fourth.correct) == (2, 1.0, pytest.approx(1.5), None)
    assert (mine.weight_version, mine.judged, mine.gap) == (None, 0, None)


@pytest.mark.parametrize("content", [b"{}", b"no json", b'{"comparison": {"versions": [{"name": "x"}]}}'])
def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="is no report of `clawstream eval`"):
        read_evaluation(file)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_evaluation(tmp_path / "missing.json")


@pytest.mark.parametrize(("name", "number"), [("v12", 12), ("weights/3", 3), ("control", 0), ("mine", None)])
def test_names_of_versions(name: str, number: int | None) -> None:
    assert version_number(name) == number
