"""The batcher: never twice, never lost, the highest revision wins, whatever the order."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.events.base import RecordReference
from schemas.events.sample import SampleRevision
from schemas.events.train_step import DropReason
from services.trainer.batcher import Batcher, BatchRules, ClosedBatch
from services.trainer.candidates import Candidate
from services.trainer.sample import TrainingSample
from services.trainer.turn_ledger import LedgerEntry, LedgerMark, TurnLedger
from tests.fixtures.turn_ledgers import MemoryTurns, empty_ledger

RULES = BatchRules(batch_size=3, max_batch_age_seconds=60.0, max_age_versions=4)


def candidate(
    turn: str, *, revision: int = 0, reward: float = 1.0, version: int = 0, offset: int = 0, session: str = "s"
) -> Candidate:
    sample = TrainingSample(
        sample_id=f"{turn}/{revision}",
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array([2, 3], np.int32),
        behaviour_log_probs=np.array([-1.0, -1.0], np.float32),
        rl_mask=np.array([True, True]),
        reward=reward,
    )
    return Candidate(
        sample,
        turn,
        session,
        SampleRevision(promotion_epoch=0, explicit=False, next_state_offset=revision),
        RecordReference(topic="samples", partition=0, offset=offset),
        version,
        reward,
        newest_version=version,
        outcome=reward,
    )


def new_batcher(rules: BatchRules = RULES, ledger: TurnLedger | None = None, version: int = 0) -> Batcher:
    return Batcher(rules, ledger if ledger is not None else empty_ledger(), current_version=version)


def close(batcher: Batcher, closed_by: str = "age") -> ClosedBatch:
    return batcher.close(closed_by, 0.0, 0.0)


def trained(batch: ClosedBatch) -> list[str]:
    return [each.sample.sample_id for each in batch.candidates]


def reasons(batch: ClosedBatch) -> dict[str, DropReason]:
    return {dropped.sample_id: dropped.reason for dropped in batch.drops}


def test_closes_on_count_with_the_oldest_and_keeps_the_rest() -> None:
    batcher = new_batcher()
    for number in range(5):
        assert batcher.closes(0.0) == (None if number < 3 else "count")
        batcher.add(candidate(f"t{number}"), 0.0)
    batch = close(batcher, "count")
    assert trained(batch) == ["t0/0", "t1/0", "t2/0"]
    assert [each.turn_id for each in batcher.waiting()] == ["t3", "t4"]
    assert batcher.closes(0.0) is None


def test_dead_letters_close_a_batch_by_number_by_bytes_and_by_age() -> None:
    rules = BatchRules(
        batch_size=3, max_batch_age_seconds=60.0, max_age_versions=4, max_drops=2, max_dead_letter_bytes=100
    )
    for sizes, now_seconds, closed_by in (
        ([1], 59.0, None),
        ([1], 60.0, "age"),
        ([1, 1], 0.0, "drops"),
        ([100], 0.0, "drops"),
    ):
        batcher = new_batcher(rules)
        for size_bytes in sizes:
            batcher.dead_letter(size_bytes, 0.0)
        assert batcher.closes(now_seconds) == closed_by
        close(batcher)
        assert batcher.closes(100.0) is None


def test_closes_on_the_age_of_the_oldest() -> None:
    batcher = new_batcher()
    assert batcher.closes(1e9) is None
    batcher.add(candidate("t0"), 10.0)
    batcher.add(candidate("t1"), 50.0)
    batcher.add(candidate("t0", revision=1), 55.0)
    assert batcher.closes(69.9) is None
    assert batcher.closes(70.0) == "age", "a new revision does not make the turn wait anew"
    assert trained(close(batcher)) == ["t1/0", "t0/1"]


def test_samples_without_signal_do_not_count_and_are_listed() -> None:
    batcher = new_batcher()
    for number in range(5):
        batcher.add(candidate(f"t{number}", reward=0.0), 0.0)
    assert batcher.have == 0
    assert batcher.closes(0.0) is None
    assert batcher.closes(60.0) == "age", "the offsets must move"
    batch = close(batcher)
    assert batch.candidates == []
    assert set(reasons(batch).values()) == {DropReason.ZERO_ADVANTAGE}
    assert batcher.closes(1e9) is None


def test_closes_when_too_many_drops_would_not_fit_in_an_event() -> None:
    batcher = new_batcher(BatchRules(batch_size=3, max_batch_age_seconds=60.0, max_age_versions=None, max_drops=10))
    for number in range(10):
        batcher.add(candidate(f"t{number}", reward=0.0), 0.0)
    assert batcher.closes(0.0) == "drops"


def test_at_least_one_counts_a_session_once_and_trains_nothing_of_it() -> None:
    rules = BatchRules(batch_size=3, max_batch_age_seconds=60.0, max_age_versions=4, at_least_one=True)
    batcher = new_batcher(rules)
    for number in range(4):
        batcher.add(candidate(f"n{number}", reward=0.0, session="neutral"), 0.0)
    batcher.add(candidate("a", session="alice"), 0.0)
    batcher.add(candidate("b", reward=0.0, session="alice"), 0.0)
    assert batcher.have == 2
    batcher.add(candidate("c", session="carol"), 0.0)
    assert batcher.closes(0.0) == "count"
    batch = close(batcher, "count")
    assert trained(batch) == ["a/0", "c/0"]
    assert len(batch.drops) == 5


def test_age_in_versions_is_decided_from_absolute_versions() -> None:
    batcher = new_batcher(version=5)
    for version in (0, 1, 5):
        batcher.add(candidate(f"v{version}", version=version), 0.0)
    assert batcher.have == 2
    batcher.set_version(6, 0.0)
    batch = close(batcher)
    assert trained(batch) == ["v5/0"]
    assert reasons(batch) == {"v0/0": DropReason.TOO_OLD, "v1/0": DropReason.TOO_OLD}
    assert batch.drops[0].detail == "5 versions old, but max_age_versions is 4"


def test_a_trained_turn_is_listed_and_never_trained_again() -> None:
    batcher = new_batcher()
    batcher.add(candidate("t"), 0.0)
    close(batcher)
    batcher.add(candidate("t", revision=9), 0.0)
    assert batcher.have == 0
    assert reasons(close(batcher)) == {"t/9": DropReason.ALREADY_TRAINED}


def test_a_lower_revision_after_a_neutral_higher_one_is_not_trained() -> None:
    batcher = new_batcher()
    batcher.add(candidate("t", revision=5, reward=0.0), 0.0)
    close(batcher)
    batcher.add(candidate("t", revision=3), 0.0)
    assert reasons(close(batcher)) == {"t/3": DropReason.SUPERSEDED}
    batcher.add(candidate("t", revision=6), 0.0)
    assert trained(close(batcher)) == ["t/6"], "a neutral turn was not trained: a later judgement may teach it"


def test_tombstone_removes_what_waits() -> None:
    batcher = new_batcher()
    ref = RecordReference(topic="samples", partition=0, offset=7)
    batcher.remove("unknown", ref, 0.0)
    batcher.add(candidate("t"), 0.0)
    batcher.remove("t", ref, 0.0)
    batch = close(batcher)
    assert (trained(batch), reasons(batch)) == ([], {"t/0": DropReason.TOMBSTONE})


def test_turns_are_known_while_they_are_saved_and_afterwards() -> None:
    turns = MemoryTurns()
    ledger = TurnLedger(turns, LedgerMark())
    ledger.add(LedgerEntry("a", 1.0, (0, False, 3)))
    first = ledger.take(forget_before=0.0)
    assert ledger.find("a") == LedgerEntry("a", 1.0, (0, False, 3)), "not on the disk yet"
    turns.append(first)
    ledger.add(LedgerEntry("a", 2.0))
    assert ledger.find("a") == LedgerEntry("a", 2.0), "the newest entry counts"
    second = ledger.take(forget_before=0.0)
    assert (second.base, second.entries) == (first.mark, (LedgerEntry("a", 2.0),))
    turns.append(second)
    assert ledger.take(forget_before=0.0).entries == ()
    assert ledger.find("a") == LedgerEntry("a", 2.0)
    assert (ledger.find("b"), turns.mark().entries) == (None, 2)


@dataclass(frozen=True)
class Arrival:
    turn: int
    revision: int
    reward: float


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 5), st.integers(0, 4), st.sampled_from([-1.0, 0.0, 1.0])),
    max_size=30,
    unique_by=lambda arrival: (arrival.turn, arrival.revision),
)


@settings(max_examples=300, deadline=None)
@given(ARRIVALS, st.data())
def test_every_sample_leaves_exactly_once_and_no_turn_is_trained_twice(
    arrivals: list[Arrival], data: st.DataObject
) -> None:
    batcher = new_batcher()
    out: list[str] = []
    turns: list[str] = []
    for arrival in arrivals:
        batcher.add(candidate(f"t{arrival.turn}", revision=arrival.revision, reward=arrival.reward), 0.0)
        if data.draw(st.booleans()):
            batch = close(batcher)
            assert len(batch.candidates) <= RULES.batch_size
            out += trained(batch) + list(reasons(batch))
            turns += [each.turn_id for each in batch.candidates]
    while batcher.num_waiting or batcher.closes(1e9):
        batch = close(batcher)
        out += trained(batch) + list(reasons(batch))
        turns += [each.turn_id for each in batch.candidates]
    assert Counter(out) == Counter(f"t{arrival.turn}/{arrival.revision}" for arrival in arrivals)
    assert max(Counter(turns).values(), default=1) == 1
    assert sum(batcher.drop_counts.values()) == len(arrivals) - len(turns)


@settings(max_examples=300, deadline=None)
@given(ARRIVALS, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_the_highest_revision_wins(arrivals: list[Arrival], random: object) -> None:
    rules = BatchRules(batch_size=100, max_batch_age_seconds=60.0, max_age_versions=None)
    shuffled = list(arrivals)
    random.shuffle(shuffled)  # type: ignore[attr-defined] # hypothesis gives a random.Random
    results: list[set[str]] = []
    for order in (arrivals, shuffled):
        batcher = new_batcher(rules)
        for arrival in order:
            batcher.add(candidate(f"t{arrival.turn}", revision=arrival.revision, reward=arrival.reward), 0.0)
        results.append(set(trained(close(batcher))))
    highest = {turn: max(a.revision for a in arrivals if a.turn == turn) for turn in {a.turn for a in arrivals}}
    expected = {f"t{a.turn}/{a.revision}" for a in arrivals if a.revision == highest[a.turn] and a.reward != 0.0}
    assert results == [expected, expected]


@pytest.mark.parametrize("reward", [-1.0, 1.0])
def test_one_sample_is_a_batch(reward: float) -> None:
    batcher = new_batcher()
    batcher.add(candidate("t", reward=reward), 0.0)
    assert batcher.closes(60.0) == "age"
    assert trained(close(batcher)) == ["t/0"]
