"""`clawstream.replay-score`: what another judge spec says of history, kept apart from the scores that count."""

from typing import ClassVar

from pydantic import Field

from schemas.events.score import ScoreEvent


class ReplayScoreEvent(ScoreEvent):
    """A score of a replay. Nobody learns from it until the replay is promoted: then it becomes a score."""

    event_type: ClassVar[str] = "clawstream.replay-score"

    replay_id: str = Field(min_length=1)
    """The replay. Its scores are one for each next state, spec and replay."""

    def promoted(self, promotion_epoch: int) -> ScoreEvent:
        """The score that counts from this epoch on."""
        values = self.model_dump(exclude={"replay_id"})
        return ScoreEvent.model_validate({**values, "promotion_epoch": promotion_epoch})
