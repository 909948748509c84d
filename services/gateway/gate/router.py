"""Chooses an engine for each request: by load, with affinity of sessions, and never one that the gate does not know.

Affinity is rendezvous hashing (Thaler and Ravishankar 1998): it needs no memory, and a session comes back to its
engine after an update. It yields to load where its engine has more than its share ("consistent hashing with bounded
loads", Mirrokni, Thorup and Zadimoghaddam 2016, with a bound of 1.25 times the mean).
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from clawstream.engine.interface import EngineClient
from clawstream.errors import NoEngineReady
from clawstream.metrics import Metrics
from services.gateway.gate.board import EngineBoard, EngineRecord
from services.gateway.ports import EngineLease

_LOAD_BOUND = 1.25


def choose(session_id: str, ready: list[EngineRecord]) -> EngineRecord:
    """The engine for a session among those that are ready (at least one)."""
    capacity = math.ceil(_LOAD_BOUND * (sum(record.requests for record in ready) + 1) / len(ready))
    preferred = sorted(ready, key=lambda record: _affinity(session_id, record.name), reverse=True)
    return next(record for record in preferred if record.requests < capacity)


def _affinity(session_id: str, engine_name: str) -> bytes:
    return hashlib.blake2b(f"{session_id}\x1f{engine_name}".encode(), digest_size=8).digest()


class BoardRouter:
    """`services.gateway.ports.EngineRouter` over an `EngineBoard`."""

    def __init__(
        self,
        board: EngineBoard,
        clients: Mapping[str, EngineClient],
        *,
        hold_seconds: float,
        retry_after_seconds: float,
        metrics: Metrics,
        failure_reported: Callable[[str], None],
    ) -> None:
        self._board = board
        self._clients = clients
        self._hold_seconds = hold_seconds
        self._retry_after_seconds = retry_after_seconds
        self._metrics = metrics
        self._failure_reported = failure_reported

    def lease(self, session_id: Callable[[], Awaitable[str]]) -> AbstractAsyncContextManager[EngineLease]:
        """See `EngineRouter.lease`."""
        return self._lease(session_id)

    @asynccontextmanager
    async def _lease(self, session_id: Callable[[], Awaitable[str]]) -> AsyncGenerator[EngineLease]:
        ready = self._board.ready() or await self._hold()
        if len(ready) > 1:
            known_id = await session_id()
            # What was ready before may be on its way to other weights by now.
            record = choose(known_id, self._board.ready() or await self._hold())
        else:
            [record] = ready
        assert record.weight_version is not None
        lease = EngineLease(self._clients[record.name], record.weight_version)
        record.requests += 1
        try:
            yield lease
        finally:
            record.requests -= 1

    async def _hold(self) -> list[EngineRecord]:
        ticket = self._board.begin_wait()
        try:
            async with asyncio.timeout(self._hold_seconds):
                while not (ready := self._board.ready()):
                    await self._board.changed()
                return ready
        except TimeoutError as error:
            states = ", ".join(
                f"{record.name}: {record.state or 'unknown'}{', suspect' if record.is_suspect else ''}"
                f"{' (' + record.error + ')' if record.error else ''}"
                for record in self._board.records
            )
            raise NoEngineReady(
                f"no engine was ready within {self._hold_seconds:g} s ({states})",
                retry_after_seconds=self._retry_after_seconds,
            ) from error
        finally:
            self._metrics.observe("hold_seconds", self._board.end_wait(ticket))

    def report_failure(self, engine_name: str) -> None:
        """See `EngineRouter.report_failure`."""
        self._board.suspect(engine_name)
        self._failure_reported(engine_name)

    def is_ready(self) -> bool:
        """See `EngineRouter.is_ready`."""
        return bool(self._board.ready())
