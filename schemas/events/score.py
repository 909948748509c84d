"""`clawstream.score`: the judgement of one next state under one judge spec."""

from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field, model_validator

from schemas.events.base import Event, Part, RecordReference, RolloutPosition


class ScoreStatus(StrEnum):
    """What came of judging."""

    SCORED = "scored"
    """There is a verdict."""
    FAILED = "failed"
    """Fewer than half of the votes were valid. Distinct from a neutral verdict."""


class Vote(Part):
    """One opinion. An abstention is not a zero."""

    vote: int = Field(ge=0)
    """Number of the vote."""
    verdict: int | None = Field(default=None, ge=-1, le=1)
    """+1, 0 or -1; null when the vote abstained."""
    abstention: str | None = None
    """Why there is no verdict: `unparsable`, `timeout`, `error`, `truncated`, `two_verdicts`, `no_rule`."""
    call_id: str | None = None
    """The ledger entry with the raw answer; null when no model was called."""

    @model_validator(mode="after")
    def _verdict_or_reason(self) -> "Vote":
        if (self.verdict is None) == (self.abstention is None):
            raise ValueError("a vote has either a verdict or the reason for abstaining")
        return self


class HintVote(Part):
    """One look for a hint. `useful` false is a vote too: what followed holds no hint."""

    vote: int = Field(ge=0)
    """Number of the vote."""
    useful: bool | None = None
    """Whether there was a hint to be had; null when the vote abstained."""
    abstention: str | None = None
    """Why there is neither: as for a verdict vote, or `no_hint`, `two_hints` when the answer's form was broken."""
    call_id: str | None = None
    """The ledger entry with the raw answer."""

    @model_validator(mode="after")
    def _answer_or_reason(self) -> "HintVote":
        if (self.useful is None) == (self.abstention is None):
            raise ValueError("a hint vote has either an answer or the reason for abstaining")
        return self


class Hint(Part):
    """What the answer should have known, in words."""

    text: str = Field(min_length=1)
    """The hint."""
    source: str
    """`user` for the user's own words, `judge` for a judge's."""
    call_id: str | None = None
    """The ledger entry it was taken from."""


class ScoreEvent(Event):
    """Verdict, votes and hints of one next state under one judge spec."""

    event_type: ClassVar[str] = "clawstream.score"
    content_fields: ClassVar[frozenset[str]] = frozenset({"hints"})

    score_id: str = Field(min_length=1)
    """Derived from the next state and the judge spec."""
    next_state_id: str = Field(min_length=1)
    """What was judged."""
    next_state_ref: RecordReference
    """Where it is on the log. Its offset is the last part of a sample's revision."""
    turn_id: str = Field(min_length=1)
    """The turn whose answer was judged."""
    turn_ref: RecordReference
    """Where the turn is on the log."""
    session_id: str = Field(min_length=1)
    """The conversation."""
    principal: str = Field(min_length=1)
    """Whom the API key belongs to."""
    judge_spec_hash: str = Field(min_length=1)
    """Identifies backend, model, prompts, sampling and parser."""
    promotion_epoch: int = Field(default=0, ge=0)
    """How often the active judge spec had been changed. The first part of a sample's revision."""
    explicit: bool = False
    """True when a person, an environment or a verifier judged, not a model."""
    status: ScoreStatus
    """scored or failed."""
    verdict: int | None = Field(default=None, ge=-1, le=1)
    """Strict plurality of the valid votes; a tie is 0. Null exactly when failed."""
    reward: float | None = Field(default=None, ge=-1, le=1)
    """The number that training uses: the verdict, or the finer score of explicit evidence. Null when failed."""
    step_reward: float | None = Field(default=None, ge=-1, le=1)
    """With an outcome: what the environment gave for this one step. Null when it gave nothing."""
    rollout: RolloutPosition | None = None
    """Copied from the next state: of an outcome it says where the rollout ended."""
    tied: bool = False
    """True when no verdict had a strict plurality."""
    votes: list[Vote] = Field(default=[])
    """Every vote, also those that abstained."""
    hints: list[Hint] = Field(default=[])
    """Every hint, in the order of the votes, the user's words first. Equal ones are listed once."""
    hint_votes: list[HintVote] = Field(default=[])
    """Every hint vote, also those without a hint."""
    judged_at: AwareDatetime
    """When judging ended."""
    judge_seconds: float = Field(default=0.0, ge=0)
    """How long judging took."""

    @model_validator(mode="after")
    def _status_matches_verdict(self) -> "ScoreEvent":
        failed = self.status is ScoreStatus.FAILED
        if failed != (self.verdict is None) or failed != (self.reward is None):
            raise ValueError("verdict and reward are null exactly when the status is failed")
        return self
