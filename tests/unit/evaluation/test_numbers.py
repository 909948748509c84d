"""Statistics and measures against computations of their own, in plain Python and NumPy."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawstream.evaluation.asking import MeasuredAnswer
from clawstream.evaluation.comparison import METRICS, compare
from clawstream.evaluation.diversity import distinct_n, ngrams, self_overlap
from clawstream.evaluation.statistics import Bootstrap


def answer(question: str, text: str, *, seed: int = 1, sample: int = 0, satisfied: bool = True) -> MeasuredAnswer:
    return MeasuredAnswer(
        question=question,
        seed=seed,
        sample=sample,
        answer=text,
        satisfied=satisfied,
        correct="paris" in text.lower(),
        finished=True,
        length_tokens=len(text.split()),
        entropy_nats=None,
    )


def test_the_interval_is_the_exact_one_of_all_resamples() -> None:
    # Three questions have only 27 equally likely resamples: all of them can be listed.
    values = [0.0, 1.0, 5.0]
    exact = np.array([np.mean(one) for one in product(values, repeat=3)])
    estimate = Bootstrap(3, resamples=200_000, confidence=0.9, seed=1).mean(values)
    assert estimate is not None
    assert estimate.mean == 2.0
    low, high = np.percentile(exact, [5, 95], method="inverted_cdf")
    assert (estimate.low, estimate.high) == (pytest.approx(low), pytest.approx(high))


def test_with_many_questions_it_is_the_normal_interval() -> None:
    values = np.random.default_rng(3).gamma(2.0, 3.0, size=400)
    estimate = Bootstrap(400, resamples=20_000, confidence=0.95, seed=1).mean(list(values))
    assert estimate is not None
    half = 1.959964 * values.std(ddof=1) / math.sqrt(400)
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.08 * half)


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    random = np.random.default_rng(11)
    held = 0
    for trial in range(400):
        estimate = Bootstrap(40, resamples=400, confidence=0.95, seed=trial).mean(
            list(random.normal(1.5, 2.0, size=40))
        )
        assert estimate is not None
        held += estimate.low <= 1.5 <= estimate.high
    assert 0.90 <= held / 400 <= 0.98


def test_differences_are_paired() -> None:
    easy_and_hard = np.random.default_rng(5).normal(0, 10, size=60)
    bootstrap = Bootstrap(60, resamples=2000, confidence=0.95, seed=1)
    difference = bootstrap.difference(list(easy_and_hard + 0.5), list(easy_and_hard))
    assert difference is not None
    assert difference.low == pytest.approx(0.5)
    assert difference.high == pytest.approx(0.5)


def test_missing_values_are_left_out_and_nothing_gives_nothing() -> None:
    bootstrap = Bootstrap(3, resamples=500, confidence=0.95, seed=1)
    estimate = bootstrap.mean([None, 2.0, 4.0])
    assert estimate is not None
    assert (estimate.mean, estimate.questions) == (3.0, 2)
    assert 2.0 <= estimate.low <= estimate.high <= 4.0
    assert bootstrap.mean([None, None, None]) is None
    paired = bootstrap.difference([1.0, None, 3.0], [0.0, 5.0, None])
    assert paired is not None
    assert (paired.mean, paired.questions) == (1.0, 1)
    with pytest.raises(ValueError, match="2 values for 3 questions"):
        bootstrap.mean([1.0, 2.0])


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.integers(0, 5))
def test_an_interval_holds_its_mean_and_repeats(values: list[float], seed: int) -> None:
    first, again = (Bootstrap(len(values), resamples=200, confidence=0.95, seed=seed).mean(values) for _ in range(2))
    assert first is not None
    assert first == again
    assert min(values) - 1e-9 <= first.low <= first.high <= max(values) + 1e-9
    assert first.mean == pytest.approx(math.fsum(values) / len(values), abs=1e-9)


def test_distinct_n_by_hand() -> None:
    # the-cat cat-sat | the-cat cat-ran: four bigrams, three different ones
    assert distinct_n(["The cat sat.", "the cat ran"], 2) == 0.75
    assert distinct_n(["one", ""], 2) is None
    assert distinct_n(["a a a"], 1) == pytest.approx(1 / 3)


def test_self_overlap_by_hand() -> None:
    # {the-cat, cat-sat} and {the-cat, cat-ran} share one of three
    assert self_overlap(["The cat sat.", "the cat ran"], 2) == pytest.approx(1 / 3)
    assert self_overlap(["Yes.", "yes"], 2) == 1.0
    assert self_overlap(["Yes.", "No."], 2) == 0.0
    assert self_overlap(["alone"], 2) is None


@settings(deadline=None)
@given(st.lists(st.text("ab c.", max_size=12), min_size=2, max_size=5))
def test_diversity_against_another_way_to_count(texts: list[str]) -> None:
    grams = [[" ".join(gram) for gram in ngrams(text, 1)] for text in texts]
    flat = [word for of_text in grams for word in of_text]
    assert distinct_n(texts, 1) == (len(dict.fromkeys(flat)) / len(flat) if flat else None)
    pairs = list(combinations(grams, 2))
    jaccard = [sum(word in set(b) for word in set(a)) / len({*a, *b}) if a or b else 1.0 for a, b in pairs]
    assert self_overlap(texts, 1) == pytest.approx(sum(jaccard) / len(jaccard))


def test_a_comparison_from_answers_to_differences() -> None:
    questions = [f"question {number}" for number in range(6)]
    control = [
        answer(q, f"a long answer {n} of paris", seed=s, satisfied=False)
        for s in (1, 2)
        for n, q in enumerate(questions)
    ]
    taught = [answer(q, "Paris", seed=s, satisfied=n != 0) for s in (1, 2) for n, q in enumerate(questions)]
    comparison = compare({"new": taught, "old": control}, control="old", confidence=0.95, resamples=500, seed=1)
    assert [version.name for version in comparison.versions] == ["old", "new"]
    assert (comparison.questions, comparison.answers_per_question) == (6, 2)
    old, new = comparison.versions
    assert old.differences == {}
    satisfied, length = new.estimates["satisfied"], new.differences["length_tokens"]
    assert satisfied is not None
    assert satisfied.mean == pytest.approx(5 / 6)
    assert length is not None
    assert (length.mean, length.low, length.high) == (-5.0, -5.0, -5.0)
    gain = new.differences["satisfied"]
    assert gain is not None
    assert gain.low > 0
    assert new.estimates["entropy_nats"] is None
    assert new.by_seed[2]["satisfied"] == pytest.approx(5 / 6)
    assert set(new.estimates) == {metric.name for metric in METRICS}
    overlap = new.estimates["self_overlap_2"]
    assert overlap is not None
    assert overlap.mean == 1.0


def test_versions_that_were_asked_differently_are_not_compared() -> None:
    two, one = [answer("a", "x"), answer("b", "y")], [answer("a", "x")]
    for other in (one, [answer("a", "x"), answer("c", "y")]):
        with pytest.raises(ValueError, match="same questions"):
            compare({"old": two, "new": other}, control="old", confidence=0.95, resamples=500, seed=1)
