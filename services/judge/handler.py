"""One input of the judge: a next state in; a score, or a counted skip, out."""

from collections import Counter

from clawstream.bus.interface import Record
from clawstream.codec import decode_as, encode, header
from clawstream.errors import BrokerUnavailable, EngineBusy, EngineTimeout, EngineUnavailable, RetryLater
from clawstream.topics import SCORES, full_name
from clawstream.worker.outcome import Outcome
from schemas.events import NextStateEvent
from schemas.events.base import RecordReference
from schemas.events.next_state import NextStateKind
from services.judge.active import ActiveJudges
from services.judge.judging import Judging
from services.judge.ledger import Ledger
from services.judge.read_back import ReadBack


class JudgeHandler:
    """What the worker calls for every next state, many at a time on one event loop."""

    def __init__(
        self,
        judges: ActiveJudges,
        judging: Judging,
        ledger: Ledger,
        read_back: ReadBack,
        *,
        namespace: str,
        source: str,
        max_timeouts: int,
    ) -> None:
        self._judges = judges
        self._judging = judging
        self._ledger = ledger
        self._read_back = read_back
        self._scores_topic = full_name(namespace, SCORES)
        self._source = source
        self._max_timeouts = max_timeouts
        self._timeouts: Counter[str] = Counter()

    async def handle(self, record: Record) -> Outcome:
        """Raises DecodeError for what is no next state, and RetryLater in an outage of the model or the log."""
        next_state = decode_as(record, NextStateEvent)
        if next_state.kind is NextStateKind.SESSION_END:
            return Outcome.skip("session_end")
        if not next_state.turn_trainable:
            return Outcome.skip("untrainable_turn")
        judge = self._judges.current
        try:
            await self._read_back.ready(record)
            score = await self._judging.score(
                next_state,
                RecordReference(topic=record.topic, partition=record.partition, offset=record.offset),
                judge,
                accept_timeouts=self._timeouts[next_state.next_state_id] + 1 >= self._max_timeouts,
            )
        except EngineTimeout as error:
            self._timeouts[next_state.next_state_id] += 1
            raise RetryLater(f"{record}: {error}") from error
        except EngineBusy as error:
            raise RetryLater(f"{record}: {error}", retry_after_seconds=error.retry_after_seconds or 0.0) from error
        except (EngineUnavailable, BrokerUnavailable) as error:
            raise RetryLater(f"{record}: {error}") from error
        self._timeouts.pop(next_state.next_state_id, None)
        self._ledger.forget(next_state.next_state_id)
        return Outcome.outputs(
            encode(
                score,
                topic=self._scores_topic,
                key=score.session_id,
                event_id=score.score_id,
                source=self._source,
                traceparent=header(record.headers, "traceparent"),
            )
        )
