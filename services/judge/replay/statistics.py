"""How two judges differ, from the counts of their verdicts. Pure.

Cohen's kappa: J. Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 20
(1960): (observed agreement - agreement expected by chance) / (1 - expected), with chance from both judges' own shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass

VERDICTS = (1, 0, -1)
Verdict = int | None
"""None: the score failed."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of all inputs that both specs scored; explicit evidence, on which no judge has a say, is not among them."""

    confusion: Mapping[tuple[Verdict, Verdict], int]
    """(old verdict, new verdict) to the number of inputs."""
    compared: int
    """Inputs where both have a verdict."""
    agreement: float | None
    """Share of equal verdicts; None when nothing is compared."""
    kappa: float | None
    """Cohen's; None when nothing is compared, or chance alone explains everything (one verdict only)."""
    flips_to_positive: int
    """From -1 to +1."""
    flips_to_negative: int
    """From +1 to -1."""
    failed_old: int
    """Scores of the old spec without a verdict."""
    failed_new: int
    """Scores of the new spec without a verdict."""
    mean_old: float | None
    """Mean verdict where both have one."""
    mean_new: float | None
    """Mean verdict where both have one."""

    @property
    def sign_flips(self) -> int:
        """Verdicts that turned into their opposite."""
        return self.flips_to_positive + self.flips_to_negative


def agreement_of(confusion: Mapping[tuple[Verdict, Verdict], int]) -> Agreement:
    """Raises ValueError for a verdict that is none, and for a negative count."""
    for pair, count in confusion.items():
        if count < 0 or any(verdict not in (*VERDICTS, None) for verdict in pair):
            raise ValueError(f"no count of verdicts: {pair}: {count}")
    table = {(old, new): count for (old, new), count in confusion.items() if old is not None and new is not None}
    compared = sum(table.values())
    rows = {verdict: sum(count for (old, _), count in table.items() if old == verdict) for verdict in VERDICTS}
    columns = {verdict: sum(count for (_, new), count in table.items() if new == verdict) for verdict in VERDICTS}
    equal = sum(table.get((verdict, verdict), 0) for verdict in VERDICTS)
    # In whole numbers: expected = chance / compared**2, so kappa is exact until the one division.
    chance = sum(rows[verdict] * columns[verdict] for verdict in VERDICTS)
    beyond_chance = compared * compared - chance
    return Agreement(
        confusion=dict(confusion),
        compared=compared,
        agreement=equal / compared if compared else None,
        kappa=(equal * compared - chance) / beyond_chance if beyond_chance else None,
        flips_to_positive=table.get((-1, 1), 0),
        flips_to_negative=table.get((1, -1), 0),
        failed_old=sum(count for (old, _), count in confusion.items() if old is None),
        failed_new=sum(count for (_, new), count in confusion.items() if new is None),
        mean_old=sum(verdict * count for verdict, count in rows.items()) / compared if compared else None,
        mean_new=sum(verdict * count for verdict, count in columns.items()) / compared if compared else None,
    )


def disagreement(old: int, new: int, old_votes: list[Verdict], new_votes: list[Verdict]) -> float:
    """How bad it is that two verdicts differ: their distance, and of equal distances how sure both sides were.

    Between 0 and 4: distance (0 to 2) plus the shares of votes behind each verdict (each 0 to 1); 0 for equal ones.
    """
    if old == new:
        return 0.0
    return abs(old - new) + _share(old, old_votes) + _share(new, new_votes)


def _share(verdict: int, votes: list[Verdict]) -> float:
    return votes.count(verdict) / len(votes) if votes else 0.0
