"""One input of the teacher: a score in; a sample, or a counted skip, out."""

import asyncio

from clawstream.bus.interface import Record
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import Clock
from clawstream.codec import decode_as, encode, header
from clawstream.errors import BrokerUnavailable, MissingTurn, OffsetNotRetained, RetryLater
from clawstream.topics import SAMPLES, full_name, partition_for, topic_definitions
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import DeadLetter, Outcome, Output, Skip
from schemas.events import ScoreEvent, TurnEvent
from services.teacher.assembly import NoSample, assemble, skip_before_reading


class TeacherHandler(Handler):
    """What the worker calls for every score."""

    def __init__(self, turns: RecordFetcher, *, namespace: str, source: str, clock: Clock) -> None:
        """`turns` reads turns from the log by their reference."""
        self._turns = turns
        self._samples_topic = full_name(namespace, SAMPLES)
        self._partitions = topic_definitions()[SAMPLES].partitions
        self._source = source
        self._clock = clock

    async def handle(self, record: Record) -> Outcome:
        """A score without its turn is a dead letter. Raises DecodeError for what is no score, else RetryLater."""
        score = decode_as(record, ScoreEvent)
        nothing = skip_before_reading(score)
        if nothing is not None:
            return Skip(nothing.reason)
        try:
            turn = await self._turn(record, score)
        except MissingTurn as error:
            return DeadLetter("missing_turn", error)
        sample = assemble(turn, score, None, created_at=self._clock.now())
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

    async def close(self) -> None:
        """Stops reading turns."""
        await asyncio.to_thread(self._turns.close)
