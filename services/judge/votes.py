"""From votes to a verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.events.score import ScoreStatus, Vote


@dataclass(frozen=True, slots=True)
class Tally:
    """What the votes say together."""

    status: ScoreStatus
    """`failed` when fewer than half of the votes are valid."""
    verdict: int | None
    """+1, 0 or -1; None exactly when failed."""
    tied: bool
    """True when no verdict had a strict plurality."""


def tally(votes: Sequence[Vote]) -> Tally:
    """Strict plurality of the valid votes, whatever their order.

    Of m votes at least ceil(m/2) must be valid, else judging failed: an outage is not a neutral opinion. A verdict
    wins when it has more votes than each other one. When two lead together the verdict is 0 and flagged as tied:
    {1, -1}, {1, -1, 0} and {1, 1, -1, -1, 0} are ties, {1, abstained} is 1, {1, abstained, abstained} failed.
    Raises ValueError without votes.
    """
    if not votes:
        raise ValueError("no votes to count")
    counts = Counter(vote.verdict for vote in votes if vote.verdict is not None)
    if counts.total() < (len(votes) + 1) // 2:
        return Tally(status=ScoreStatus.FAILED, verdict=None, tied=False)
    (verdict, most), *others = counts.most_common()
    if any(count == most for _, count in others):
        return Tally(status=ScoreStatus.SCORED, verdict=0, tied=True)
    return Tally(status=ScoreStatus.SCORED, verdict=verdict, tied=False)
