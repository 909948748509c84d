"""Served against trained, on events and on a log."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from clawstream import topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.codec import encode
from clawstream.reports.drift import UNKNOWN, Dimension, DriftReport, drift, length_group
from clawstream.reports.window import Window, events_within
from clawstream.topics import full_name, topic_definitions
from clawstream.topics_admin import apply_topics
from schemas.arrays import float32_array, int32_array
from schemas.events import TrainStepEvent, TurnEvent
from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import TrainedSample
from tests.fixtures.judged_log import NOW, turn_event
from tests.fixtures.weights import write

NAMESPACE = "clawstream"


def turn(name: str, principal: str, *, tokens: int = 3, temperature: float = 0.7, **values: Any) -> TurnEvent:
    return turn_event(
        0,
        turn_id=name,
        principal=principal,
        response_ids=int32_array([1] * tokens),
        response_logprobs=float32_array([-1.0] * tokens),
        version_spans=[{"weight_version": 2, "start": 0, "end": tokens}],
        sampling={"temperature": temperature, "max_new_tokens": 99},
        **values,
    )


def trained(name: str, principal: str, *, tokens: int = 3, temperature: float | None = 0.7) -> TrainedSample:
    return TrainedSample(
        sample_id=f"sample-{name}",
        turn_id=name,
        revision=SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=0),
        ref=RecordReference(topic="samples", partition=0, offset=0),
        age=1,
        reward=-1.0,
        response_tokens=tokens,
        principal=principal,
        sampling_temperature=temperature,
    )


def step(number: int, *samples: TrainedSample, version: int | None = 4, policy: str = "default") -> TrainStepEvent:
    return TrainStepEvent(
        train_step_id=f"step-{number}",
        lineage="run",
        policy=policy,
        step=number,
        base_version=3,
        weight_version=version,
        closed_by="count",
        samples=list(samples),
        drops=[],
        started_at=NOW,
        finished_at=NOW,
    )


def by(report: DriftReport, name: str) -> Dimension:
    return next(dimension for dimension in report.dimensions if dimension.name == name)


def test_one_loud_user_shows() -> None:
    served = [turn(f"a{n}", "alice") for n in range(90)] + [turn(f"b{n}", "bob") for n in range(10)]
    report = drift("default", [*served, step(1, *(trained(f"b{n}", "bob") for n in range(9)), trained("a0", "alice"))])
    assert (report.served, report.trained, report.trainable) == (100, 10, 100)
    users = by(report, "user")
    assert users.distance == pytest.approx(0.8)
    assert users.effective_served == pytest.approx(1 / (0.9**2 + 0.1**2))
    assert [(row.group, row.served, row.trained, row.mean_reward) for row in users.groups] == [
        ("alice", 90, 1, -1.0),
        ("bob", 10, 9, -1.0),
    ]
    assert by(report, "temperature").distance == by(report, "length").distance == 0
    assert "differs from what is served by user (80% apart" in report.headline


def test_the_same_shares_are_no_drift() -> None:
    served = [turn(f"{name}{n}", name) for name in ("alice", "bob") for n in range(4)]
    report = drift("default", [step(1, trained("alice0", "alice"), trained("bob0", "bob")), *served])
    assert [dimension.distance for dimension in report.dimensions] == [0, 0, 0, 0]
    assert report.headline == "what is trained looks like what is served"


def test_by_chance_is_what_fair_draws_show_on_average() -> None:
    random = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.2])
    draws = random.multinomial(400, shares, size=2000) / 400
    expected = (np.abs(draws - shares).sum(1) / 2).mean()
    served = [turn(f"{name}{n}", name) for name, count in (("a", 50), ("b", 30), ("c", 20)) for n in range(count)]
    report = drift("default", [*served, step(1, *(trained(f"x{n}", "a") for n in range(400)))])
    assert by(report, "user").by_chance == pytest.approx(expected, rel=0.03)


def test_what_counts_as_served_and_as_trained() -> None:
    events = [
        turn("main", "alice"),
        turn("side", "alice", turn_type="side"),
        turn("foreign", "alice", policy="other"),
        turn("greedy", "alice", trainable=False, untrainable_reason="altered_distribution"),
        step(1, trained("main", "alice")),
        step(2, trained("held", "alice"), version=None),
        step(3, trained("elsewhere", "alice"), policy="other"),
    ]
    report = drift("default", events)
    assert (report.served, report.trainable, report.trained) == (2, 1, 1)
    assert [row.group for row in by(report, "weight version").groups] == ["version 2"]


def test_old_events_are_completed_from_turns_where_they_are_retained() -> None:
    old = [trained("known", "", temperature=None), trained("gone", "", temperature=None)]
    report = drift("default", [turn("known", "alice"), step(1, *old)])
    assert {row.group: row.trained for row in by(report, "user").groups} == {"alice": 1, UNKNOWN: 1}
    assert {row.group: row.trained for row in by(report, "temperature").groups} == {"T = 0.7": 1, UNKNOWN: 1}


def test_nothing_is_nothing_to_compare() -> None:
    assert "nothing to compare" in drift("default", []).headline


@pytest.mark.parametrize(
    ("tokens", "group"),
    [(0, "0 tokens"), (1, "1 tokens"), (2, "2-2 tokens"), (3, "3-4 tokens"), (4, "3-4 tokens"), (5, "5-8 tokens")],
)
def test_lengths_are_grouped_by_powers_of_two(tokens: int, group: str) -> None:
    assert length_group(tokens) == group


def test_only_the_window_is_read() -> None:
    bus = MemoryBus()
    apply_topics(bus.admin(), NAMESPACE, 1, topic_definitions().values())
    topic = full_name(NAMESPACE, topics.TURNS)
    now = datetime.now(UTC)

    def record(name: str, partition: int) -> OutgoingRecord:
        event = turn(name, "alice")
        return encode(event, topic=topic, key=name, event_id=name, source="tests", partition=partition)

    write(bus, *(record(f"turn-{number}", number % 3) for number in range(7)))
    around = Window(now - timedelta(minutes=5), now + timedelta(minutes=5))
    found = [event.turn_id for event in events_within(bus, [topic], around) if isinstance(event, TurnEvent)]
    assert sorted(found) == [f"turn-{number}" for number in range(7)]
    later = Window(now + timedelta(minutes=5), now + timedelta(minutes=6))
    earlier = Window(now - timedelta(minutes=6), now - timedelta(minutes=5))
    assert list(events_within(bus, [topic], later)) == list(events_within(bus, [topic], earlier)) == []
