"""From votes to a verdict."""

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
    valid = [vote.verdict for vote in votes if vote.verdict is not None]
    if len(valid) < (len(votes) + 1) // 2:
        return Tally(status=ScoreStatus.FAILED, verdict=None, tied=False)
    counts = {verdict: valid.count(verdict) for verdict in set(valid)}
    most = max(counts.values())
    leading = [verdict for verdict, count in counts.items() if count == most]
    if len(leading) > 1:
        return Tally(status=ScoreStatus.SCORED, verdict=0, tied=True)
    return Tally(status=ScoreStatus.SCORED, verdict=leading[0], tied=False)
