"""`clawstream.next-state`: what happened after an answer."""

from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field, model_validator

from schemas.events.base import Event, Message, Part, RecordReference, RolloutPosition


class NextStateKind(StrEnum):
    """What kind of thing followed the answer."""

    REPLY = "reply"
    """The user wrote something."""
    TOOL_RESULT = "tool_result"
    """Tools that the answer called gave their results (possibly followed by user messages)."""
    FEEDBACK = "feedback"
    """A person judged the answer explicitly."""
    OUTCOME = "outcome"
    """An environment or a verifier judged the answer or the rollout."""
    SESSION_END = "session_end"
    """Nothing followed: the session was closed or fell idle. Skipped by the judge and counted."""

    @property
    def is_explicit(self) -> bool:
        """Explicit evidence needs no model and outranks what a judge infers."""
        return self in (NextStateKind.FEEDBACK, NextStateKind.OUTCOME)


class ExplicitFeedback(Part):
    """A judgement that needs no judge."""

    feedback_id: str = Field(min_length=1)
    """Minted when the feedback arrived, or the client's idempotency key."""
    score: float = Field(ge=-1, le=1)
    """From -1 (bad) over 0 to +1 (good)."""
    step_score: float | None = Field(default=None, ge=-1, le=1)
    """What the environment thinks of this one step, apart from how the rollout ended; null when it thinks nothing."""
    text: str | None = None
    """What the person said about it: a source of hints."""
    source: str = "user"
    """Who judged: `user`, `environment`, or a verifier's name."""


class NextStateEvent(Event):
    """All that followed one answer at one moment. Self-contained for judging."""

    event_type: ClassVar[str] = "clawstream.next-state"
    content_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "request_messages",
            "tools",
            "response_message",
            "following_messages",
            "feedback",
        }
    )

    next_state_id: str = Field(min_length=1)
    """Derived from the turn and from what followed."""
    turn_id: str = Field(min_length=1)
    """The turn whose answer this follows."""
    turn_ref: RecordReference
    """Where that turn is on the log."""
    session_id: str = Field(min_length=1)
    """The conversation."""
    principal: str = Field(min_length=1)
    """Whom the API key belongs to."""
    kind: NextStateKind
    """What kind of evidence this is."""
    turn_trainable: bool = True
    """Copied from the turn: the judge skips turns that can never be trained."""
    request_messages: list[Message] = Field(default=[])
    """The request that the answer served. Empty for explicit evidence, which needs no model."""
    tools: list[Message] = Field(default=[])
    """The tool definitions of that request."""
    response_message: Message | None = None
    """The answer. Null for explicit evidence and for session ends."""
    following_messages: list[Message] = Field(default=[])
    """All messages after the answer, without what the client profile recognised as harness messages."""
    feedback: ExplicitFeedback | None = None
    """Set exactly for explicit evidence."""
    child_turn_id: str | None = None
    """The turn that the following messages asked for."""
    rollout: RolloutPosition | None = None
    """Copied from the turn; an outcome adds where the rollout ended."""
    observed_at: AwareDatetime
    """When it was observed."""

    @model_validator(mode="after")
    def _kind_has_its_content(self) -> "NextStateEvent":
        if self.kind.is_explicit != (self.feedback is not None):
            raise ValueError(f"feedback must be set exactly for explicit kinds, not for {self.kind.value}")
        if self.kind in (NextStateKind.REPLY, NextStateKind.TOOL_RESULT) and (
            not self.following_messages or self.response_message is None
        ):
            raise ValueError(f"a {self.kind.value} needs the answer and the messages that followed it")
        return self
