"""One answer, from the placing of its request to the record of its turn.

Runs as a task of its own, so that a client who leaves cannot cancel the record. The HTTP side reads its events. The
engine is asked first and the request placed meanwhile: no client waits for the session tree, but for the first token.
"""

import asyncio
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import partial
from http import HTTPStatus

from clawstream.clock import Clock
from clawstream.engine.interface import EngineClient, GenerationChunk, GenerationRequest
from clawstream.errors import (
    ClawstreamError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    RequestRefused,
)
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.rendering.interface import AnswerDelta, AnswerStream, ChatRenderer, ParsedAnswer, RenderedPrompt
from services.gateway.capture import Capture
from services.gateway.errors import DEFAULT_RETRY_AFTER_SECONDS, to_refusal, worth_another_try
from services.gateway.generation_events import Failed, Finished, GenerationEvent, Piece, Usage
from services.gateway.openai_format import finish_reason
from services.gateway.ports import EngineRouter, IncomingRequest, Placement, TurnRecorder
from services.gateway.sampling import SamplingPlan
from services.gateway.turn_record import build_turn

_MAX_ATTEMPTS = 3
"""How many engines are tried before a request fails."""
_LONG_TURN_TOKENS = 10_000
"""Above it, packing the arrays leaves the event loop to other requests."""
_TURNS_UNTIL_SENT = 3
"""Of the event loop: by then a request is on its way to an engine. The session tree's thread would take the processor
from it, and the engine's time would begin later."""
_ABORT_SECONDS = 2.0
"""How long the engine is given to take note that an answer is not wanted any more."""


class _Stop(Enum):
    """Why an answer is ended from outside."""

    CLIENT_GONE = auto()
    SHUTDOWN = auto()
    NOT_PLACED = auto()


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Everything that is decided before an engine is asked."""

    incoming: IncomingRequest
    prompt: RenderedPrompt
    answer_beginning: list[int]
    """[tokens], the last of the prompt: the answer's first words where the client demands a tool call. Often empty."""
    sampling: SamplingPlan
    top_logprobs: int
    """How many of the likeliest tokens the client wants to see beside each of the answer's."""
    streams: bool
    """What was sent cannot be taken back: an answer that streams is tried again only before its first token."""
    policy: str
    response_id_prefix: str
    """The client's id of the answer is this and the turn's id."""


