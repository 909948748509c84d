"""What the owner of the gate remembers of one engine."""

import asyncio
from dataclasses import dataclass, field

from clawstream.engine.interface import EngineClient
from schemas.events.weights import EngineState
from services.gateway.gate.board import EngineRecord
from services.gateway.gate.settings import EngineSettings


@dataclass(slots=True)
class Charge:
    """One engine in the owner's care."""

    settings: EngineSettings
    client: EngineClient
    served: int | None = None
    """The version that it was brought to; what it reports must agree."""
    must_load: bool = False
    """Its version is unknown, or not one that the gate gave it: an explicit load comes before any request. `served`
    is then None."""
    must_resume: bool = True
    """It may be paused: by a dead owner, or by an update whose end it did not confirm."""
    is_reachable: bool = False
    is_updating: bool = False
    model_directory: str | None = None
    """Where it found the weights that it started with: version 0."""
    failures: int = 0
    retry_at: float = 0.0
    """Monotonic seconds before which no update is tried."""
    error: str = ""
    commands: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the engine is commanded: a late resume must not end the pause of an update."""

    @property
    def name(self) -> str:
        return self.settings.name

    @classmethod
    def inherit(cls, engine: EngineSettings, client: EngineClient, record: EngineRecord) -> "Charge":
        """What the last heartbeat says, however old: it is the only memory of what an engine was brought to."""
        charge = cls(engine, client)
        if record.state in (EngineState.READY, EngineState.FAILED):
            charge.served = record.weight_version
            charge.must_load = record.weight_version is None
        elif record.state is EngineState.UPDATING:
            charge.must_load = True
        return charge
