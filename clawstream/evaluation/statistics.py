"""Means with confidence intervals, and differences to a control. Pure, and the same numbers for the same seed.

The unit that is resampled is the question: answers to one question resemble each other, so that counting them as
independent would make the intervals too narrow (a cluster bootstrap; Efron and Tibshirani 1993, chapters 8 and 13).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

METHOD: Final = "percentile bootstrap over questions"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and where it may lie."""

    mean: float
    low: float
    """Lower end of the confidence interval."""
    high: float
    """Upper end."""
    questions: int
    """How many questions it rests on."""


class Bootstrap:
    """Resamples questions. All estimates of one instance use the same resamples, so that differences are paired."""

    def __init__(self, questions: int, *, resamples: int, confidence: float, seed: int) -> None:
        """Raises ValueError for no questions, fewer than 100 resamples, or a confidence outside of (0, 1)."""
        if questions < 1 or resamples < 100 or not 0 < confidence < 1:
            raise ValueError(f"questions={questions}, resamples={resamples}, confidence={confidence}")
        self._questions = questions
        self._tails = (50 * (1 - confidence), 100 - 50 * (1 - confidence))
        # [resamples, questions]
        self._indices = np.random.default_rng(seed).integers(0, questions, size=(resamples, questions))

    def mean(self, values: Sequence[float | None]) -> Estimate | None:
        """Of one value per question; None where there is no value. None without any.

        A resample that holds no question with a value is left out.
        """
        column = self._column(values)
        known = ~np.isnan(column)
        if not known.any():
            return None
        counts = known[self._indices].sum(axis=1)  # [resamples]
        sums = np.where(known, column, 0.0)[self._indices].sum(axis=1)  # [resamples]
        means = sums[counts > 0] / counts[counts > 0]
        low, high = np.percentile(means, self._tails)
        return Estimate(float(column[known].mean()), float(low), float(high), int(known.sum()))

    def difference(self, values: Sequence[float | None], control: Sequence[float | None]) -> Estimate | None:
        """Mean of `values - control`, question by question; a question that lacks one of them is left out."""
        paired = self._column(values) - self._column(control)
        return self.mean([None if np.isnan(one) else float(one) for one in paired])

    def _column(self, values: Sequence[float | None]) -> NDArray[np.float64]:
        """[questions], NaN where there is no value."""
        if len(values) != self._questions:
            raise ValueError(f"{len(values)} values for {self._questions} questions")
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