class Generation:
    """Runs a plan. Call `start` once; read `next_event` until Finished or Failed."""

    def __init__(
        self,
        plan: GenerationPlan,
        *,
        conversations: TurnRecorder,
        router: EngineRouter,
        renderer: ChatRenderer,
        clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._plan = plan
        self._conversations = conversations
        self._router = router
        self._renderer = renderer
        self._clock = clock
        self._metrics = metrics
        self._logger = logger
        self._events: asyncio.Queue[GenerationEvent] = asyncio.Queue()
        self._placed: asyncio.Future[Placement | None] = asyncio.get_running_loop().create_future()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once an engine has taken the request: admission and choice of an engine are behind it."""
        self._stop: _Stop | None = None
        self._sampling_task: asyncio.Task[None] | None = None
        # Of the attempt that is under way.
        self._engine: EngineClient | None = None
        self._holder: EngineClient | None = None
        """The engine that has the request now; None while none has it, as between two attempts."""
        self._request_id = ""
        self._capture = Capture()
        self._answer: AnswerStream | None = None
        self._stop_string: str | None = None
        self._first_token_at: datetime | None = None

    async def placement(self) -> Placement | None:
        """Where the request belongs, as soon as it is known. None when placing it failed: see `next_event`."""
        return await asyncio.shield(self._placed)

    @property
    def response_id(self) -> str:
        """The id that the client gets."""
        return self._plan.response_id_prefix + self._plan.incoming.turn_id

    async def next_event(self) -> GenerationEvent:
        """The next event, in order; to be asked once `placement` is known. Cancelling the wait loses nothing."""
        return await self._events.get()

    def client_gone(self) -> None:
        """Ends the engine's work; what was sampled is recorded and never trained. Harmless at the end."""
        self._end(_Stop.CLIENT_GONE)

    def shut_down(self) -> None:
        """Ends the answer with an error for the client. Harmless at the end."""
        self._end(_Stop.SHUTDOWN)

    def _end(self, stop: _Stop) -> None:
        if self._stop is None:
            self._stop = stop
            if self._sampling_task is not None:
                self._sampling_task.cancel()

    def start(self) -> "asyncio.Task[None]":
        """Begins. The task ends, and raises nothing, when everything is recorded and every event is there."""
        sampling = self._sampling_task = asyncio.create_task(self._sample())  # First: the engine waits for nobody.
        return asyncio.create_task(self._run(sampling, asyncio.create_task(self._place())))

    async def _run(self, sampling: "asyncio.Task[None]", placing: "asyncio.Task[Placement]") -> None:
        """Every failure becomes an event: this is the boundary of one request."""
        try:
            await self._sample_and_record(sampling, placing)
        except ClawstreamError as error:
            await self._fail(placing, to_refusal(error))
        except Exception as error:
            self._logger.exception("a request failed", error=type(error).__name__)
            try:
                await self._abort()
            finally:  # Whatever becomes of that: the reader must not wait for ever.
                await self._fail(placing, to_refusal(ClawstreamError()))
        except asyncio.CancelledError:
            # Whoever cancels this task from outside ends the process; the reader must not wait for ever.
            sampling.cancel()
            placing.cancel()
            await self._fail(placing, _ended(_Stop.SHUTDOWN))
            raise

    async def _place(self) -> Placement:
        try:
            for _ in range(_TURNS_UNTIL_SENT):
                await asyncio.sleep(0)
            placement = await self._conversations.place(self._plan.incoming)
        except BaseException:
            self._end(_Stop.NOT_PLACED)
            # Nobody has read so far, and there is no answer without a place.
            while not self._events.empty():
                self._events.get_nowait()
            self._placed.set_result(None)
            raise
        self._placed.set_result(placement)
        return placement

    async def _session_id(self) -> str:
        placement = await self.placement()
        if placement is None:
            raise ClawstreamError("the request could not be placed")
        return placement.session_id

    async def _sample_and_record(self, sampling: "asyncio.Task[None]", placing: "asyncio.Task[Placement]") -> None:
        failure: ClawstreamError | None = None
        try:
            await sampling
        except asyncio.CancelledError:
            if self._stop is None:
                raise
        except ClawstreamError as error:
            failure = error
        # An answer may be whole before sampling ends: the end of the engine's stream is waited for a moment longer.
        is_whole = self._capture.finish_reason not in (None, "abort")
        is_complete = failure is None and (self._stop is None or is_whole)
        if not is_complete:
            await self._abort()
        placement = await placing
        if is_complete:
            await self._finish(placement)
            return
        if self._capture.token_ids and (self._plan.streams or failure is None):
            # Clients keep partial answers: the turn must be known when they come back with one.
            self._capture.finish_reason = None
            self._put(self._stream().finish(), GenerationChunk([], []))
            await self._record(placement, self._stream().answer(), "abort")
        if failure is not None:
            raise failure
        raise _ended(self._stop or _Stop.SHUTDOWN)

    async def _sample(self) -> None:
        """Samples on one engine after the other until an answer is complete. What was sent is never taken back."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            async with self._router.lease(self._session_id) as lease:
                self._begin(lease.engine, attempt)
                try:
                    with self._held_by(lease.engine):
                        await self._stream_from(lease.engine)
                    return
                except (EngineUnavailable, EngineTimeout) as error:
                    self._router.report_failure(lease.engine.name)
                    self._logger.warning(
                        "an engine failed", engine=lease.engine.name, attempt=attempt, error=str(error)
                    )
                    is_final = isinstance(error, EngineTimeout) or attempt == _MAX_ATTEMPTS
                    if is_final or (self._plan.streams and self._capture.token_ids):
                        raise

    def _begin(self, engine: EngineClient, attempt: int) -> None:
        self._engine = engine
        self._request_id = f"{self._plan.incoming.turn_id}.{attempt}"
        self._capture = Capture()
        self._first_token_at = None
        self._stop_string = None
        self._answer = None

    @contextmanager
    def _held_by(self, engine: EngineClient) -> Generator[None]:
        """While the engine is asked; and after what ends our asking, but not its work."""
        self._holder = engine
        try:
            yield
        except (EngineUnavailable, EngineRejected):
            self._holder = None
            raise
        self._holder = None

    async def _stream_from(self, engine: EngineClient) -> None:
        request = GenerationRequest(
            request_id=self._request_id,
            input_ids=self._plan.prompt.token_ids,
            sampling_parameters=self._plan.sampling.engine_parameters,
            top_logprobs=self._plan.top_logprobs,
            on_accepted=self._accept,
        )
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                is_first = self._first_token_at is None and bool(chunk.token_ids)
                if is_first:
                    self._first_token_at = self._clock.now()
                self._capture.add(chunk)
                matched = chunk.finish_detail.get("matched")
                if matched in self._plan.sampling.recorded.stop:
                    self._stop_string = matched
                self._put(self._stream().push(chunk.token_ids), chunk)
                if is_first and self._first_token_at is not None:
                    waited = self._first_token_at - self._plan.incoming.received_at
                    self._metrics.observe("first_token_seconds", waited.total_seconds())
        if self._capture.finish_reason in (None, "abort"):
            raise EngineUnavailable(f"engine {engine.name} ended the answer by itself")

    def _accept(self) -> None:
        self._stream()  # opened while the engine works
        if not self.accepted.done():
            self.accepted.set_result(None)

    def _put(self, delta: AnswerDelta, chunk: GenerationChunk) -> None:
        if self._plan.streams and (delta or chunk.token_ids):
            self._events.put_nowait(Piece(delta, chunk.token_ids, chunk.logprobs, chunk.top_logprobs))

    def _stream(self) -> AnswerStream:
        """Of the attempt that is under way, opened when it is first asked for."""
        if self._answer is None:
            prompt_tokens = len(self._plan.prompt.token_ids) - len(self._plan.answer_beginning)
            self._answer = self._renderer.open_answer(
                self._plan.prompt.token_ids[:prompt_tokens],
                tools=self._plan.incoming.tools,
                stop=self._plan.sampling.recorded.stop,
                call_id_seed=self._plan.incoming.turn_id,
            )
            self._put(self._answer.push(self._plan.answer_beginning), GenerationChunk([], []))
        return self._answer

    async def _finish(self, placement: Placement) -> None:
        self._put(self._stream().finish(), GenerationChunk([], []))
        answer = self._stream().answer()
        reason = finish_reason(self._capture.finish_reason or "stop", answer)
        recorded = await self._record(placement, answer, reason)
        usage = Usage(
            prompt_tokens=len(self._plan.prompt.token_ids),
            completion_tokens=len(self._capture.token_ids),
            cached_tokens=self._capture.cached_tokens,
        )
        self._events.put_nowait(
            Finished(
                answer=answer,
                reason=reason,
                stop_string=self._stop_string,
                usage=usage,
                token_ids=self._capture.token_ids,
                logprobs=self._capture.logprobs,
                top_logprobs=self._capture.top_logprobs,
                recorded=recorded,
            )
        )

    async def _record(self, placement: Placement, answer: ParsedAnswer, reason: str) -> bool:
        assert self._engine is not None
        build = partial(
            build_turn,
            incoming=self._plan.incoming,
            placement=placement,
            response_id=self.response_id,
            prompt=self._plan.prompt,
            sampling=self._plan.sampling.recorded,
            capture=self._capture,
            answer=answer,
            reason=reason,
            client_gone=self._stop is _Stop.CLIENT_GONE,
            policy=self._plan.policy,
            engine=self._engine.name,
            renderer=self._renderer,
            first_token_at=self._first_token_at,
            finished_at=self._clock.now(),
        )
        tokens = len(self._plan.prompt.token_ids) + len(self._capture.token_ids)
        turn = await asyncio.to_thread(build) if tokens > _LONG_TURN_TOKENS else build()
        recorded = await self._conversations.finish(self._plan.incoming, placement, turn)
        self._metrics.increment("turns_total", turn_type=turn.turn_type.value, finish_reason=turn.finish_reason)
        if turn.untrainable_reason is not None:
            self._metrics.increment("turns_untrainable_total", reason=turn.untrainable_reason.value)
        return recorded

    async def _abort(self) -> None:
        """Tells the engine that has the request to stop. The connection is closed already; some notice that late."""
        engine, self._holder = self._holder, None
        if engine is None:
            return
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await engine.abort(self._request_id)
        except (EngineError, TimeoutError) as error:
            self._logger.warning("an answer could not be aborted", engine=engine.name, error=str(error))

    async def _fail(self, placing: "asyncio.Task[Placement]", refusal: RequestRefused) -> None:
        await asyncio.gather(placing, return_exceptions=True)  # A failure is told after the request's place.
        self._events.put_nowait(Failed(refusal))


def _ended(stop: _Stop) -> RequestRefused:
    """What is said of an answer that was ended from outside."""
    is_shutdown = stop is _Stop.SHUTDOWN
    return worth_another_try(
        "the gateway is shutting down" if is_shutdown else "the client is gone",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        error_type="service_unavailable_error",
        code="shutting_down" if is_shutdown else "client_gone",
        retry_after_seconds=DEFAULT_RETRY_AFTER_SECONDS,
    )
