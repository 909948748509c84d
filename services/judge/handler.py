"""One input of the judge: a next state in; a score, or a counted skip, out."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from clawstream.bus.interface import OutgoingRecord, Record, TopicPartition
from clawstream.codec import decode_as, encode, header
from clawstream.errors import BrokerUnavailable, EngineBusy, EngineTimeout, RetryLater
from clawstream.forgetting.forgotten import Forgotten
from clawstream.log import Logger
from clawstream.topics import SCORES, full_name
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import Outcome, Output, Skip
from schemas.events import NextStateEvent, ScoreEvent
from schemas.events.base import RecordReference
from schemas.events.next_state import NextStateKind
from services.judge.active import ActiveJudges
from services.judge.judging import Judging
from services.judge.ledger import Ledger

LEDGER_RETRY_SECONDS: Final = 1.0
"""Pause between two attempts to read the ledger while no broker answers."""


class JudgeHandler(Handler):
    """What the worker calls for every next state, many at a time on one event loop."""

    def __init__(
        self,
        judges: ActiveJudges,
        judging: Judging,
        ledger: Ledger,
        *,
        namespace: str,
        source: str,
        max_timeouts: int,
        logger: Logger,
        forgotten: Forgotten | None = None,
    ) -> None:
        """`forgotten`: what is not to be judged any more; None when nothing is."""
        self._judges = judges
        self._judging = judging
        self._ledger = ledger
        self._scores_topic = full_name(namespace, SCORES)
        self._source = source
        self._max_timeouts = max_timeouts
        self._logger = logger
        self._forgotten = forgotten or Forgotten()
        self._timeouts: Counter[str] = Counter()
        self._assignments: dict[TopicPartition, object] = {}

    async def handle(self, record: Record) -> Outcome:
        """Raises DecodeError for what is no next state, and RetryLater in an outage of the model or the log."""
        next_state = decode_as(record, NextStateEvent)
        if next_state.kind is NextStateKind.SESSION_END:
            return Skip("session_end")
        if not next_state.turn_trainable:
            return Skip("untrainable_turn")
        if self._forgotten.covers(
            session_id=next_state.session_id, principal=next_state.principal, turn_ref=next_state.turn_ref
        ):
            return Skip("forgotten")
        self.begin(next_state)
        try:
            score = await self._judging.score(
                next_state,
                reference(record),
                self._judges.current,
                accept_timeouts=self._timeouts[next_state.next_state_id] + 1 >= self._max_timeouts,
            )
        except EngineTimeout as error:
            self._timeouts[next_state.next_state_id] += 1
            raise RetryLater(f"{record}: {error}") from error
        except EngineBusy as error:
            raise RetryLater(f"{record}: {error}", retry_after_seconds=error.retry_after_seconds or 0.0) from error
        return self._output(record, score)

    async def on_assigned(self, partitions: Mapping[TopicPartition, int | None]) -> None:
        """Reads the ledger back. Waits while no broker answers, for as long as the partitions are ours."""
        assignment = object()
        self._assignments.update(dict.fromkeys(partitions, assignment))
        while ours := {each: partitions[each] for each in partitions if self._assignments.get(each) is assignment}:
            try:
                entries = await self._ledger.read_back(ours)
            except BrokerUnavailable as error:
                self._logger.warning("the ledger cannot be read yet", error=str(error))
                await asyncio.sleep(LEDGER_RETRY_SECONDS)
            else:
                self._logger.info("read the ledger back", partitions=len(ours), entries=entries)
                return

    async def on_released(self, partitions: Sequence[TopicPartition]) -> None:
        """Their inputs are for others to judge."""
        for partition in partitions:
            self._assignments.pop(partition, None)
        self._ledger.drop(partitions)
        self._timeouts.clear()

    async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
        """A score of the votes that did arrive; the others abstain."""
        next_state = decode_as(record, NextStateEvent)
        score = self._judging.score_of_ledger(next_state, reference(record), self._judges.current)
        return self._output(record, score)

    async def close(self) -> None:
        """Closes connections to models."""
        await self._judges.close()

    def _output(self, record: Record, score: ScoreEvent) -> Output:
        self._timeouts.pop(score.next_state_id, None)
        self._ledger.forget(score.next_state_id)
        return Output((self.outgoing(score, header(record.headers, "traceparent")),))

    def begin(self, next_state: NextStateEvent) -> None:
        """An input is about to be judged. A replay tells its ledger."""

    def outgoing(self, score: ScoreEvent, traceparent: str | None) -> OutgoingRecord:
        """The record of a score. A replay writes another."""
        return score_record(score, topic=self._scores_topic, source=self._source, traceparent=traceparent)


def score_record(score: ScoreEvent, *, topic: str, source: str, traceparent: str | None) -> OutgoingRecord:
    """A score on the log. `topic` is the full name."""
    return encode(
        score, topic=topic, key=score.session_id, event_id=score.score_id, source=source, traceparent=traceparent
    )


def reference(record: Record) -> RecordReference:
    """Where `record` is, as events say it."""
    return RecordReference(topic=record.topic, partition=record.partition, offset=record.offset)
