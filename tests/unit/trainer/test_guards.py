"""Guards: measurement, verdict, action. Boundaries, and that a restart in the middle changes nothing."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DroppedSample, DropReason, GuardAction
from services.trainer.batcher import ClosedBatch
from services.trainer.candidates import Candidate
from services.trainer.guards import effective_samples, exploration, shift, signal
from services.trainer.guards.bounds import Bound, Breach
from services.trainer.guards.controls import StepControls
from services.trainer.guards.knobs import Direction, Knob, KnobRules, direction_of
from services.trainer.guards.settings import GuardsSection
from services.trainer.guards.watch import Guards
from services.trainer.sample import TrainingSample

REFERENCE = RecordReference(topic="samples", partition=0, offset=0)
ALL_ADAPT = {
    "exploration": {"policy": "adapt", "max_entropy_nats": 5.0},
    "signal": {"policy": "adapt"},
    "shift": {"policy": "adapt", "adapts": "kl_coefficient"},
    "effective_samples": {"policy": "adapt", "min_samples": 4},
}


def guards(
    state: Mapping[str, float] | None = None, options: Mapping[str, object] | None = None, **section: Any
) -> Guards:
    return Guards.restored(GuardsSection.model_validate(section), options or {}, state or {})


def sample(name: str, response: list[int], reward: float = 1.0) -> TrainingSample:
    return TrainingSample(
        sample_id=name,
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array(response, np.int32),
        behaviour_log_probs=np.zeros(len(response), np.float32),
        rl_mask=np.ones(len(response), np.bool_),
        reward=reward,
    )


def candidate(name: str, response: list[int], *, version: int = 0, reward: float = 1.0) -> Candidate:
    return Candidate(
        sample=sample(name, response, reward),
        turn_id=f"turn-{name}",
        session_id="session",
        revision=SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=0),
        ref=REFERENCE,
        oldest_version=version,
        reward=reward,
    )


def neutral(name: str) -> DroppedSample:
    return DroppedSample(sample_id=name, turn_id=name, ref=REFERENCE, reason=DropReason.ZERO_ADVANTAGE)


def batch(*candidates: Candidate, num_neutral: int = 0) -> ClosedBatch:
    return ClosedBatch(list(candidates), [neutral(str(number)) for number in range(num_neutral)], "count")


def short(actions: list[GuardAction]) -> list[tuple[str, str, str]]:
    return [(action.guard, action.action, action.measurement or action.knob) for action in actions]


# -- measurements


@pytest.mark.parametrize(
    ("answers", "diversity"),
    [
        ([[1, 2, 3]], 1.0),
        ([[1, 2, 3]] * 4, 0.25),
        ([[7], [7]], 0.5),
        ([[1, 2], [1, 3]], 0.75),
        ([[5, 5, 5, 5]], 0.5),
    ],
)
def test_diversity_is_the_share_of_distinct_bigrams(answers: list[list[int]], diversity: float) -> None:
    arrays = [np.array(answer, np.int32) for answer in answers]
    assert exploration.measure(arrays) == {"answer_diversity": diversity}


def test_repeated_answers_are_all_but_the_first() -> None:
    arrays = [np.array(answer, np.int32) for answer in ([1, 2], [3], [1, 2], [1], [3], [1, 2])]
    assert exploration.repeated(arrays) == [2, 4, 5]


def test_signal_counts_what_was_read_and_taught_nothing() -> None:
    samples = [sample("a", [1], 1.0), sample("b", [1], -1.0)]
    assert signal.measure(samples, 6) == {"signal_share": 0.25, "advantage_variance": 1.0}
    assert signal.measure([samples[0]], 0) == {"signal_share": 1.0}
    assert signal.measure([], 3) == {"signal_share": 0.0}
    assert signal.measure([], 0) == {}


def test_shift_and_effective_samples_of_nothing_are_no_numbers() -> None:
    assert shift.measure([0, 3]) == {"age_mean": 1.5, "age_max": 3.0}
    assert effective_samples.measure([sample("a", [1]), sample("b", [1], 0.0)]) == {"effective_samples": 1.0}
    assert shift.measure([]) == effective_samples.measure([]) == exploration.measure([]) == {}


# -- verdicts


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, None), (2.0, None), (math.nextafter(1.0, 0.0), 1.0), (math.nextafter(2.0, 3.0), 2.0), (math.inf, 2.0)],
)
def test_a_value_at_its_limit_is_good(value: float, expected: float | None) -> None:
    breach = Bound("shift", "x", low=1.0, high=2.0).breach({"x": value})
    assert (breach.limit if breach else None) == expected


def test_what_was_not_measured_is_no_breach() -> None:
    bound = Bound("shift", "x", low=1.0)
    assert bound.breach({}) is None
    assert bound.breach({"x": math.nan}) is None


LIMITS = [
    ("exploration", {"min_entropy_nats": 0.5}, "entropy_mean", 0.5, 0.49),
    ("exploration", {"max_entropy_nats": 3.0}, "entropy_mean", 3.0, 3.01),
    ("exploration", {"min_answer_diversity": 0.4}, "answer_diversity", 0.4, 0.39),
    ("signal", {"min_signal_share": 0.3}, "signal_share", 0.3, 0.29),
    ("signal", {"min_advantage_variance": 0.1}, "advantage_variance", 0.1, 0.09),
    ("shift", {"max_age_versions": 2}, "age_mean", 2.0, 2.1),
    ("shift", {"max_shift_nats": 0.2}, "shift_mean_abs", 0.2, 0.21),
    ("shift", {"min_effective_sample_share": 0.6}, "effective_sample_share", 0.6, 0.59),
    ("shift", {"max_clipped_share": 0.25}, "clipped_share", 0.25, 0.26),
    ("effective_samples", {"min_samples": 4}, "effective_samples", 4.0, 3.0),
]


@pytest.mark.parametrize(("guard", "limit", "measurement", "good", "bad"), LIMITS)
def test_every_limit_alerts_beyond_it_and_not_at_it(
    guard: str, limit: dict[str, float], measurement: str, good: float, bad: float
) -> None:
    watch = guards(**{guard: limit})
    assert watch.conclude({measurement: good}) == []
    (action,) = watch.conclude({measurement: bad})
    assert (action.guard, action.action, action.measurement, action.value) == (guard, "alert", measurement, bad)
    assert action.limit == next(iter(limit.values()))


@pytest.mark.parametrize(("guard", "limit", "measurement", "good", "bad"), LIMITS)
def test_every_limit_can_hold_a_step(
    guard: str, limit: dict[str, float], measurement: str, good: float, bad: float
) -> None:
    controls = guards(**{guard: {**limit, "policy": "hold"}}).controls()
    assert measurement in {bound.measurement for bound in controls.hold}
    assert [bound.breach({measurement: good}) for bound in controls.hold] == [None] * len(controls.hold)
    assert any(bound.breach({measurement: bad}) for bound in controls.hold)


def test_guards_that_only_alert_ask_nothing_of_a_step() -> None:
    assert guards().controls() == StepControls()


# -- hold and drop before the step


def test_a_batch_too_small_is_held_and_an_empty_one_needs_no_holding() -> None:
    watch = guards(effective_samples={"policy": "hold", "min_samples": 2})
    assert [str(each) for each in watch.inspect(batch(candidate("a", [1])), 0).held] == ["effective_samples 1 below 2"]
    assert watch.inspect(batch(candidate("a", [1]), candidate("b", [2])), 0).held == []
    assert watch.inspect(batch(num_neutral=3), 0).held == []


def test_what_was_held_is_told_once_and_as_held() -> None:
    watch = guards(shift={"policy": "hold", "max_shift_nats": 0.2, "min_effective_sample_share": 0.5})
    measured = {"shift_mean_abs": 0.3, "effective_sample_share": 0.4}
    held = [Breach("shift", "shift_mean_abs", 0.3, 0.2)]
    assert short(watch.conclude(measured, held=held)) == [
        ("shift", "hold", "shift_mean_abs"),
        ("shift", "alert", "effective_sample_share"),
    ]


def test_old_samples_are_dropped_by_their_own_age() -> None:
    watch = guards(shift={"policy": "drop", "max_age_versions": 2})
    inspection = watch.inspect(batch(candidate("new", [1], version=8), candidate("old", [2], version=7)), 10)
    assert [each.sample.sample_id for each in inspection.batch.candidates] == ["new"]
    assert [(d.sample_id, d.reason, d.detail) for d in inspection.dropped] == [
        ("old", DropReason.GUARD, "shift: age_mean 3 above 2")
    ]
    assert inspection.measurements["age_mean"] == 2
    (action,) = watch.conclude({}, dropped=inspection.reasons)
    assert (action.action, action.samples, action.value, action.limit) == ("drop", 1, 3.0, 2.0)


def test_repeated_answers_are_dropped_only_while_diversity_is_low() -> None:
    watch = guards(exploration={"policy": "drop", "min_answer_diversity": 0.6})
    same = [candidate(str(number), [1, 2]) for number in range(3)]
    inspection = watch.inspect(batch(*same, candidate("other", [3])), 0)
    assert [each.sample.sample_id for each in inspection.batch.candidates] == ["0", "other"]
    assert len(inspection.dropped) == 2
    diverse = watch.inspect(batch(same[0], same[1], candidate("other", [3, 4, 5, 6, 7])), 0)
    assert diverse.dropped == []


def test_samples_are_blamed_by_what_the_step_measures_of_them() -> None:
    controls = guards(shift={"policy": "drop", "max_shift_nats": 0.5}).controls()
    samples = [{"shift_mean_abs": 0.5}, {"shift_mean_abs": 0.6}, {}]
    assert {place: str(each) for place, each in controls.offenders(samples).items()} == {
        1: "shift_mean_abs 0.6 above 0.5"
    }
    assert StepControls.from_document(json.loads(json.dumps(controls.as_document()))) == controls


# -- knobs


RULES = KnobRules(configured=0.0, low=0.0, high=0.01, step=2.0, decay=0.5, first_raise=0.001)


def test_a_knob_moves_from_0_by_its_first_raise_and_stays_within_its_limits() -> None:
    values = [0.0]
    for _ in range(6):
        values.append(RULES.moved(values[-1], Direction.UP))
    assert values == pytest.approx([0.0, 0.001, 0.002, 0.004, 0.008, 0.01, 0.01])
    rate = KnobRules(configured=1.0, low=0.1, high=1.0, step=2.0, decay=0.9)
    assert [rate.moved(1.0, Direction.DOWN), rate.moved(0.15, Direction.DOWN)] == [0.5, 0.1]


def test_a_knob_goes_all_the_way_back() -> None:
    values = [0.01]
    while values[-1] != 0.0:
        values.append(RULES.decayed(values[-1]))
        assert len(values) < 20
    assert values[:3] == pytest.approx([0.01, 0.005, 0.0025])


@pytest.mark.parametrize(
    ("knob", "low", "high", "expected"),
    [
        (Knob.ENTROPY_COEFFICIENT, True, False, Direction.UP),
        (Knob.ENTROPY_COEFFICIENT, False, True, Direction.DOWN),
        (Knob.ENTROPY_COEFFICIENT, True, True, Direction.UP),
        (Knob.LEARNING_RATE, True, False, Direction.DOWN),
        (Knob.LEARNING_RATE, False, True, Direction.DOWN),
        (Knob.KL_COEFFICIENT, False, True, Direction.UP),
    ],
)
def test_which_way_helps(knob: Knob, low: bool, high: bool, expected: Direction) -> None:
    assert direction_of(knob, exploration_is_low=low, exploration_is_high=high) is expected


def test_adapt_turns_the_knob_for_the_next_step_and_back_while_all_is_well() -> None:
    watch = guards(exploration={"policy": "adapt", "min_entropy_nats": 0.5, "min_answer_diversity": None})
    assert watch.controls().coefficients == {"entropy_coefficient": 0.0}
    (action,) = watch.conclude({"entropy_mean": 0.4})
    assert (action.action, action.knob, action.before, action.after) == ("adapt", "entropy_coefficient", 0.0, 0.0005)
    assert watch.controls().coefficients == {"entropy_coefficient": 0.0005}
    assert watch.conclude({}) == [], "a step that measured nothing says nothing"
    assert watch.controls().coefficients == {"entropy_coefficient": 0.0005}
    (action,) = watch.conclude({"entropy_mean": 0.5})
    assert (action.action, action.before, action.after) == ("decay", 0.0005, pytest.approx(0.00045))


def test_several_guards_turn_one_knob_by_one_step() -> None:
    watch = guards(shift={"policy": "adapt"}, effective_samples={"policy": "adapt", "min_samples": 4})
    actions = watch.conclude({"shift_mean_abs": 9.0, "effective_samples": 1.0})
    assert [(action.guard, action.after) for action in actions] == [("shift", 0.5), ("effective_samples", 0.5)]
    assert watch.learning_rate_factor == 0.5
    assert watch.conclude({"shift_mean_abs": 9.0, "effective_samples": 8.0})[0].after == 0.25, "one that is well waits"


def test_knobs_of_a_checkpoint_are_brought_within_todays_limits_and_forgotten_when_nobody_turns_them() -> None:
    state = {"entropy_coefficient": 0.5, "learning_rate": 0.2}
    watch = guards(state, exploration={"policy": "adapt"})
    assert watch.state == {"entropy_coefficient": 0.01}
    assert guards(state).state == {}


MEASUREMENTS = st.fixed_dictionaries(
    {},
    optional={
        "entropy_mean": st.sampled_from([0.01, 0.05, 1.0, 6.0]),
        "answer_diversity": st.sampled_from([0.0, 0.5]),
        "signal_share": st.sampled_from([0.0, 0.9]),
        "shift_mean_abs": st.sampled_from([0.1, 3.0]),
        "effective_samples": st.sampled_from([1.0, 16.0]),
    },
)


@given(steps=st.lists(MEASUREMENTS, max_size=30), data=st.data())
def test_a_restart_changes_no_coefficient(steps: list[dict[str, float]], data: st.DataObject) -> None:
    options: dict[str, object] = {"entropy_coefficient": 0.002}
    through, restarted = guards(None, options, **ALL_ADAPT), guards(None, options, **ALL_ADAPT)
    for step in steps:
        if data.draw(st.booleans()):
            restarted = guards(json.loads(json.dumps(restarted.state)), options, **ALL_ADAPT)
        assert restarted.conclude(step) == through.conclude(step)
        assert restarted.state == through.state
        assert restarted.controls() == through.controls()
        for knob, rules in through.rules.items():
            assert rules.low <= through.state[knob.value] <= rules.high


# -- settings


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"effective_samples": {"policy": "hold"}}, "effective_samples.policy=hold without any limit"),
        ({"exploration": {"min_entropy_nats": 2, "max_entropy_nats": 2}}, "must be below max_entropy_nats"),
        ({"signal": {"policy": "drop"}}, "signal.policy=drop: no single sample"),
        ({"effective_samples": {"policy": "drop", "min_samples": 2}}, "effective_samples.policy=drop: no single"),
        (
            {"shift": {"policy": "drop", "min_effective_sample_share": 0.5}},
            "min_effective_sample_share with policy=drop",
        ),
        ({"learning_rate": {"low": 1.0, "high": 1.0}}, "must be below high"),
        ({"learning_rate": {"low": 0.1, "high": 1.0, "step": 1.0}}, "greater than 1"),
        ({"kl_coefficient": {"low": 0.0, "high": 0.1, "first_raise": 0.2}}, "is above high"),
        (
            {"exploration": {"policy": "adapt"}, "entropy_coefficient": {"low": 0, "high": 0.1}},
            "a factor never moves a coefficient of 0",
        ),
        ({"shift": {"adapts": "entropy_coefficient"}}, "adapts"),
    ],
)
def test_limits_that_contradict_one_another_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GuardsSection.model_validate(section)
