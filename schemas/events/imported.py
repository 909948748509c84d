"""`clawstream.imported-conversation`: a conversation of a chat log that is on the log now."""

from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event


class ImportedConversationEvent(Event):
    """Written in the transaction that wrote its turns: what it names is never imported again."""

    event_type: ClassVar[str] = "clawstream.imported-conversation"

    session_id: str = Field(min_length=1)
    """Derived from whose it is and what it is called, or what it says."""
    principal: str = Field(min_length=1)
    """Whose it is."""
    log_format: str
    """`openai` or `openclaw`."""
    content_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of its messages: a log in which it has grown since is told apart."""
    turns: int = Field(ge=0)
    """How many turns it became."""
    imported_at: AwareDatetime
    """When."""
