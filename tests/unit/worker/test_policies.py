"""When to flush, when to pause, when to give up."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from clawstream.bus.interface import Record, TopicPartition
from clawstream.clock import ManualClock
from clawstream.codec import header
from clawstream.errors import TooManyDeadLetters
from clawstream.worker.backpressure import Backpressure, Change
from clawstream.worker.dead_letters import DeadLetterLimit, dead_letter_record
from clawstream.worker.flush_policy import FlushPolicy
from clawstream.worker.outcomes import DeadLetter

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
NOTHING = Change([], [])


def test_nothing_finished_is_never_flushed() -> None:
    assert not FlushPolicy(0.25, 50).due(0, 0, 100.0)


def test_the_last_result_is_flushed_at_once() -> None:
    assert FlushPolicy(0.25, 50).due(1, 0, 0.0)


def test_enough_results_are_flushed_though_more_are_under_way() -> None:
    policy = FlushPolicy(0.25, 50)
    assert not policy.due(49, 1, 0.0)
    assert policy.due(50, 1, 0.0)


def test_the_wait_follows_the_cost_of_a_flush_up_to_the_ceiling() -> None:
    policy = FlushPolicy(0.25, 50)
    assert not policy.due(1, 1, 10.0)
    assert policy.due(1, 1, 10.05), "a flush of 10 ms: wait 40 ms"
    for _ in range(50):
        policy.flushed(5.0)
    assert not policy.due(1, 1, 20.0)
    assert not policy.due(2, 1, 20.2)
    assert policy.due(2, 1, 20.25)


@given(costs=st.lists(st.floats(0, 100)), in_flight=st.integers(0, 5), now=st.floats(0, 1e6))
def test_no_result_waits_longer_than_the_ceiling(costs: list[float], in_flight: int, now: float) -> None:
    policy = FlushPolicy(0.25, 50)
    for cost in costs:
        policy.flushed(cost)
    policy.due(1, in_flight, now)
    assert policy.due(1, in_flight, now + 0.251)


STUCK, QUICK = 1.0, 0.99
"""Seconds: when a partition that holds many inputs counts as stuck, and when not yet."""


def test_a_stuck_partition_is_paused_and_resumed_with_hysteresis() -> None:
    backpressure = Backpressure(window_per_partition=4, capacity=100)
    assert backpressure.update({A: 8, B: 0}, {A: 7}, 0.0) == NOTHING
    assert backpressure.update({A: 8, B: 0}, {A: 7}, QUICK) == NOTHING
    assert backpressure.update({A: 8, B: 0}, {A: 7}, STUCK) == Change([A], [])
    assert backpressure.update({A: 8, B: 0}, {A: 7}, 1.5) == NOTHING
    assert backpressure.update({A: 5, B: 0}, {A: 10}, 5.0) == NOTHING, "not yet half as many"
    assert backpressure.update({A: 4, B: 0}, {A: 11}, 5.0) == Change([], [A])
    assert backpressure.update({A: 8, B: 0}, {A: 11}, 5.0 + STUCK) == Change([A], [])
    assert backpressure.update({A: 0, B: 0}, {}, 6.9) == NOTHING, "paused for less than a second"
    assert backpressure.update({A: 0, B: 0}, {}, 7.0) == Change([], [A])


def test_a_partition_with_few_inputs_is_never_paused_however_slow_they_are() -> None:
    backpressure = Backpressure(window_per_partition=4, capacity=100)
    assert backpressure.update({A: 7, B: 0}, {A: 7}, 0.0) == NOTHING
    assert backpressure.update({A: 7, B: 0}, {A: 7}, 900.0) == NOTHING
    assert backpressure.room({A: 7, B: 0}) == 93


@given(steps=st.lists(st.tuples(st.integers(0, 100), st.floats(0.0, QUICK)), max_size=30))
def test_a_backlog_of_one_partition_that_goes_on_is_read_without_a_pause(steps: list[tuple[int, float]]) -> None:
    backpressure, now = Backpressure(window_per_partition=4, capacity=100), 0.0
    for number, (count, seconds) in enumerate(steps):
        assert backpressure.update({A: count, B: 0}, {A: number} if count else {}, now) == NOTHING
        now += seconds


def test_no_more_is_read_before_a_partition_that_holds_many_has_gone_on() -> None:
    backpressure = Backpressure(window_per_partition=4, capacity=100)
    backpressure.update({A: 8, B: 0}, {A: 7}, 0.0)
    assert backpressure.room({A: 8, B: 0}) == 0
    backpressure.update({A: 8, B: 0}, {A: 8}, 0.01)
    assert backpressure.room({A: 8, B: 0}) == 92
    backpressure.update({A: 8, B: 0}, {A: 9}, 0.02 + STUCK)
    assert backpressure.room({A: 8, B: 0}) == 0, "it went on, but slowly"
    backpressure.update({A: 8, B: 0}, {A: 10}, 0.03 + STUCK)
    assert backpressure.room({A: 8, B: 0}) == 92
    backpressure.update({A: 0, B: 0}, {}, 0.04 + STUCK)
    backpressure.update({A: 9, B: 0}, {A: 20}, 900.0)
    assert backpressure.room({A: 9, B: 0}) == 0, "what was long ago says nothing"


def test_a_partition_holds_many_at_128_if_its_window_is_larger() -> None:
    backpressure = Backpressure(window_per_partition=1000, capacity=500)
    backpressure.update({A: 127, B: 0}, {A: 7}, 0.0)
    assert backpressure.update({A: 127, B: 0}, {A: 7}, STUCK) == NOTHING
    assert backpressure.update({A: 128, B: 0}, {A: 7}, STUCK) == Change([A], [])


def test_a_paused_partition_takes_no_room_from_others() -> None:
    backpressure = Backpressure(window_per_partition=4, capacity=10)
    assert backpressure.room({A: 9, B: 0}) == 1
    backpressure.update({A: 9, B: 0}, {A: 7}, 0.0)
    backpressure.update({A: 9, B: 0}, {A: 7}, STUCK)
    assert backpressure.room({A: 9, B: 0}) == 10
    assert backpressure.room({A: 9, B: 12}) == 0


def test_all_are_paused_at_twice_the_capacity() -> None:
    backpressure = Backpressure(window_per_partition=1000, capacity=10)
    assert backpressure.update({A: 10, B: 9}, {A: 1, B: 1}, 0.0) == NOTHING
    assert backpressure.update({A: 10, B: 10}, {A: 2, B: 2}, 0.0) == Change([A, B], [])


def test_a_partition_that_left_and_came_back_is_not_taken_for_paused() -> None:
    backpressure = Backpressure(window_per_partition=4, capacity=100)
    backpressure.update({A: 8}, {A: 7}, 0.0)
    backpressure.update({A: 8}, {A: 7}, STUCK)
    backpressure.update({}, {}, 1.5)
    assert backpressure.update({A: 8}, {A: 7}, 2.0) == NOTHING
    assert backpressure.update({A: 8}, {A: 7}, 2.0 + STUCK) == Change([A], [])


def test_a_partition_that_came_back_before_anyone_saw_it_gone_is_not_taken_for_paused() -> None:
    backpressure = Backpressure(window_per_partition=4, capacity=100)
    backpressure.update({A: 8}, {A: 7}, 0.0)
    backpressure.update({A: 8}, {A: 7}, STUCK)
    assert backpressure.room({A: 60}) == 100, "paused, and not counted"
    backpressure.forget([A])
    assert backpressure.room({A: 60}) == 40
    assert backpressure.update({A: 8}, {A: 7}, 2.0) == NOTHING
    assert backpressure.update({A: 8}, {A: 7}, 2.0 + STUCK) == Change([A], [])


def test_dead_letters_stop_a_worker_only_when_they_are_many_of_many() -> None:
    limit = DeadLetterLimit(max_share=0.5, window=10)
    for number in range(100):
        limit.add(number % 2 == 0)
    limit.add(True)
    with pytest.raises(TooManyDeadLetters, match="6 of the last 10"):
        limit.add(True)


def test_a_few_dead_letters_at_the_start_are_no_reason() -> None:
    limit = DeadLetterLimit(max_share=0.5, window=10)
    for _ in range(9):
        limit.add(True)
    with pytest.raises(TooManyDeadLetters):
        limit.add(True)


@given(message=st.text(min_size=300, max_size=600), value=st.none() | st.binary(), key=st.none() | st.binary())
def test_a_dead_letter_keeps_the_original_and_its_message_is_valid_text(
    message: str, value: bytes | None, key: bytes | None
) -> None:
    original = Record("in.v1", 3, 77, key, value, (("ce_id", b"1"), ("dlq.offset", b"from an earlier life")), 5)
    letter = dead_letter_record(
        original,
        DeadLetter("undecodable", ValueError(message), attempts=2),
        topic="x.dlq.v1",
        group="g",
        service_version="1.0",
        now=ManualClock().now(),
    )
    assert (letter.key, letter.value, letter.headers[:2]) == (key, value, original.headers)
    assert header(letter.headers, "dlq.offset") == "77"
    assert header(letter.headers, "dlq.time") == "2026-01-01T00:00:00+00:00"
    cut = dict(letter.headers)["dlq.error.message"]
    assert len(cut) <= 512
    assert message.startswith(cut.decode())
    assert sum(len(name) + len(each) for name, each in letter.headers) < 4096
