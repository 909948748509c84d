"""`clawstream.session-key`: a key that encrypts content of one session. Its tombstone makes that content unreadable.

`clawstream.master-key`: which master key wraps those that are made now.
"""

from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event


class SessionKeyEvent(Event):
    """One data key. A session may have several: each writer that knows none makes one."""

    event_type: ClassVar[str] = "clawstream.session-key"

    key_id: str = Field(min_length=1)
    """Key of the record, and what the header `encryption-key` of encrypted records says: an id that derives from the
    session's, a slash, digits that derive from the principal's too, a slash, and an id of its own. Never used again."""
    data_key: str = Field(min_length=1)
    """Base64 of the 32 bytes for AES-256-GCM; with a master key, of nonce, those bytes encrypted, and tag."""
    master_key_id: str = ""
    """Which master key wraps `data_key`: the first 16 hexadecimal digits of its sha256. Empty when it is plain."""
    created_at: AwareDatetime
    """When it was made."""


class MasterKeyEvent(Event):
    """Names the master key that counts. Whoever does not have it is told so before it writes anything."""

    event_type: ClassVar[str] = "clawstream.master-key"

    master_key_id: str = Field(min_length=1)
    """The first 16 hexadecimal digits of its sha256."""
    since: AwareDatetime
    """When it was named."""
