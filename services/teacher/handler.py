"""One input of the teacher: a score in; a sample, or a counted skip, out."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from clawstream.bus.interface import Record, TopicPartition
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode, header
from clawstream.errors import (
    BrokerUnavailable,
    EngineBusy,
    EngineProtocolError,
    EngineTimeout,
    MissingTurn,
    OffsetNotRetained,
    RetryLater,
)
from clawstream.forgetting.forgotten import Forgotten
from clawstream.metrics import Metrics
from clawstream.topics import SAMPLES, full_name, partition_for, topic_definitions
from clawstream.worker.deadline import waiting_for_a_turn
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import DeadLetter, Outcome, Output, Skip
from schemas.events import ScoreEvent, TurnEvent
from schemas.events.score import Hint
from services.teacher.assembly import NoSample, NoSignal, Signal, assemble, skip_before_reading, skip_untrainable
from services.teacher.hints import usable_hints
from services.teacher.settings import Mode, TeacherSettings
from services.teacher.signals import SignalMaker


class TeacherHandler(Handler):
    """What the worker calls for every score, many at a time on one event loop."""

    def __init__(
        self,
        turns: RecordFetcher,
        settings: TeacherSettings,
        signals: SignalMaker | None,
        *,
        source: str,
        clock: Clock,
        metrics: Metrics,
        forgotten: Forgotten | None = None,
    ) -> None:
        """`turns` reads turns from the log by their reference; `signals` is needed unless the mode is binary.

        `forgotten`: what no sample is to be made of any more; None when nothing is.
        """
        if signals is None and settings.mode is not Mode.BINARY:
            raise ValueError(f"mode {settings.mode.value} needs a teacher")
        self._turns = turns
        self._settings = settings
        self._signals = signals
        self._places = asyncio.Semaphore(settings.model.max_concurrent_scores)
        self._timeouts: Counter[str] = Counter()
        self._samples_topic = full_name(settings.kafka.namespace, SAMPLES)
        self._partitions = topic_definitions()[SAMPLES].partitions
        self._source = source
        self._clock = clock
        self._metrics = metrics
        self._forgotten = forgotten or Forgotten()

    async def handle(self, record: Record) -> Outcome:
        """A score without its turn, or with a teacher whose answer does not fit it, is a dead letter.

        Raises DecodeError for what is no score. Raises RetryLater or EngineUnavailable while log or teacher are away:
        the score waits, in order.
        """
        return await self._handle(record, asks_teacher=True)

    async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
        """The sample without the teacher's signal, as far as there is one."""
        return await self._handle(record, asks_teacher=False)

    async def on_released(self, partitions: Sequence[TopicPartition]) -> None:
        """Their scores are for others."""
        self._timeouts.clear()

    async def close(self) -> None:
        """Stops reading turns, closes connections to engines."""
        await asyncio.to_thread(self._turns.close)
        if self._signals is not None:
            await self._signals.close()

    async def _handle(self, record: Record, *, asks_teacher: bool) -> Outcome:
        mode = self._settings.mode
        score = decode_as(record, ScoreEvent)
        if self._forgotten.covers(session_id=score.session_id, principal=score.principal, turn_ref=score.turn_ref):
            return Skip("forgotten")
        hints = usable_hints(score, self._settings.hint.user_words_after) if mode is not Mode.BINARY else []
        nothing = skip_before_reading(score, mode, has_hint=bool(hints))
        if nothing is not None:
            return Skip(nothing.reason)
        try:
            turn = await self._turn(record, score)
        except MissingTurn as error:
            return DeadLetter("missing_turn", error)
        nothing = skip_untrainable(turn)
        if nothing is not None:
            return Skip(nothing.reason)
        try:
            signal = await self._signal(record, turn, score, hints) if asks_teacher else NoSignal("timeout")
        except EngineProtocolError as error:
            return DeadLetter("teacher_misaligned", error)
        self._timeouts.pop(score.score_id, None)
        if mode is not Mode.BINARY:
            result = signal.reason if isinstance(signal, NoSignal) else "signal"
            self._metrics.increment("teacher_signals_total", result=result)
        sample = assemble(turn, score, signal, mode, created_at=self._clock.now())
        if isinstance(sample, NoSample):
            return Skip(sample.reason)
        return Output(
            (
                encode(
                    sample,
                    topic=self._samples_topic,
                    key=sample.turn_id,
                    event_id=sample.sample_id,
                    source=self._source,
                    partition=partition_for(sample.session_id, self._partitions),
                    traceparent=header(record.headers, "traceparent"),
                ),
            )
        )

    async def _signal(self, record: Record, turn: TurnEvent, score: ScoreEvent, hints: Sequence[Hint]) -> Signal:
        if self._signals is None or not hints:
            return NoSignal()
        with waiting_for_a_turn():
            await self._places.acquire()
        started = self._clock.monotonic_seconds()
        try:
            signal = await self._signals.make(turn, hints)
        except EngineTimeout as error:
            self._timeouts[score.score_id] += 1
            if self._timeouts[score.score_id] >= self._settings.model.max_timeouts:
                return NoSignal("timeout")
            raise RetryLater(f"{record}: {error}") from error
        except EngineBusy as error:
            raise RetryLater(f"{record}: {error}", retry_after_seconds=error.retry_after_seconds or 0.0) from error
        finally:
            self._places.release()
        self._metrics.observe("model_call_seconds", self._clock.monotonic_seconds() - started)
        return signal

    async def _turn(self, record: Record, score: ScoreEvent) -> TurnEvent:
        try:
            found = await asyncio.wrap_future(self._turns.fetch(score.turn_ref))
        except OffsetNotRetained as error:
            raise MissingTurn(f"{record}: turn {score.turn_id} cannot be read: {error}") from error
        except BrokerUnavailable as error:
            raise RetryLater(f"{record}: {error}") from error
        turn = decode_as(found, TurnEvent)
        if (turn.turn_id, turn.session_id) != (score.turn_id, score.session_id):
            raise MissingTurn(f"{record}: {score.turn_ref} holds turn {turn.turn_id}, not {score.turn_id}")
        return turn
