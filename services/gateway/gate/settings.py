"""Settings of the weight gate, embedded in the gateway's."""

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from clawstream.settings import Section


class EngineSettings(Section):
    """One inference engine."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Name on the log: the key of its heartbeats. The same in every gateway's settings."""
    url: str = Field(pattern=r"^https?://")
    """Base address, without a path."""
    loads_beside: bool = False
    """The engine loads new weights beside the old and swaps between two decode steps (`services.engine` does): it is
    neither paused nor taken out of service while it loads. SGLang does not: leave this off for it."""


class GateDeadlines(Section):
    """How long each phase of an update may take, in seconds. Past it the phase has failed."""

    verify_seconds: float = Field(default=300.0, gt=0)
    """Reading and checksumming the artefact. The engine serves on meanwhile."""
    pause_seconds: float = Field(default=10.0, gt=0)
    """Until the engine says that it is paused."""
    load_seconds: float = Field(default=300.0, gt=0)
    """Until the engine says that it has loaded."""
    resume_seconds: float = Field(default=10.0, gt=0)
    """Until the engine says that it goes on."""
    probe_seconds: float = Field(default=5.0, gt=0)
    """Until the engine says which version it serves."""
    announce_seconds: float = Field(default=10.0, gt=0)
    """Until a heartbeat is on the log."""


class GateSettings(Section):
    """How engines are watched, updated and chosen."""

    deadlines: GateDeadlines = GateDeadlines()
    """Of the phases of an update."""
    hold_seconds: float = Field(default=60.0, ge=0)
    """A request is held at most so long while no engine is ready; then it is refused with Retry-After."""
    retry_after_seconds: float = Field(default=5.0, gt=0)
    """What a refused request is told."""
    heartbeat_seconds: float = Field(default=2.0, gt=0)
    """Every engine is asked for its version, and its heartbeat written, this often."""
    heartbeat_expiry_seconds: float = Field(default=15.0, gt=0)
    """A heartbeat says nothing after this time; then gateways ask the engine themselves."""
    retry_seconds: float = Field(default=5.0, gt=0)
    """Pause after a failed update before it is tried again; doubles up to `retry_max_seconds`."""
    retry_max_seconds: float = Field(default=300.0, gt=0)
    """Longest pause between two tries."""

    @model_validator(mode="after")
    def _times_agree(self) -> "GateSettings":
        if self.heartbeat_expiry_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                "heartbeat_expiry_seconds must be at least twice heartbeat_seconds, or one late heartbeat "
                "takes an engine out of service"
            )
        if self.retry_max_seconds < self.retry_seconds:
            raise ValueError("retry_max_seconds must be at least retry_seconds")
        return self


def _names_differ(engines: list[EngineSettings]) -> list[EngineSettings]:
    names = [engine.name for engine in engines]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"engine names must differ; {', '.join(twice)} appear more than once")
    return engines


EngineList = Annotated[list[EngineSettings], Field(min_length=1), AfterValidator(_names_differ)]
"""The engines of a gateway, with names that differ."""
