"""Packing: nothing is lost, nothing is doubled, and the budget holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.packing import pack, plan_micro_batches, share_among_ranks

lengths_strategy = st.lists(st.integers(1, 300), max_size=40)


@given(lengths_strategy, st.integers(1, 400))
def test_every_sequence_is_in_exactly_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert sorted(index for micro_batch in plan for index in micro_batch) == list(range(len(lengths)))
    for micro_batch in plan:
        tokens = sum(lengths[index] for index in micro_batch)
        assert tokens <= budget or len(micro_batch) == 1


@given(lengths_strategy, st.integers(1, 400))
def test_two_micro_batches_are_never_both_half_empty(lengths: list[int], budget: int) -> None:
    """First-fit opens a new micro-batch only when no open one has room."""
    sums = [sum(lengths[index] for index in micro_batch) for micro_batch in plan_micro_batches(lengths, budget)]
    assert sum(2 * tokens <= budget for tokens in sums) <= 1


@given(lengths_strategy, st.integers(1, 400), st.integers(1, 5))
def test_ranks_share_the_whole_plan(lengths: list[int], budget: int, num_ranks: int) -> None:
    plan = plan_micro_batches(lengths, budget)
    shares = share_among_ranks(plan, lengths, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(micro_batch for share in shares for micro_batch in share) == sorted(plan)


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    lengths = [100, 90, 60, 50, 40, 40]
    shares = share_among_ranks([[index] for index in range(6)], lengths, 2)
    assert [sum(lengths[i] for micro_batch in share for i in micro_batch) for share in shares] == [190, 190]


@pytest.mark.parametrize(("lengths", "budget"), [([3, 0], 10), ([3], 0)])
def test_impossible_lengths_and_budgets_are_refused(lengths: list[int], budget: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        plan_micro_batches(lengths, budget)


def test_a_packed_row_predicts_each_response_token_from_the_token_before_it() -> None:
    row = pack([(np.array([1, 2, 3]), np.array([4, 5])), (np.array([6]), np.array([7, 8, 9]))])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert row.sequence_bounds.tolist() == [0, 4, 7]
    assert row.token_ids[row.logit_positions].tolist() == [3, 4, 6, 7, 8]
    assert row.target_ids.tolist() == [4, 5, 7, 8, 9]
    assert row.sequence_of_target.tolist() == [0, 0, 1, 1, 1]


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1"):
        pack([(np.array([1]), np.array([1])), (np.array([1]), np.array([], dtype=np.int64))])
