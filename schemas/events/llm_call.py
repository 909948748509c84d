"""`clawstream.llm-call`: the ledger of paid model calls, so that none is ever paid for twice."""

from typing import ClassVar

from pydantic import AwareDatetime, Field, JsonValue

from schemas.events.base import Event


class LlmCallEvent(Event):
    """One call to a judge model and what it answered. Written before the score that uses it."""

    event_type: ClassVar[str] = "clawstream.llm-call"
    content_fields: ClassVar[frozenset[str]] = frozenset({"request_sha256", "response"})

    call_id: str = Field(min_length=1)
    """Derived from next state, judge spec, purpose and vote."""
    next_state_id: str = Field(min_length=1)
    """What was judged."""
    session_id: str = Field(min_length=1)
    """Decides the partition."""
    judge_spec_hash: str = Field(min_length=1)
    """The judge spec."""
    purpose: str
    """`verdict` or `hint`."""
    vote: int = Field(ge=0)
    """Number of the vote."""
    model: str
    """The model that answered."""
    request_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of the request: a ledger entry answers only the same request."""
    response: JsonValue
    """The raw answer: text, or the log-probs of the verdict words."""
    prompt_tokens: int = Field(default=0, ge=0)
    """Tokens read."""
    completion_tokens: int = Field(default=0, ge=0)
    """Tokens written."""
    seconds: float = Field(ge=0)
    """How long the call took."""
    called_at: AwareDatetime
    """When it ended."""
