"""What all events share."""

from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Message = dict[str, JsonValue]
"""A chat message in OpenAI's form, exactly as the client sent it or received it."""


class Event(BaseModel):
    """One fact on the log.

    Fields are only ever added, and added ones have a default, so that every event ever written can be
    read for ever. Unknown fields are ignored. A change that breaks this needs a new topic.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    event_type: ClassVar[str]
    """The CloudEvents type, without version: for example `clawstream.turn`."""
    event_version: ClassVar[int] = 1
    """Rises when a field is added."""
    content_fields: ClassVar[frozenset[str]] = frozenset()
    """Top-level fields that hold what was said, or follow from it: encrypted under a key of the event's session where
    that is on. An event that has some has a `session_id`. Ids, references and what an audit counts stay readable."""


class Part(BaseModel):
    """A piece of an event. The same rules of growth apply."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class RecordReference(Part):
    """The position of one record on the log."""

    topic: str = Field(min_length=1)
    """Full topic name."""
    partition: int = Field(ge=0)
    """Partition number."""
    offset: int = Field(ge=0)
    """Offset in the partition."""

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class VersionSpan(Part):
    """Which weights produced which tokens of a response."""

    weight_version: int = Field(ge=0)
    """The version in service when the tokens were sampled. 0 is the base model."""
    start: int = Field(ge=0)
    """Index of the first token of the span."""
    end: int = Field(ge=0)
    """Index after the last token of the span."""


class TurnType(StrEnum):
    """What a turn is for."""

    MAIN = "main"
    """Part of the conversation: judged and trained."""
    SIDE = "side"
    """Titles, summaries, memory: served and logged, never trained, never a next state."""


class RolloutPosition(Part):
    """Where a turn stands in an environment's rollout, for agents that act in one."""

    task_id: str
    """The task that is attempted."""
    group_id: str
    """The group of rollouts that are compared with each other."""
    rollout_id: str
    """This attempt."""
    step_index: int = Field(ge=0)
    """Number of the turn within the attempt."""
    last_step_index: int | None = Field(default=None, ge=0)
    """Number of the attempt's last turn. Null until its end is known: it stands on outcomes and what follows them."""
    trainable_turns: int | None = Field(default=None, ge=0)
    """How many turns of the attempt may be trained: so many samples complete it. Null until its end is known."""

    @property
    def is_last(self) -> bool:
        """Whether this is known to be the attempt's last turn."""
        return self.last_step_index is not None and self.step_index == self.last_step_index


Timestamp = datetime
"""Timezone-aware, UTC."""
