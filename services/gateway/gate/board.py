"""What this gateway knows of every engine, and the requests that wait for one. Single-threaded: the event loop's.

A fact comes from the log (the owner's heartbeats) or, on the owner, from the engine itself. Everything else in the
gate reads and writes here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from clawstream.clock import Clock
from schemas.events import WeightsAppliedEvent
from schemas.events.weights import EngineState

_SERVING = (EngineState.READY, EngineState.FAILED)
"""States in which an engine serves the version it is known to have: after a failed update that is the old one."""


@dataclass(slots=True)
class EngineRecord:
    """One engine."""

    name: str
    state: EngineState | None = None
    """None before anything is known."""
    weight_version: int | None = None
    """What it serves; None when unknown: it then gets no traffic."""
    target_version: int | None = None
    """What it is being moved to."""
    error: str = ""
    """What went wrong last, for people."""
    hold_seconds: float | None = None
    """How long requests were held by its last update."""
    valid_until: datetime | None = None
    """After this moment the record says nothing about now, but still what was last true."""
    is_suspect: bool = False
    """It failed a request: left out until it is seen healthy."""
    requests: int = 0
    """Requests that this gateway runs on it."""


class EngineBoard:
    """The records of all engines of the settings."""

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._clock = clock
        self._records = {name: EngineRecord(name) for name in names}
        self._changed = asyncio.Event()
        self._waiting_since: dict[object, float] = {}
        self._newest_term = (-1, "")
        self.commanding_epoch: int | None = None
        """Epoch of this gateway's own term of ownership; None while another gateway commands."""

    @property
    def records(self) -> Sequence[EngineRecord]:
        """In the order of the settings."""
        return list(self._records.values())

    def __getitem__(self, name: str) -> EngineRecord:
        return self._records[name]

    @property
    def newest_term(self) -> tuple[int, str]:
        """The highest epoch that was read, and the gateway that wrote it first."""
        return self._newest_term

    def note_term(self, gate_epoch: int, gate_owner: str) -> None:
        """A heartbeat of this owner was read, whoever it is. To be told of all of them, in the log's order."""
        if gate_epoch > self._newest_term[0]:
            self._newest_term = (gate_epoch, gate_owner)

    def is_ready(self, record: EngineRecord) -> bool:
        """Whether the engine may be given a request now."""
        return (
            record.state in _SERVING
            and record.weight_version is not None
            and not record.is_suspect
            and record.valid_until is not None
            and self._clock.now() < record.valid_until
        )

    def is_updating(self, name: str) -> bool:
        """Whether the engine is being moved to another version: it may then be paused, and silent."""
        record = self._records[name]
        return (
            record.state is EngineState.UPDATING
            and record.valid_until is not None
            and self._clock.now() < record.valid_until
        )

    def ready(self) -> list[EngineRecord]:
        """The engines that may be given a request now."""
        return [record for record in self._records.values() if self.is_ready(record)]

    def observe(
        self,
        name: str,
        state: EngineState,
        weight_version: int | None,
        *,
        valid_seconds: float,
        target_version: int | None = None,
        error: str = "",
    ) -> EngineRecord:
        """Writes down what the owner saw itself."""
        record = self._records[name]
        record.state = state
        record.weight_version = weight_version
        record.target_version = target_version
        record.error = error
        record.valid_until = self._clock.now() + timedelta(seconds=valid_seconds)
        if state in _SERVING and weight_version is not None:
            record.is_suspect = False
        self.notify()
        return record

    def fold(self, event: WeightsAppliedEvent) -> None:
        """Takes in another gateway's heartbeat. A late one of an earlier owner is ignored while a later's is valid."""
        record = self._records.get(event.engine)
        if record is None:
            return
        if self.commanding_epoch is not None and event.gate_epoch < self.commanding_epoch:
            return
        still_valid = record.valid_until is not None and self._clock.now() < record.valid_until
        if (event.gate_epoch, event.gate_owner) != self._newest_term and still_valid:
            return
        record.state = event.state
        record.weight_version = event.weight_version
        record.target_version = event.target_version
        record.error = event.error
        record.hold_seconds = event.hold_seconds
        record.valid_until = event.expires_at
        self.notify()

    def needs_confirmation(self, name: str, within_seconds: float) -> bool:
        """Whether the engine would serve but for a failed request or a heartbeat that is, or soon will be, too old."""
        record = self._records[name]
        if record.state not in _SERVING or record.weight_version is None:
            return False
        soon = self._clock.now() + timedelta(seconds=within_seconds)
        return record.is_suspect or record.valid_until is None or record.valid_until < soon

    def confirm(self, name: str, weight_version: int, valid_seconds: float) -> bool:
        """The engine itself said which version it serves. True when that agrees with what was last known of it.

        This carries a gateway over a time without heartbeats (a change of owner, a broker outage), and brings an
        engine back that failed a request. An engine that says something else must wait for the owner.
        """
        record = self._records[name]
        if record.state not in _SERVING or record.weight_version != weight_version:
            return False
        record.is_suspect = False
        record.valid_until = max(
            record.valid_until or self._clock.now(), self._clock.now() + timedelta(seconds=valid_seconds)
        )
        self.notify()
        return True

    def extend(self, name: str, valid_seconds: float) -> None:
        """What is known of the engine holds on while its update runs."""
        self._records[name].valid_until = self._clock.now() + timedelta(seconds=valid_seconds)

    def suspect(self, name: str) -> None:
        """The engine did not answer a request."""
        self._records[name].is_suspect = True
        self.notify()

    def notify(self) -> None:
        """Wakes everything that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns at the next change."""
        await self._changed.wait()

    def begin_wait(self) -> object:
        """A request is held from now on; returns what `end_wait` needs."""
        ticket = object()
        self._waiting_since[ticket] = self._clock.monotonic_seconds()
        return ticket

    def end_wait(self, ticket: object) -> float:
        """The request is no longer held; returns for how many seconds it was."""
        return self._clock.monotonic_seconds() - self._waiting_since.pop(ticket)

    def longest_wait_seconds(self) -> float | None:
        """How long the oldest held request has waited; None when none is held."""
        if not self._waiting_since:
            return None
        return self._clock.monotonic_seconds() - min(self._waiting_since.values())
