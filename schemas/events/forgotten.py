"""`clawstream.forgotten`: a request that a session, or all that a principal said, is not used any more."""

from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event, Part


class ForgottenKind(StrEnum):
    """What a request names."""

    SESSION = "session"
    """One conversation: all of its turns, also those that come later."""
    PRINCIPAL = "principal"
    """Everything of one principal that was on the log when it was asked for; what is said later counts again."""


class BatchFate(StrEnum):
    """What became of an archived batch that holds forgotten samples."""

    KEPT = "kept"
    """It is as it was: nobody asked for more than a list."""
    REMOVED = "removed"
    """The file is gone."""
    REWRITTEN = "rewritten"
    """The file holds the other samples only, and has another checksum."""
    ABSENT = "absent"
    """It was not where its train-step says: past its retention, or on another machine."""


class ForgottenBatch(Part):
    """One archived batch. An audit accepts `new_sha256`, or the file's absence, in place of the train-step's word."""

    lineage: str
    """The training run."""
    step: int = Field(ge=1)
    """The step that trained it."""
    uri: str
    """Where it is, or was."""
    sha256: str
    """Its checksum in the train-step."""
    fate: BatchFate
    """What became of it."""
    new_sha256: str = ""
    """Its checksum now; empty unless it was rewritten."""


class ForgottenEvent(Event):
    """The record of a request. Processes refuse what it covers from the moment that they read it.

    Written twice: before anything is removed, and again with the counts once everything is.
    """

    event_type: ClassVar[str] = "clawstream.forgotten"

    kind: ForgottenKind
    """What `subject` is."""
    subject: str = Field(min_length=1)
    """The session's id, or the principal's name."""
    turn_ends: dict[str, int] = Field(default={})
    """For a principal: partition of `turns` (as text) to the first offset that is not covered."""
    turns: int = Field(default=0, ge=0)
    """Turns that the log held of it."""
    tombstones: dict[str, int] = Field(default={})
    """Topic, without namespace, to the number of keys that were removed from it, all runs together."""
    session_keys: int = Field(default=0, ge=0)
    """Keys that encrypted its content and were deleted, all runs together: whatever they encrypted is unreadable."""
    blobs_removed: int = Field(default=0, ge=0)
    """Blobs that nothing else named, all runs together."""
    weight_versions: list[int] = Field(default=[])
    """Versions that were made from it, or descend from such a version."""
    batches: list[ForgottenBatch] = Field(default=[])
    """Archived batches that hold, or held, samples of it."""
    requested_at: AwareDatetime
    """When it was asked for first."""
    completed_at: AwareDatetime | None = None
    """When everything was removed; null while that goes on, or was interrupted: run the command again."""
