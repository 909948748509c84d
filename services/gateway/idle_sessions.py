"""Ends the sessions that fell idle: their unanswered turns get a next state of kind session_end."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from clawstream.clock import Clock
from clawstream.errors import OutboxError
from clawstream.log import Logger
from clawstream.metrics import Metrics
from services.gateway.entry_encoder import EntryEncoder
from services.gateway.index_follower import IndexFollower
from services.gateway.known_turn import KnownTurn
from services.gateway.open_sessions import OpenSessions
from services.gateway.outbox import Outbox
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore

_RESTORE_CHUNK = 1000


class IdleSessions:
    """Used on the event loop only; what may take long runs in a thread."""

    def __init__(
        self,
        *,
        open_sessions: OpenSessions,
        encoder: EntryEncoder,
        outbox: Outbox,
        store: TurnIndexStore,
        index: TurnIndex,
        follower: IndexFollower,
        idle_limit_seconds: float,
        check_seconds: float,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """A session without requests for `idle_limit_seconds` ends; every `check_seconds` they are looked for."""
        self._open = open_sessions
        self._encoder = encoder
        self._outbox = outbox
        self._store = store
        self._index = index
        self._follower = follower
        self._idle_limit_seconds = idle_limit_seconds
        self._check_seconds = check_seconds
        self._clock = clock
        self._metrics = metrics
        self._logger = logger

    async def run(self) -> None:
        """For ever. What earlier processes left open is taken over once the index is loaded."""
        restored = False
        while True:
            await asyncio.sleep(self._check_seconds)
            if self._follower.caught_up and not restored:
                await self.restore()
                restored = True
            await self.close_idle()

    async def close_idle(self) -> int:
        """Ends the sessions that fell idle. Returns how many turns were given a next state of kind session_end."""
        before = self._clock.monotonic_seconds() - self._idle_limit_seconds
        return await self._end_or_keep(self._open.close_idle(before)) or 0

    async def restore(self) -> None:
        """Turns that an earlier process of this gateway served and that nothing followed go on waiting, or end."""
        limit = timedelta(seconds=self._idle_limit_seconds)
        while True:
            turns = await asyncio.to_thread(self._store.unfinished, _RESTORE_CHUNK)
            now, monotonic = self._clock.now(), self._clock.monotonic_seconds()
            old = [turn for turn in turns if now - turn.created_at > limit]
            if len(old) < _RESTORE_CHUNK:
                for turn in turns[len(old) :]:
                    self._open.add(turn, monotonic)
                await self._end_or_keep(old)
                return
            if not await self._end_or_keep(old):
                return

    async def _end_or_keep(self, turns: Sequence[KnownTurn]) -> int | None:
        """How many were ended; None when the outbox refused: then their sessions stay open, as idle as they were."""
        try:
            return await self._end(turns)
        except OutboxError as error:
            self._logger.warning("ends of sessions are not written", turns=len(turns), error=str(error))
            self._open.reopen_idle(turns)
            return None

    async def _end(self, turns: Sequence[KnownTurn]) -> int:
        """Ends those that did not go on at another gateway. Returns how many. Raises OutboxError."""
        ending = await asyncio.to_thread(lambda: [turn for turn in turns if not self._index.has_child(turn.turn_id)])
        if not ending:
            return 0
        payloads = await asyncio.to_thread(self._encoder.session_ends, ending, self._clock.now())
        await asyncio.wrap_future(self._outbox.submit(payloads))
        await asyncio.to_thread(self._store.mark_ended, [turn.turn_id for turn in ending])
        self._metrics.increment("next_states_total", amount=len(ending), kind="session_end")
        return len(ending)
