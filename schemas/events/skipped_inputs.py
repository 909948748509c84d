"""`clawstream.skipped-inputs`: inputs from which nothing followed, on purpose."""

from itertools import pairwise
from typing import ClassVar

from pydantic import Field, model_validator

from schemas.events.base import Event


class SkippedInputsEvent(Event):
    """The inputs of one partition that a stage skipped in one transaction."""

    event_type: ClassVar[str] = "clawstream.skipped-inputs"

    stage: str = Field(min_length=1)
    """Who skipped them: `judge` or `teacher`."""
    topic: str = Field(min_length=1)
    """Full name of the topic that they are on."""
    partition: int = Field(ge=0)
    """Their partition."""
    offsets_by_reason: dict[str, list[int]] = Field(min_length=1)
    """A word (`session_end`, `no_hint`...) to the offsets that were skipped for it, rising."""

    @model_validator(mode="after")
    def _offsets_rise(self) -> "SkippedInputsEvent":
        for reason, offsets in self.offsets_by_reason.items():
            if not offsets or offsets[0] < 0 or any(a >= b for a, b in pairwise(offsets)):
                raise ValueError(f"offsets of {reason} must be some, not negative, and rise")
        return self
