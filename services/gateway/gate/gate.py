"""The weight gate of one gateway, put together. Start it in the event loop that serves requests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawstream import topics
from clawstream.bus.interface import Bus, Record
from clawstream.clock import Clock
from clawstream.codec import decode
from clawstream.engine.interface import EngineClient
from clawstream.engine.start_flags import start_flag_warnings
from clawstream.errors import BusError, DecodeError, EngineError, GateDeposed
from clawstream.log import Logger
from clawstream.metrics import Metrics
from schemas.events import WeightsAppliedEvent
from services.gateway.gate.board import EngineBoard
from services.gateway.gate.heartbeats import HeartbeatLog
from services.gateway.gate.log_view import LogView
from services.gateway.gate.owner import GateOwner
from services.gateway.gate.ownership import Ownership
from services.gateway.gate.router import BoardRouter
from services.gateway.gate.settings import EngineSettings, GateSettings
from services.gateway.gate.update import within
from services.gateway.gate.weights_view import WeightsView
from services.gateway.ports import EngineRouter


class WeightGate:
    """Routes by the log; commands the engines while this gateway owns the gate."""

    def __init__(
        self,
        *,
        gateway: str,
        policy: str,
        namespace: str,
        engines: Sequence[EngineSettings],
        clients: Mapping[str, EngineClient],
        settings: GateSettings,
        bus: Bus,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
        on_fatal: Callable[[Exception], None],
    ) -> None:
        """`clients` has one entry per engine, by name; they stay the caller's to close.

        `on_fatal` is called, in the event loop, when this process must exit.
        """
        self._gateway = gateway
        self._policy = policy
        self._engines = engines
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._on_fatal = on_fatal
        self._weights_topic = topics.full_name(namespace, topics.WEIGHTS)
        self._applied_topic = topics.full_name(namespace, topics.WEIGHTS_APPLIED)
        self._weights = WeightsView(policy)
        self._board = EngineBoard([engine.name for engine in engines], clock)
        self._router = BoardRouter(
            self._board,
            clients,
            hold_seconds=settings.hold_seconds,
            retry_after_seconds=settings.retry_after_seconds,
            metrics=metrics,
            failure_reported=self._failure_reported,
        )
        self._log = LogView(
            bus, [self._weights_topic, self._applied_topic], apply=self._apply, on_fatal=on_fatal, logger=logger
        )
        self._heartbeats = HeartbeatLog(
            bus, self._applied_topic, gateway=gateway, flush_seconds=settings.deadlines.announce_seconds
        )
        self._ownership = Ownership(
            bus,
            weights_topic=self._weights_topic,
            group=f"{namespace}.weight-gate",
            gateway=gateway,
            acquired=self._acquired,
            released=self._released,
            lost=self._lost,
            failed=on_fatal,
            release_seconds=2 * settings.deadlines.resume_seconds,
            logger=logger,
        )
        self._owner: GateOwner | None = None
        self._own_epochs: set[int] = set()
        self._term: asyncio.Task[None] | None = None
        self._probes: asyncio.Task[None] | None = None
        self._probe_now = asyncio.Event()
        self._flag_warnings: dict[str, list[str]] = {}
        """By engine, once it was asked how it was started."""

    @property
    def router(self) -> EngineRouter:
        """Where the surface gets engines."""
        return self._router

    @property
    def is_owner(self) -> bool:
        """Whether this gateway commands the engines now."""
        return self._owner is not None

    def is_updating(self, engine_name: str) -> bool:
        """Whether the engine may be paused for an update: answers that run on it are then late, not lost."""
        return self._board.is_updating(engine_name)

    async def start(self) -> None:
        """Begins to follow the log and takes part in the election. Does not wait for an engine."""
        self._log.start()
        self._ownership.start()
        self._probes = asyncio.create_task(self._probe_all(), name="gate-probes")
        self._probes.add_done_callback(self._task_ended)

    async def close(self) -> None:
        """Hands the gate over: an engine that this gateway has paused goes on first."""
        if self._probes is not None:
            self._probes.cancel()
            await asyncio.gather(self._probes, return_exceptions=True)
        await self._ownership.close()
        await self._released()
        await self._log.close()
        await self._heartbeats.close()

    def status(self) -> dict[str, Any]:
        """What an operator wants to know."""
        return {
            "owner": self.is_owner,
            "pointer_version": self._weights.pointer_version,
            "rolled_back": self._weights.is_rolled_back,
            "engines": {
                record.name: {
                    "ready": self._board.is_ready(record),
                    "state": record.state,
                    "weight_version": record.weight_version,
                    "target_version": record.target_version,
                    "suspect": record.is_suspect,
                    "requests": record.requests,
                    "hold_seconds": record.hold_seconds,
                    "error": record.error,
                    "warnings": self._flag_warnings.get(record.name, []),
                }
                for record in self._board.records
            },
        }

    # -- the log

    def _apply(self, record: Record) -> None:
        try:
            if record.topic == self._weights_topic:
                if self._weights.apply(record):
                    self._logger.info("another version should be served", version=self._weights.pointer_version)
                    if self._owner is not None:
                        self._owner.pointer_moved()
                return
            if record.value is None:
                return
            event = decode(record)
        except DecodeError as error:
            self._logger.error("a record about weights was skipped", error=str(error))
            return
        if not isinstance(event, WeightsAppliedEvent) or event.policy != self._policy:
            return
        self._board.note_term(event.gate_epoch, event.gate_owner)
        is_echo = event.gate_owner == self._gateway and event.gate_epoch in self._own_epochs
        if not is_echo:
            self._board.fold(event)

    # -- ownership

    def _acquired(self) -> None:
        if self._term is None:
            self._term = asyncio.create_task(self._serve_terms(), name="gate-owner")
            self._term.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task of the gate ends only by being cancelled; anything else is a fault that must not pass unnoticed."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._logger.error("the weight gate failed", exc_info=error)
            self._on_fatal(error)

    async def _released(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.cancel()
            await asyncio.gather(term, return_exceptions=True)

    def _lost(self) -> None:
        if self._owner is not None:
            self._owner.was_lost = True
        term, self._term = self._term, None
        if term is not None:
            term.cancel()

    async def _serve_terms(self) -> None:
        """One term after another, for as long as the partition is ours."""
        while True:
            try:
                await self._log.caught_up.wait()
                epoch = await self._heartbeats.new_epoch()
                self._own_epochs.add(epoch)
                owner = GateOwner(
                    gateway=self._gateway,
                    policy=self._policy,
                    epoch=epoch,
                    engines=self._engines,
                    clients=self._clients,
                    settings=self._settings,
                    weights=self._weights,
                    board=self._board,
                    log=self._log,
                    applied_topic=self._applied_topic,
                    heartbeats=self._heartbeats,
                    clock=self._clock,
                    metrics=self._metrics,
                    logger=self._logger,
                )
                self._owner = owner
                await owner.run()
            except (BusError, GateDeposed) as error:
                self._logger.warning("a term of the weight gate ended; trying again", error=str(error))
            finally:
                self._owner = None
            await self._ownership.confirmed()

    # -- engines that the log says nothing new about

    def _failure_reported(self, engine_name: str) -> None:
        self._logger.warning("an engine failed a request and is left out until it is seen healthy", engine=engine_name)
        self._probe_now.set()
        if self._owner is not None:
            self._owner.look()

    async def _probe_all(self) -> None:
        while True:
            self._probe_now.clear()
            if self._owner is None:
                await asyncio.gather(*(self._probe(engine.name) for engine in self._engines))
            await asyncio.gather(*(self._check_start_flags(engine.name) for engine in self._engines))
            try:
                async with asyncio.timeout(self._settings.heartbeat_seconds):
                    await self._probe_now.wait()
            except TimeoutError:
                pass

    async def _check_start_flags(self, name: str) -> None:
        """Says once of every engine, and again when it was away, how it should have been started."""
        if not self._board.is_ready(self._board[name]):
            self._flag_warnings.pop(name, None)
            return
        if name in self._flag_warnings:
            return
        try:
            information = await within(
                self._settings.deadlines.probe_seconds,
                "asking how it was started",
                self._clients[name].server_information(),
            )
        except EngineError:
            return
        self._flag_warnings[name] = start_flag_warnings(information)
        for warning in self._flag_warnings[name]:
            self._logger.warning("an engine was not started as it should be", engine=name, problem=warning)

    async def _probe(self, name: str) -> None:
        """Asks an engine itself where heartbeats do not suffice: it failed a request, or they are about to expire."""
        if not self._board.needs_confirmation(name, within_seconds=2 * self._settings.heartbeat_seconds):
            return
        try:
            information = await within(
                self._settings.deadlines.probe_seconds,
                "asking for the version",
                self._clients[name].model_information(),
            )
        except EngineError:
            return
        if information.weight_version is not None:
            self._board.confirm(name, information.weight_version, self._settings.heartbeat_expiry_seconds)


def build_gate(
    *,
    gateway: str,
    policy: str,
    namespace: str,
    engines: Sequence[EngineSettings],
    settings: GateSettings,
    bus: Bus,
    clients: Mapping[str, EngineClient],
    clock: Clock,
    metrics: Metrics,
    logger: Logger,
    on_fatal: Callable[[Exception], None],
) -> WeightGate:
    """The gate of `gateway`. Call inside the event loop; then await its `start`, and at the end its `close`."""
    return WeightGate(
        gateway=gateway,
        policy=policy,
        namespace=namespace,
        engines=engines,
        clients=clients,
        settings=settings,
        bus=bus,
        clock=clock,
        metrics=metrics,
        logger=logger,
        on_fatal=on_fatal,
    )
