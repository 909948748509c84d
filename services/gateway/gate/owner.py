"""What the owner of the weight gate does: watch every engine, and move them, one at a time, to the pointer's version.

Two rules keep an owner that was replaced without noticing (a paused process, a cut network) from doing harm. Before
it commands an engine, its intent must be on the log; and it reads the log up to that record: if a later owner has
written in between, it stops. So the topic is the lock, and its order decides.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta

from clawstream.clock import Clock
from clawstream.engine.interface import EngineClient
from clawstream.errors import BusError, EngineError, GateDeposed
from clawstream.log import Logger
from clawstream.metrics import Metrics
from schemas.events import WeightsAppliedEvent
from schemas.events.weights import EngineState
from services.gateway.gate.board import EngineBoard, EngineRecord
from services.gateway.gate.charge import Charge
from services.gateway.gate.heartbeats import HeartbeatLog
from services.gateway.gate.loadable import fallbacks, loadable
from services.gateway.gate.log_view import LogView
from services.gateway.gate.settings import EngineSettings, GateSettings
from services.gateway.gate.update import EngineUpdate, UpdateResult, within
from services.gateway.gate.weights_view import WeightsView


class GateOwner:
    """One term of ownership. `run` until it raises or is cancelled."""

    def __init__(
        self,
        *,
        gateway: str,
        policy: str,
        epoch: int,
        engines: Sequence[EngineSettings],
        clients: Mapping[str, EngineClient],
        settings: GateSettings,
        weights: WeightsView,
        board: EngineBoard,
        log: LogView,
        applied_topic: str,
        heartbeats: HeartbeatLog,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._gateway = gateway
        self._policy = policy
        self.epoch = epoch
        self._settings = settings
        self._weights = weights
        self._board = board
        self._log = log
        self._applied_topic = applied_topic
        self._heartbeats = heartbeats
        self._clock = clock
        self._metrics = metrics
        self._logger = logger.bind(gate_epoch=epoch)
        self._charges = [Charge.inherit(engine, clients[engine.name], board[engine.name]) for engine in engines]
        self._look = asyncio.Event()
        self._roll = asyncio.Event()
        self.was_lost = False
        """Set before cancelling when another gateway may command the engines already: then nothing is undone."""

    def look(self) -> None:
        """Asks the engines now rather than at the next heartbeat."""
        self._look.set()

    def pointer_moved(self) -> None:
        """There is something to load, and no reason to wait out the failures of another version."""
        for charge in self._charges:
            charge.retry_at = 0.0
        self._roll.set()

    async def run(self) -> None:
        """Raises GateDeposed when a later owner has written. Cancelling resumes an engine that is paused."""
        self._board.commanding_epoch = self.epoch
        self._logger.info("owns the weight gate", engines=[charge.name for charge in self._charges])
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._update_all())
        except ExceptionGroup as group:
            deposed, other = group.split(GateDeposed)
            if deposed is not None and other is None:
                raise GateDeposed(str(deposed.exceptions[0])) from group
            raise
        finally:
            self._board.commanding_epoch = None

    # -- watching

    async def _watch(self) -> None:
        while True:
            self._look.clear()
            await asyncio.gather(*(self._observe(charge) for charge in self._charges))
            self._roll.set()
            try:
                await self._heartbeat(self._charges)
            except BusError as error:
                self._logger.warning("heartbeats could not be written; engines are watched on", error=str(error))
            self._check_epoch()
            try:
                async with asyncio.timeout(self._settings.heartbeat_seconds):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _observe(self, charge: Charge) -> None:
        deadlines = self._settings.deadlines
        if charge.is_updating:
            self._board.extend(charge.name, self._settings.heartbeat_expiry_seconds)
            return
        try:
            await self._resume_orphan(charge)
            information = await within(
                deadlines.probe_seconds, "asking for the version", charge.client.model_information()
            )
        except EngineError as error:
            if not charge.is_updating:
                charge.is_reachable = False
                self._show(charge, EngineState.UNREACHABLE, None, error=str(error))
            return
        if charge.is_updating:
            return
        charge.is_reachable = True
        reported = information.weight_version
        if reported in (None, 0):
            charge.model_directory = information.model_path
        if not charge.must_load and reported is not None:
            if reported in (charge.served, self._weights.pointer_version):
                charge.served = reported
                if reported == self._weights.pointer_version:
                    charge.error = ""
                    charge.failures = 0
                self._show_serving(charge)
                return
            if charge.served is not None:
                self._logger.warning(
                    "an engine came back with other weights", engine=charge.name, loaded=charge.served, reports=reported
                )
        charge.must_load = True
        charge.served = None
        why = charge.error or f"reports version {reported}, which the gate did not load"
        self._show(charge, EngineState.FAILED, None, error=why)

    async def _resume_orphan(self, charge: Charge) -> None:
        """Un-pauses an engine that nobody updates: a dead owner left it so, or a zombie's late command.

        Nobody but the owner pauses an engine for longer than a moment, so a pause without an update is an orphan.
        """
        deadlines = self._settings.deadlines
        async with charge.commands:
            if charge.is_updating:
                return
            if not charge.must_resume:
                accepts = await within(
                    deadlines.probe_seconds, "asking whether it is paused", charge.client.accepts_requests()
                )
                if accepts:
                    return
                self._logger.warning("an engine was paused and nobody updates it; resuming it", engine=charge.name)
                self._metrics.increment("orphaned_pauses_total", engine=charge.name)
            await within(deadlines.resume_seconds, "resuming", charge.client.resume())
            charge.must_resume = False

    def _show_serving(self, charge: Charge) -> None:
        state = EngineState.FAILED if charge.error else EngineState.READY
        self._show(charge, state, charge.served, error=charge.error)

    def _show(
        self,
        charge: Charge,
        state: EngineState,
        weight_version: int | None,
        *,
        target_version: int | None = None,
        error: str = "",
    ) -> None:
        self._board.observe(
            charge.name,
            state,
            weight_version,
            valid_seconds=self._settings.heartbeat_expiry_seconds,
            target_version=target_version,
            error=error,
        )
        self._metrics.set("engine_weight_version", -1 if weight_version is None else weight_version, engine=charge.name)

    async def _heartbeat(self, charges: Sequence[Charge]) -> int:
        now = self._clock.now()
        expires_at = now + timedelta(seconds=self._settings.heartbeat_expiry_seconds)
        events: list[WeightsAppliedEvent] = []
        for charge in charges:
            record: EngineRecord = self._board[charge.name]
            events.append(
                WeightsAppliedEvent(
                    policy=self._policy,
                    engine=charge.name,
                    state=record.state or EngineState.UNREACHABLE,
                    weight_version=record.weight_version,
                    target_version=record.target_version,
                    gate_owner=self._gateway,
                    gate_epoch=self.epoch,
                    error=record.error,
                    hold_seconds=record.hold_seconds,
                    observed_at=now,
                    expires_at=expires_at,
                )
            )
        return await self._heartbeats.write(events)

    def _check_epoch(self) -> None:
        epoch, owner = self._board.newest_term
        if epoch > self.epoch or (epoch == self.epoch and owner != self._gateway):
            self.was_lost = True
            raise GateDeposed(f"{owner} took over the weight gate with epoch {epoch}; this one's was {self.epoch}")

    # -- updating

    async def _update_all(self) -> None:
        while True:
            self._roll.clear()
            charge = self._next_to_update()
            if charge is not None:
                await self._update(charge)
                continue
            retry_at = min((charge.retry_at for charge in self._charges if self._is_behind(charge)), default=None)
            delay = None if retry_at is None else max(0.0, retry_at - self._clock.monotonic_seconds())
            try:
                # An engine that cannot be reached is behind and not due: the next look at it wakes this loop.
                async with asyncio.timeout(delay if delay else None):
                    await self._roll.wait()
            except TimeoutError:
                pass

    def _is_behind(self, charge: Charge) -> bool:
        return charge.must_load or charge.served != self._weights.pointer_version

    def _next_to_update(self) -> Charge | None:
        """Engines without a version first: updating those costs nobody anything."""
        now = self._clock.monotonic_seconds()
        due = [
            charge
            for charge in self._charges
            if charge.is_reachable and self._is_behind(charge) and charge.retry_at <= now
        ]
        return min(due, key=lambda charge: (not charge.must_load, charge.failures), default=None)

    async def _update(self, charge: Charge) -> None:
        version = self._weights.pointer_version
        target = loadable(self._weights, charge, version)
        stand_ins = fallbacks(self._weights, charge, version)
        if target is None:
            missing = f"version {version} should be served but is not on the log (removed, or never published)"
            if charge.served is not None or not stand_ins:
                self._end_update(charge, UpdateResult(charge.served, missing))
                return
            target, stand_ins = stand_ins[0], stand_ins[1:]

        async def take_out_of_service(coming_version: int) -> None:
            self._show(charge, EngineState.UPDATING, None, target_version=coming_version)
            offset = await self._heartbeat([charge])
            await within(
                self._settings.deadlines.announce_seconds,
                "reading the announcement back",
                self._log.reached(self._applied_topic, offset),
            )
            self._check_epoch()

        update = EngineUpdate(
            charge.client,
            serving=charge.served,
            loads_beside=charge.settings.loads_beside,
            deadlines=self._settings.deadlines,
            take_out_of_service=take_out_of_service,
            longest_wait_seconds=self._board.longest_wait_seconds,
            may_still_command=lambda: not self.was_lost,
        )
        self._logger.info("updates an engine", engine=charge.name, from_version=charge.served, to_version=version)
        started = self._clock.monotonic_seconds()
        async with charge.commands:
            charge.is_updating = True
            try:
                result = await update.run(target, stand_ins)
            except BusError as error:
                result = UpdateResult(None if update.weights_touched else charge.served, f"was not updated: {error}")
            finally:
                charge.is_updating = False
        seconds = self._clock.monotonic_seconds() - started
        self._metrics.observe("weight_update_seconds", seconds)
        self._metrics.increment(
            "weight_updates_total", engine=charge.name, result="failed" if result.error else "loaded"
        )
        self._end_update(charge, result)
        self._logger.info(
            "an engine's update ended",
            engine=charge.name,
            serves=result.weight_version,
            seconds=round(seconds, 3),
            hold_seconds=result.hold_seconds,
        )
        try:
            await self._heartbeat([charge])
        except BusError as error:
            self._logger.warning("a heartbeat could not be written", engine=charge.name, error=str(error))

    def _end_update(self, charge: Charge, result: UpdateResult) -> None:
        charge.served = result.weight_version
        charge.must_load = result.weight_version is None
        charge.must_resume = result.may_be_paused
        charge.error = result.error
        self._board[charge.name].hold_seconds = result.hold_seconds
        if result.error:
            charge.failures += 1
            delay = min(self._settings.retry_seconds * 2 ** (charge.failures - 1), self._settings.retry_max_seconds)
            charge.retry_at = self._clock.monotonic_seconds() + delay
            self._logger.error(
                "an engine could not be updated",
                engine=charge.name,
                serves=result.weight_version,
                error=result.error,
                retry_seconds=delay,
            )
        else:
            charge.failures = 0
        if result.may_be_paused:
            self._show(charge, EngineState.FAILED, None, error=result.error)
        else:
            self._show_serving(charge)
