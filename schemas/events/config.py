"""`clawstream.config`: decisions that all processes follow."""

from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event
from schemas.judge_spec import JudgeSpec


class ActiveJudgeSpecEvent(Event):
    """Which judge spec counts from now on. Promotion and rollback both write one, with a higher epoch."""

    event_type: ClassVar[str] = "clawstream.active-judge-spec"

    spec: JudgeSpec
    """The whole spec."""
    spec_hash: str = Field(min_length=1)
    """Its hash."""
    promotion_epoch: int = Field(ge=0)
    """Rises by one with every change: the first part of a sample's revision."""
    reason: str = ""
    """Why, for people."""
    activated_at: AwareDatetime
    """When."""
