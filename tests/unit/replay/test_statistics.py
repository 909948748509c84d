"""Agreement and kappa against independent computations: pairs instead of counts, fractions instead of floats."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.judge.replay.statistics import agreement_of, disagreement

VERDICTS = st.sampled_from([1, 0, -1, None])
PAIRS = st.lists(st.tuples(VERDICTS, VERDICTS), max_size=60)


def kappa_of_pairs(pairs: list[tuple[int, int]]) -> Fraction | None:
    """By its definition, from the pairs themselves (J. Cohen, 1960)."""
    count = len(pairs)
    if not count:
        return None
    observed = Fraction(sum(old == new for old, new in pairs), count)
    expected = sum(
        Fraction([old for old, _ in pairs].count(verdict), count)
        * Fraction([new for _, new in pairs].count(verdict), count)
        for verdict in (1, 0, -1)
    )
    return None if expected == 1 else (observed - expected) / (1 - expected)


@given(PAIRS)
def test_every_number_follows_from_the_pairs(pairs: list[tuple[int | None, int | None]]) -> None:
    found = agreement_of(Counter(pairs))
    both = [(old, new) for old, new in pairs if old is not None and new is not None]
    assert found.compared == len(both)
    assert found.sign_flips == sum(old * new == -1 for old, new in both)
    assert found.flips_to_positive == sum((old, new) == (-1, 1) for old, new in both)
    assert found.failed_old == sum(old is None for old, _ in pairs)
    assert found.failed_new == sum(new is None for _, new in pairs)
    if both:
        assert found.agreement == pytest.approx(sum(old == new for old, new in both) / len(both))
        assert found.mean_old == pytest.approx(sum(old for old, _ in both) / len(both))
        assert found.mean_new == pytest.approx(sum(new for _, new in both) / len(both))
    else:
        assert (found.agreement, found.mean_old, found.mean_new) == (None, None, None)
    expected = kappa_of_pairs(both)
    assert found.kappa == (None if expected is None else pytest.approx(float(expected)))


def test_a_published_example() -> None:
    """Two raters, 50 proposals: 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: kappa is 0.4."""
    found = agreement_of({(1, 1): 20, (1, -1): 5, (-1, 1): 10, (-1, -1): 15})
    assert (found.agreement, found.kappa) == (pytest.approx(0.7), pytest.approx(0.4))


def test_one_verdict_only_has_no_kappa() -> None:
    assert agreement_of({(1, 1): 7}).kappa is None
    assert agreement_of({(1, 1): 7}).agreement == 1.0


@pytest.mark.parametrize("confusion", [{(2, 1): 1}, {(1, -3): 1}, {(1, 1): -1}])
def test_what_is_no_count_of_verdicts_is_refused(confusion: dict[tuple[int | None, int | None], int]) -> None:
    with pytest.raises(ValueError, match="no count of verdicts"):
        agreement_of(confusion)


def test_the_worst_disagreement_is_between_sure_opposites() -> None:
    sure = disagreement(1, -1, [1, 1, 1], [-1, -1, -1])
    unsure = disagreement(1, -1, [1, 1, -1], [-1, 1, -1])
    near = disagreement(1, 0, [1, 1, 1], [0, 0, 0])
    assert sure > unsure > near > disagreement(1, 1, [1], [1]) == 0
    assert sure == 4.0
    assert disagreement(1, -1, [], []) == 2.0
