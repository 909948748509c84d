"""Votes to verdict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.events.score import ScoreStatus, Vote
from services.judge.votes import tally

OPINIONS = st.sampled_from([1, 0, -1, None])


def votes_of(opinions: list[int | None]) -> list[Vote]:
    return [
        Vote(vote=number, verdict=opinion, abstention="unparsable" if opinion is None else None)
        for number, opinion in enumerate(opinions)
    ]


@pytest.mark.parametrize(
    ("opinions", "verdict", "tied"),
    [
        ([1], 1, False),
        ([-1], -1, False),
        ([0], 0, False),
        ([1, 1, -1], 1, False),
        ([1, -1], 0, True),
        ([1, -1, 0], 0, True),
        ([1, 1, -1, -1, 0], 0, True),
        ([0, 0, 1, 1], 0, True),
        ([1, 1, -1, 0], 1, False),
        ([0, 0, 1], 0, False),
        ([1, None], 1, False),
        ([1, -1, None], 0, True),
        ([-1, -1, None, None], -1, False),
    ],
)
def test_strict_plurality_of_the_valid_votes(opinions: list[int | None], verdict: int, tied: bool) -> None:
    result = tally(votes_of(opinions))
    assert (result.status, result.verdict, result.tied) == (ScoreStatus.SCORED, verdict, tied)


@pytest.mark.parametrize("opinions", [[None], [1, None, None], [None, None, None], [1, 1, None, None, None]])
def test_fewer_than_half_valid_votes_is_a_failure_and_not_a_zero(opinions: list[int | None]) -> None:
    result = tally(votes_of(opinions))
    assert (result.status, result.verdict, result.tied) == (ScoreStatus.FAILED, None, False)


def test_no_votes_at_all_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no votes"):
        tally([])


@given(st.lists(OPINIONS, min_size=1, max_size=9), st.randoms())
def test_the_order_of_votes_does_not_matter(opinions: list[int | None], random: object) -> None:
    shuffled = list(opinions)
    random.shuffle(shuffled)  # type: ignore[attr-defined] - hypothesis gives a Random
    assert tally(votes_of(shuffled)) == tally(votes_of(opinions))


@given(st.lists(OPINIONS, min_size=1, max_size=9))
def test_signs_are_treated_alike(opinions: list[int | None]) -> None:
    mirrored = tally(votes_of([None if opinion is None else -opinion for opinion in opinions]))
    result = tally(votes_of(opinions))
    assert mirrored.status is result.status
    assert mirrored.tied == result.tied
    assert mirrored.verdict == (None if result.verdict is None else -result.verdict)


@given(st.lists(OPINIONS, min_size=1, max_size=9))
def test_a_verdict_that_is_not_tied_has_more_votes_than_any_other(opinions: list[int | None]) -> None:
    result = tally(votes_of(opinions))
    valid = [opinion for opinion in opinions if opinion is not None]
    assert (result.status is ScoreStatus.FAILED) == (2 * len(valid) < len(opinions))
    if result.status is ScoreStatus.SCORED and not result.tied:
        assert all(valid.count(result.verdict) > valid.count(other) for other in {1, 0, -1} - {result.verdict})  # type: ignore[arg-type] - a verdict is not None here
