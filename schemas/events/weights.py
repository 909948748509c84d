"""`clawstream.weight-version`, `clawstream.weight-pointer` and `clawstream.weights-applied`."""

from enum import StrEnum
from typing import ClassVar

from pydantic import AwareDatetime, Field

from schemas.events.base import Event


class WeightVersionEvent(Event):
    """A published checkpoint. Its number is never used again, whatever happens to the run."""

    event_type: ClassVar[str] = "clawstream.weight-version"

    policy: str = Field(min_length=1)
    """The policy that the weights belong to."""
    weight_version: int = Field(ge=0)
    """Number of the version. 0 is the base model."""
    base_version: int | None = Field(default=None, ge=0)
    """The version that training started from; null for version 0."""
    lineage: str = Field(min_length=1)
    """The training run."""
    train_step_id: str | None = None
    """The step that made it; null for version 0."""
    artefact_uri: str = Field(min_length=1)
    """fsspec URL of the directory with Hugging Face safetensors and `manifest.json`."""
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Checksum of `manifest.json`, which holds the checksum of every file."""
    published_at: AwareDatetime
    """When the artefact was complete."""


class WeightPointerEvent(Event):
    """Which version should be in service. The only way to go back is a pointer that says so."""

    event_type: ClassVar[str] = "clawstream.weight-pointer"

    policy: str = Field(min_length=1)
    """The policy."""
    weight_version: int = Field(ge=0)
    """The version to serve."""
    rollback: bool = False
    """True when people went back to this version: it is held, whatever is published meanwhile, until the record is
    removed. Without it a lower number than before is ignored."""
    reason: str = ""
    """Why, for people."""
    pointed_at: AwareDatetime
    """When it was decided."""


class EngineState(StrEnum):
    """What the weight gate knows about an engine."""

    READY = "ready"
    """Serves `weight_version`."""
    UPDATING = "updating"
    """Is being moved to another version."""
    FAILED = "failed"
    """The last update failed; it serves what it reports, or nothing when the version is unknown."""
    UNREACHABLE = "unreachable"
    """Does not answer."""


class WeightsAppliedEvent(Event):
    """A heartbeat for one engine by the owner of the weight gate. Gateways route by it until it expires."""

    event_type: ClassVar[str] = "clawstream.weights-applied"

    policy: str = Field(min_length=1)
    """The policy."""
    engine: str = Field(min_length=1)
    """Name of the engine."""
    state: EngineState
    """What it is doing."""
    weight_version: int | None = Field(default=None, ge=0)
    """The version that the engine itself reported; null when unknown: it then gets no traffic."""
    target_version: int | None = Field(default=None, ge=0)
    """The version it is being moved to."""
    gate_owner: str = Field(min_length=1)
    """The gateway that owns the gate."""
    gate_epoch: int = Field(default=0, ge=0)
    """Rises with every change of owner: a late heartbeat of an old owner is ignored."""
    error: str = ""
    """What went wrong, for people."""
    hold_seconds: float | None = Field(default=None, ge=0)
    """How long requests were held by the last update; null when none was."""
    observed_at: AwareDatetime
    """When it was observed."""
    expires_at: AwareDatetime
    """After this moment the heartbeat says nothing."""
