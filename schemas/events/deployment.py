"""`clawstream.deployment`: which system a namespace of topics belongs to."""

from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event


class DeploymentEvent(Event):
    """The claim of the system that came first. Others are refused."""

    event_type: ClassVar[str] = "clawstream.deployment"

    deployment_id: str = Field(min_length=1)
    """Stands in the file `deployment-id` of every data directory of the system."""
    data_directory: str = Field(min_length=1)
    """The data directory that claimed it, for people."""
    host: str = Field(min_length=1)
    """The machine that it is on, for people."""
    claimed_at: AwareDatetime
    """When."""
