"""Implements `services.gateway.ports.Conversations`: session tree, index, outbox and drain put together."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from clawstream.bus.interface import Bus, OutgoingRecord
from clawstream.clock import Clock
from clawstream.codec import encode
from clawstream.errors import OutboxError
from clawstream.ids import IdSource
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.topics import NEXT_STATES, OUTBOX, TURN_INDEX, TURNS, full_name
from schemas.events import TurnEvent
from schemas.events.next_state import ExplicitFeedback
from services.gateway.client_profiles import load_profiles
from services.gateway.conversation_settings import ConversationSettings, GatewayLikeSettings
from services.gateway.drain import GatewayTopics, OutboxDrain
from services.gateway.event_size import fitted_next_state, without_request
from services.gateway.index_follower import IndexFollower
from services.gateway.index_secret import load_or_create_secret
from services.gateway.known_turn import KnownTurn
from services.gateway.next_states import NextStateDraft, explicit_next_state, session_end
from services.gateway.open_sessions import OpenSessions
from services.gateway.outbox import Outbox
from services.gateway.outbox_entries import (
    NextStateEntry,
    TurnEntry,
    decode_entry,
    encode_next_state,
    encode_turn,
)
from services.gateway.placing import Placed, Placer, expects_parent
from services.gateway.ports import IncomingRequest, Placement
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore

Result = TypeVar("Result")

_LOOKUP_THREADS = 2
_RECENT_NEXT_STATES = 20_000
"""Ids of next states that are remembered, so that a repeated request does not write the same one again."""
_OTHER_GATEWAY_ACTIVE_SECONDS = 60.0
_OTHER_GATEWAY_POLL_SECONDS = 0.01
_RESTORE_CHUNK = 1000
_MAX_TURN_BYTES = 3_900_000
"""Below the limit of the turns topic (4 MiB), with room for headers."""
_TRACE_ID = re.compile(r"\A[0-9a-f]{32}\Z")


class GatewayConversations:
    """The event loop never waits for a disk here: lookups and encoding run in threads, syncing in the outbox's own."""

    def __init__(
        self,
        *,
        settings: ConversationSettings,
        source: str,
        topics: GatewayTopics,
        placer: Placer,
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
        self._source = source
        self._topics = topics
        self._placer = placer
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
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._executor = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="conversations")
        self._idle_task: asyncio.Task[None] | None = None
        self._closed_with: int | None = None

    async def start(self) -> None:
        """Recovers what waits on disk, then follows the index and drains the outbox. Does not wait for a broker."""
        await self._in_thread(self._recover)
        self._follower.start()
        self.drain.start()
        self._idle_task = asyncio.create_task(self._close_idle_sessions(), name="idle-sessions")

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
            await self._write_next_state(placed.next_state, request.trace_id)
        return placed

    async def finish(self, request: IncomingRequest, placement: Placement, turn: TurnEvent) -> bool:
        """See `Conversations.finish`. `placement` is what `place` returned."""
        if not isinstance(placement, Placed):
            raise TypeError("the placement must be the one that place() returned for this request")
        known, payload = await self._in_thread(lambda: self._turn_payload(request, placement, turn))
        ended = [known] if known.is_main else []
        payloads = [payload]
        if request.session_done:
            ended = [*self._open.close(known.session_id), *ended]
            payloads += await self._in_thread(lambda: self._session_end_payloads(ended))
        # Known before it is written: the drain and the follower may be faster than this coroutine.
        self._index.add(known)
        try:
            await asyncio.wrap_future(self._outbox.submit(payloads))
        except OutboxError as error:
            self._index.discard(known.turn_id)
            self.metrics.increment("turns_unrecorded_total")
            self._logger.warning("a turn is not recorded", turn_id=known.turn_id, error=str(error))
            return False
        now = self._clock.monotonic_seconds()
        if request.session_done:
            self.metrics.increment("next_states_total", amount=len(ended), kind="session_end")
            await self._in_thread(lambda: self._store.mark_ended([one.turn_id for one in ended]))
        elif known.is_main:
            self._open.add(known, now)
        else:
            self._open.touch(known.session_id, now)
        return True

    async def feedback(
        self, principal: str, response_id: str, *, feedback_id: str, score: float, text: str | None, source: str
    ) -> str:
        """See `Conversations.feedback`. Raises OutboxFull when it cannot be recorded now."""
        turn = await self._in_thread(lambda: self._index.by_response(principal, response_id))
        if turn is None:
            raise LookupError(f"no turn of yours has the response id {response_id!r}; it may be older than the index")
        judgement = ExplicitFeedback(feedback_id=feedback_id, score=score, text=text, source=source)
        draft = explicit_next_state(turn, judgement, self._clock.now())
        next_state_id = draft.event.next_state_id
        if next_state_id in self._recent:
            return next_state_id
        payload = await self._in_thread(lambda: self._next_state_payload(draft, turn.trace_id))
        await asyncio.wrap_future(self._outbox.submit([payload]))
        self._emitted(draft)
        return next_state_id

    # ---- next states

    async def _write_next_state(self, draft: NextStateDraft, trace_id: str | None) -> None:
        """Hands a next state to the outbox without waiting for the disk: the turn that follows it will.

        Whoever loses it in a crash before then lost the request too, and sends it again.
        """
        if draft.event.next_state_id in self._recent:
            self._recent.move_to_end(draft.event.next_state_id)
            return
        payload = await self._in_thread(lambda: self._next_state_payload(draft, trace_id))
        if draft.event.next_state_id in self._recent:
            return  # A concurrent twin of this request was faster.
        try:
            self._outbox.submit([payload])
        except OutboxError as error:
            self._logger.warning("a next state is not recorded", turn_id=draft.event.turn_id, error=str(error))
            return
        self._emitted(draft)

    def _emitted(self, draft: NextStateDraft) -> None:
        event = draft.event
        self._open.followed(event.session_id, event.turn_id)
        self._recent[event.next_state_id] = None
        while len(self._recent) > _RECENT_NEXT_STATES:
            self._recent.popitem(last=False)
        self.metrics.increment("next_states_total", kind=event.kind.value)

    def _next_state_payload(self, draft: NextStateDraft, trace_id: str | None) -> bytes:
        event = fitted_next_state(draft.event, self._settings.max_event_bytes)
        fitted = NextStateDraft(event=event, place_known=draft.place_known)
        traceparent = _traceparent(trace_id, event.next_state_id)
        return encode_next_state(NextStateEntry(draft=fitted, traceparent=traceparent))

    def _session_end_payloads(self, turns: Sequence[KnownTurn]) -> list[bytes]:
        now = self._clock.now()
        return [self._next_state_payload(session_end(turn, now), None) for turn in turns]

    # ---- turns

    def _turn_payload(self, request: IncomingRequest, placed: Placed, turn: TurnEvent) -> tuple[KnownTurn, bytes]:
        traceparent = _traceparent(request.trace_id, turn.turn_id)
        record = self._turn_record(turn, traceparent)
        size = len(record.value or b"")
        if size > _MAX_TURN_BYTES:
            turn = without_request(turn, f"the event has {size} bytes, the log takes {_MAX_TURN_BYTES}")
            record = self._turn_record(turn, traceparent)
        known = self._placer.known_turn(request, placed, turn)
        return known, encode_turn(TurnEntry(record=record, known=known, traceparent=traceparent))

    def _turn_record(self, turn: TurnEvent, traceparent: str | None) -> OutgoingRecord:
        return encode(
            turn,
            topic=self._topics.turns,
            key=turn.session_id,
            event_id=turn.turn_id,
            source=self._source,
            traceparent=traceparent,
        )

    async def _wait_for_other_gateways(self, request: IncomingRequest, placed: Placed) -> Placed:
        """The answer before this request may have been given by another gateway a moment ago."""
        deadline = self._clock.monotonic_seconds() + self._settings.other_gateway_wait_seconds
        while expects_parent(placed) and self.sees_other_gateways() and self._clock.monotonic_seconds() < deadline:
            await asyncio.sleep(_OTHER_GATEWAY_POLL_SECONDS)
            placed = await self._in_thread(lambda: self._placer.place(request))
        return placed

    # ---- recovery and idle sessions

    def _recover(self) -> None:
        """Own turns that are on disk and not in the index are found again at once."""
        if self._outbox.torn_bytes:
            self._logger.warning("an append that a crash interrupted was cut off", bytes=self._outbox.torn_bytes)
        turns = 0
        for stored in self._outbox.replay():
            entry = decode_entry(stored.payload, where=f"outbox entry {stored.sequence}")
            if isinstance(entry, NextStateEntry):
                self._recent[entry.draft.event.next_state_id] = None
            elif self._store.by_turn(entry.known.turn_id) is None:
                self._index.add(entry.known)
                turns += 1
        self._logger.info("outbox recovered", entries=self._outbox.undrained_entries, turns_not_indexed=turns)

    async def _close_idle_sessions(self) -> None:
        restored = False
        while True:
            await asyncio.sleep(self._settings.idle_check_seconds)
            if self._follower.caught_up and not restored:
                await self.restore_open_sessions()
                restored = True
            await self.close_idle_sessions()

    async def close_idle_sessions(self) -> int:
        """Ends the sessions that fell idle. Returns how many turns were given a next state of kind session_end."""
        before = self._clock.monotonic_seconds() - self._settings.idle_limit_seconds
        turns = self._open.close_idle(before)
        return await self._end_turns(turns)

    async def _end_turns(self, turns: Sequence[KnownTurn]) -> int:
        ending = await self._in_thread(lambda: [turn for turn in turns if not self._index.has_child(turn.turn_id)])
        if not ending:
            return 0
        payloads = await self._in_thread(lambda: self._session_end_payloads(ending))
        try:
            await asyncio.wrap_future(self._outbox.submit(payloads))
        except OutboxError as error:
            self._logger.warning("ends of sessions are not recorded", turns=len(ending), error=str(error))
            return 0
        await self._in_thread(lambda: self._store.mark_ended([turn.turn_id for turn in ending]))
        self.metrics.increment("next_states_total", amount=len(ending), kind="session_end")
        return len(ending)

    async def restore_open_sessions(self) -> None:
        """Turns that an earlier process of this gateway served and that nothing followed go on waiting, or end."""
        limit = timedelta(seconds=self._settings.idle_limit_seconds)
        while True:
            turns = await self._in_thread(lambda: self._store.unfinished(_RESTORE_CHUNK))
            now, monotonic = self._clock.now(), self._clock.monotonic_seconds()
            old = [turn for turn in turns if now - turn.created_at > limit]
            if len(old) < _RESTORE_CHUNK:
                for turn in turns[len(old) :]:
                    self._open.add(turn, monotonic)
                await self._end_turns(old)
                return
            if await self._end_turns(old) == 0:
                return

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def build_conversations(
    settings: GatewayLikeSettings,
    bus: Bus,
    clock: Clock,
    id_source: IdSource,
    metrics: Metrics,
    logger: Logger,
) -> GatewayConversations:
    """Opens the files of this gateway and wires everything. `start` must be called next.

    Raises SettingsError (profiles, secret) and OutboxError (used by another process, damaged).
    """
    own = settings.conversations
    directory = settings.data_directory / settings.name / settings.kafka.namespace
    source = f"gateway/{settings.name}"
    namespace = settings.kafka.namespace
    topics = GatewayTopics(
        turns=full_name(namespace, TURNS),
        next_states=full_name(namespace, NEXT_STATES),
        turn_index=full_name(namespace, TURN_INDEX),
        outbox=full_name(namespace, OUTBOX),
    )
    secret = load_or_create_secret(own.index_secret_file or settings.data_directory / "gateway-index-secret")
    profiles = load_profiles(own.profiles_directory)
    outbox = Outbox(
        directory / "outbox",
        max_bytes=own.outbox_max_bytes,
        segment_bytes=own.outbox_segment_bytes,
        new_id=lambda: str(id_source()),
    )
    store = TurnIndexStore(directory / "turn-index.sqlite", cache_bytes=own.index_cache_bytes)
    index = TurnIndex(store)
    follower = IndexFollower(
        bus=bus,
        topic=topics.turn_index,
        source=source,
        store=store,
        index=index,
        retention=timedelta(seconds=own.index_retention_seconds),
        clock=clock,
        logger=logger,
    )
    drain = OutboxDrain(
        bus=bus,
        outbox=outbox,
        index=index,
        follower=follower,
        topics=topics,
        gateway=settings.name,
        source=source,
        transactional_id=f"{namespace}.gateway.{settings.name}.outbox",
        linger_seconds=own.drain_linger_seconds,
        clock=clock,
        metrics=metrics,
        logger=logger,
    )
    return GatewayConversations(
        settings=own,
        source=source,
        topics=topics,
        placer=Placer(profiles=profiles, secret=secret, lookup_for=index.for_principal, id_source=id_source),
        outbox=outbox,
        store=store,
        index=index,
        follower=follower,
        drain=drain,
        clock=clock,
        metrics=metrics,
        logger=logger,
    )


def _traceparent(trace_id: str | None, cause: str) -> str | None:
    """W3C trace context with the first 16 hexadecimal digits of the event's own id as the parent span."""
    if trace_id is None or not _TRACE_ID.match(trace_id):
        return None
    span = cause.replace("-", "")[:16]
    return f"00-{trace_id}-{span}-01" if re.fullmatch(r"[0-9a-f]{16}", span) else None
