"""Implements `services.gateway.ports.Conversations`: session tree, index, outbox and drain put together."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from clawstream.clock import Clock
from clawstream.errors import OutboxError, RequestRefused
from clawstream.log import Logger
from clawstream.metrics import Metrics
from schemas.events import TurnEvent
from schemas.events.next_state import ExplicitFeedback, NextStateKind
from services.gateway.conversation_settings import ConversationSettings
from services.gateway.drain import OutboxDrain
from services.gateway.entry_encoder import EntryEncoder
from services.gateway.idle_sessions import IdleSessions
from services.gateway.index_follower import IndexFollower
from services.gateway.known_turn import KnownTurn
from services.gateway.next_state_writer import NextStateWriter
from services.gateway.next_states import NextStateDraft, explicit_next_state
from services.gateway.open_sessions import OpenSessions
from services.gateway.outbox import Outbox
from services.gateway.outbox_entries import NextStateEntry, decode_entry
from services.gateway.placing import Placed, Placer, expects_parent
from services.gateway.ports import IncomingRequest, Placement, RecordedOutcome, RolloutOutcome
from services.gateway.rollout_outcome import outcome_next_states, turns_of_rollout
from services.gateway.turn_blobs import TurnBlobs
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore

Result = TypeVar("Result")

_LOOKUP_THREADS = 2
_OTHER_GATEWAY_ACTIVE_SECONDS = 60.0
_OTHER_GATEWAY_POLL_SECONDS = 0.01


class GatewayConversations:
    """The event loop never waits for a disk here: lookups and encoding run in threads, syncing in the outbox's own."""

    def __init__(
        self,
        *,
        settings: ConversationSettings,
        encoder: EntryEncoder,
        placer: Placer,
        blobs: TurnBlobs,
        outbox: Outbox,
        store: TurnIndexStore,
        index: TurnIndex,
        follower: IndexFollower,
        drain: OutboxDrain,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """Use `build_conversations`."""
        self._settings = settings
        self._encoder = encoder
        self._placer = placer
        self._blobs = blobs
        self._outbox = outbox
        self._store = store
        self._index = index
        self._follower = follower
        self.drain = drain
        """Moves the outbox onto the log."""
        self._clock = clock
        self.metrics = metrics
        """What this process counts."""
        self._logger = logger
        self._open = OpenSessions()
        self._executor = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="conversations")
        self._next_states = NextStateWriter(
            outbox=outbox,
            encode=lambda draft, trace_id: self._in_thread(lambda: encoder.next_state(draft, trace_id)),
            on_submitted=self._followed,
            metrics=metrics,
            logger=logger,
        )
        self.idle_sessions = IdleSessions(
            open_sessions=self._open,
            encoder=encoder,
            outbox=outbox,
            store=store,
            index=index,
            follower=follower,
            idle_limit_seconds=settings.idle_limit_seconds,
            check_seconds=settings.idle_check_seconds,
            clock=clock,
            metrics=metrics,
            logger=logger,
        )
        """Ends what nobody goes on with."""
        self._idle_task: asyncio.Task[None] | None = None
        self._closed_with: int | None = None

    async def start(self) -> None:
        """Recovers what waits on disk, then follows the index and drains the outbox. Does not wait for a broker."""
        await self._in_thread(self._recover)
        self._follower.start()
        self.drain.start()
        self._idle_task = asyncio.create_task(self.idle_sessions.run(), name="idle-sessions")

    async def close(self) -> int:
        """Drains for a bounded time and stops. Returns how many entries are left on disk for the next start.

        May be called twice.
        """
        if self._closed_with is not None:
            return self._closed_with
        if self._idle_task is not None:
            self._idle_task.cancel()
            await asyncio.gather(self._idle_task, return_exceptions=True)  # An error of its own is in `failure`.
        left = await asyncio.to_thread(self.drain.stop, self._settings.close_drain_seconds)
        await asyncio.to_thread(self._follower.stop)
        self._executor.shutdown(wait=True)
        await asyncio.to_thread(self._outbox.close)
        self._store.close()
        self._closed_with = left
        self._logger.info("conversations closed", entries_left=left)
        return left

    def is_ready(self) -> bool:
        """Whether the index was read to its end once and the outbox is being drained."""
        return self._follower.caught_up and self.failure is None

    @property
    def failure(self) -> Exception | None:
        """Why nothing reaches the log any more, for example a second process of this name: the process must end."""
        return self.drain.failure or self._outbox.failure or self._follower.failure or self._idle_failure()

    def _idle_failure(self) -> Exception | None:
        """What ended the closing of idle sessions, if anything did."""
        task = self._idle_task
        if task is None or not task.done() or task.cancelled():
            return None
        error = task.exception()
        return error if isinstance(error, Exception) else None

    def sees_other_gateways(self) -> bool:
        """Whether another gateway on this log was active lately."""
        return self._follower.saw_another_gateway_within(_OTHER_GATEWAY_ACTIVE_SECONDS)

    async def wait_until_indexed(self, timeout_seconds: float) -> bool:
        """Whether every own turn so far is on the log and was read back, waiting for it if need be."""
        deadline = self._clock.monotonic_seconds() + timeout_seconds
        while self._index.pending_turns:
            if self._clock.monotonic_seconds() >= deadline:
                return False
            await asyncio.sleep(_OTHER_GATEWAY_POLL_SECONDS)
        return True

    async def place(self, request: IncomingRequest) -> Placement:
        """See `Conversations.place`."""
        placed = await self._in_thread(lambda: self._placer.place(request))
        if expects_parent(placed):
            placed = await self._wait_for_other_gateways(request, placed)
        self._open.touch(placed.session_id, self._clock.monotonic_seconds())
        if placed.next_state is not None:
            # The disk is not waited for here, but by the turn that follows: one sync is enough for both. Whoever loses
            # the next state in a crash before then lost the request too, and sends it again.
            await self._next_states.submit(placed.next_state, request.trace_id)
        return placed

    async def finish(self, request: IncomingRequest, placement: Placement, turn: TurnEvent) -> bool:
        """See `Conversations.finish`. `placement` is what `place` returned."""
        if not isinstance(placement, Placed):
            raise TypeError("the placement must be the one that place() returned for this request")
        turn = await self._blobs.packed(turn)
        known, payload = await self._in_thread(lambda: self._encoder.turn(request, placement, turn))
        payloads = [payload]
        closed: list[KnownTurn] = []
        ended: list[KnownTurn] = []
        if request.session_done:
            closed = self._open.close(known.session_id)
            ended = [*closed, known] if known.is_main else closed
            payloads += await self._in_thread(lambda: self._encoder.session_ends(ended, self._clock.now()))
        # Known before it is written: the drain and the follower may be faster than this coroutine.
        self._index.add(known)
        try:
            await asyncio.wrap_future(self._outbox.submit(payloads))
        except OutboxError as error:
            self._index.discard(known.turn_id)
            for turn_before in closed:
                self._open.add(turn_before, self._clock.monotonic_seconds())
            self.metrics.increment("turns_unrecorded_total")
            self._logger.warning("a turn is not recorded", turn_id=known.turn_id, error=str(error))
            return False
        if request.session_done:
            self.metrics.increment("next_states_total", amount=len(ended), kind="session_end")
            await self._in_thread(lambda: self._store.mark_ended([one.turn_id for one in ended]))
        elif known.is_main:
            self._open.add(known, self._clock.monotonic_seconds())
        else:
            self._open.touch(known.session_id, self._clock.monotonic_seconds())
        return placement.next_state is None or await self._is_written(placement.next_state, request.trace_id)

    async def feedback(
        self, principal: str, response_id: str, *, feedback_id: str, score: float, text: str | None, source: str
    ) -> str:
        """See `Conversations.feedback`. Raises OutboxFull when it cannot be recorded now."""
        turn = await self._in_thread(lambda: self._index.by_response(principal, response_id))
        if turn is None:
            raise LookupError(f"no turn of yours has the response id {response_id!r}; it may be older than the index")
        judgement = ExplicitFeedback(feedback_id=feedback_id, score=score, text=text, source=source)
        draft = explicit_next_state(turn, judgement, self._clock.now())
        await self._next_states.write(draft, turn.trace_id)
        return draft.event.next_state_id

    async def rollout_outcome(self, principal: str, outcome: RolloutOutcome) -> RecordedOutcome:
        """See `Conversations.rollout_outcome`. Raises OutboxError when it cannot be recorded now."""
        turns = await self._turns_of_rollout(principal, outcome)
        drafts = outcome_next_states(turns, outcome, self._clock.now())
        writes = (self._next_states.write(draft, turn.trace_id) for draft, turn in zip(drafts, turns, strict=True))
        await asyncio.gather(*writes)
        return RecordedOutcome([draft.event.next_state_id for draft in drafts])

    async def _turns_of_rollout(self, principal: str, outcome: RolloutOutcome) -> list[KnownTurn]:
        """Waits a moment for turns that other gateways served."""
        deadline = self._clock.monotonic_seconds() + self._settings.other_gateway_wait_seconds
        while True:
            found = await self._in_thread(lambda: self._index.by_rollout(principal, outcome.rollout_id))
            turns = turns_of_rollout(found)
            if turns and len(turns) >= (outcome.steps or 0):
                return turns
            if not self.sees_other_gateways() or self._clock.monotonic_seconds() >= deadline:
                break
            await asyncio.sleep(_OTHER_GATEWAY_POLL_SECONDS)
        if not turns:
            raise LookupError(outcome.rollout_id)
        raise RequestRefused(
            f"rollout {outcome.rollout_id!r} has {len(turns)} known turns, not {outcome.steps}: try again, "
            "or leave out what was answered with x-clawstream-recorded: false",
            status=409,
            code="rollout_incomplete",
            parameter="steps",
            retry_after_seconds=1.0,
        )

    async def _is_written(self, draft: NextStateDraft, trace_id: str | None) -> bool:
        """Whether the next state that the request brought is durable; tried again when the disk refused it before."""
        try:
            await self._next_states.write(draft, trace_id)
        except OutboxError:
            self.metrics.increment("next_states_unrecorded_total")
            return False
        return True

    def _followed(self, draft: NextStateDraft) -> Callable[[], None]:
        """The turn of a next state does not wait for one any more. Returns how to undo that."""
        turn = self._open.followed(draft.event.session_id, draft.event.turn_id)

        def undo() -> None:
            if turn is not None:
                self._open.add(turn, self._clock.monotonic_seconds())

        return undo

    async def _wait_for_other_gateways(self, request: IncomingRequest, placed: Placed) -> Placed:
        """The answer before this request may have been given by another gateway a moment ago."""
        deadline = self._clock.monotonic_seconds() + self._settings.other_gateway_wait_seconds
        while expects_parent(placed) and self.sees_other_gateways() and self._clock.monotonic_seconds() < deadline:
            await asyncio.sleep(_OTHER_GATEWAY_POLL_SECONDS)
            placed = await self._in_thread(lambda: self._placer.place(request))
        return placed

    def _recover(self) -> None:
        """Own turns that are on disk and not in the index are found again at once."""
        if self._outbox.torn_bytes:
            self._logger.warning("an append that a crash interrupted was cut off", bytes=self._outbox.torn_bytes)
        turns = 0
        ended: list[str] = []
        for stored in self._outbox.replay():
            entry = decode_entry(stored.payload, where=f"outbox entry {stored.sequence}")
            if isinstance(entry, NextStateEntry):
                self._next_states.remember(entry.draft.event.next_state_id)
                if entry.draft.event.kind is NextStateKind.SESSION_END:
                    ended.append(entry.draft.event.turn_id)
            elif self._store.by_turn(entry.known.turn_id) is None:
                self._index.add(entry.known)
                turns += 1
        # A process that died between writing an end and noting it would write it again.
        self._store.mark_ended(ended)
        self._logger.info("outbox recovered", entries=self._outbox.undrained_entries, turns_not_indexed=turns)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)
