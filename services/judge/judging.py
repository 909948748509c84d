"""Judges one next state: explicit evidence as it is, everything else by votes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pydantic import JsonValue

from clawstream import ids
from clawstream.clock import Clock
from clawstream.errors import EngineProtocolError, EngineRejected, EngineTimeout
from clawstream.metrics import Metrics
from schemas.events import LlmCallEvent, NextStateEvent, ScoreEvent
from schemas.events.base import RecordReference
from schemas.events.score import Hint, ScoreStatus, Vote
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import Abstention, Backend, CodeBackend, ModelBackend, Opinion
from services.judge.calls import ModelCaller
from services.judge.evidence import user_text
from services.judge.ledger import request_checksum
from services.judge.votes import tally

NEUTRAL_BELOW: Final = 0.1
"""Explicit scores closer to zero than this have verdict 0. The reward is the score itself in any case."""


@dataclass(frozen=True, slots=True)
class ActiveJudge:
    """The judge that counts now."""

    spec: JudgeSpec
    """Complete: with the prompt's checksum."""
    promotion_epoch: int
    """How often the active spec had been changed."""
    backend: Backend


class CallLedger(Protocol):
    """What judging needs of the ledger."""

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None: ...

    def is_written(self, call_id: str) -> bool: ...

    async def record(self, event: LlmCallEvent) -> LlmCallEvent: ...


def verdict_of(score: float) -> int:
    """The sign of an explicit score; 0 within `NEUTRAL_BELOW` of zero."""
    return 0 if abs(score) < NEUTRAL_BELOW else (1 if score > 0 else -1)


class Judging:
    """Makes scores. Knows models and the ledger, not the log."""

    def __init__(self, ledger: CallLedger, caller: ModelCaller, *, clock: Clock, metrics: Metrics) -> None:
        self._ledger = ledger
        self._caller = caller
        self._clock = clock
        self._metrics = metrics
        self._last_request: tuple[ModelBackend, NextStateEvent, Mapping[str, JsonValue], str] | None = None

    async def score(
        self, next_state: NextStateEvent, reference: RecordReference, judge: ActiveJudge, *, accept_timeouts: bool
    ) -> ScoreEvent:
        """The score of `next_state`, which stands at `reference`.

        Raises EngineUnavailable or BusError in an outage, after every vote that could be had is in the ledger; and
        EngineTimeout when no vote was answered, unless `accept_timeouts`: then those votes abstain.
        """
        started = self._clock.monotonic_seconds()
        if next_state.feedback is not None:
            return self._explicit(next_state, reference, judge)
        votes = await self._votes(next_state, judge, accept_timeouts)
        return self._of_votes(next_state, reference, judge, votes, self._clock.monotonic_seconds() - started)

    def score_of_ledger(self, next_state: NextStateEvent, reference: RecordReference, judge: ActiveJudge) -> ScoreEvent:
        """The score when time is over: votes that are in the ledger count, the others abstain. Calls no model."""
        votes = [self._arrived(next_state, judge, number) for number in range(judge.spec.votes)]
        return self._of_votes(next_state, reference, judge, votes, 0.0)

    def _of_votes(
        self,
        next_state: NextStateEvent,
        reference: RecordReference,
        judge: ActiveJudge,
        votes: list[Vote],
        judge_seconds: float,
    ) -> ScoreEvent:
        for vote in votes:
            self._metrics.increment("votes_total", verdict=str(vote.verdict if vote.verdict is not None else "abstain"))
        result = tally(votes)
        return self._event(
            next_state,
            reference,
            judge,
            status=result.status,
            verdict=result.verdict,
            reward=None if result.verdict is None else float(result.verdict),
            tied=result.tied,
            votes=votes,
            hints=_user_hints(next_state) if judge.spec.hints == "user" else [],
            judge_seconds=judge_seconds,
        )

    def _explicit(self, next_state: NextStateEvent, reference: RecordReference, judge: ActiveJudge) -> ScoreEvent:
        """Needs no model: the reward is the score that was given; what the person said is a hint."""
        assert next_state.feedback is not None
        feedback = next_state.feedback
        text = (feedback.text or "").strip()
        return self._event(
            next_state,
            reference,
            judge,
            explicit=True,
            status=ScoreStatus.SCORED,
            verdict=verdict_of(feedback.score),
            reward=feedback.score,
            hints=[Hint(text=text, source="user")] if text else [],
        )

    def _event(
        self, next_state: NextStateEvent, reference: RecordReference, judge: ActiveJudge, **values: object
    ) -> ScoreEvent:
        return ScoreEvent.model_validate(
            {
                "score_id": ids.score_id(next_state.next_state_id, judge.spec.spec_hash),
                "next_state_id": next_state.next_state_id,
                "next_state_ref": reference,
                "turn_id": next_state.turn_id,
                "turn_ref": next_state.turn_ref,
                "session_id": next_state.session_id,
                "principal": next_state.principal,
                "judge_spec_hash": judge.spec.spec_hash,
                "promotion_epoch": judge.promotion_epoch,
                "judged_at": self._clock.now(),
                **values,
            }
        )

    async def _votes(self, next_state: NextStateEvent, judge: ActiveJudge, accept_timeouts: bool) -> list[Vote]:
        if not isinstance(judge.backend, ModelBackend):
            return [_vote(0, await _code_opinion(judge.backend, next_state), None)]
        backend = judge.backend
        results = await asyncio.gather(
            *(self._model_vote(next_state, judge, backend, number) for number in range(judge.spec.votes)),
            return_exceptions=True,
        )
        return _settled(results, accept_timeouts)

    def _arrived(self, next_state: NextStateEvent, judge: ActiveJudge, number: int) -> Vote:
        """A vote as far as the ledger has it."""
        backend = judge.backend
        if isinstance(backend, ModelBackend):
            call_id = ids.call_id(next_state.next_state_id, judge.spec.spec_hash, "verdict", number)
            entry = self._ledger.find(call_id, self._request(backend, next_state)[1])
            if entry is not None:
                return _vote(number, backend.interpret(entry.response), call_id)
        return _vote(number, Opinion(abstention=Abstention.TIMEOUT), None)

    async def _model_vote(
        self, next_state: NextStateEvent, judge: ActiveJudge, backend: ModelBackend, number: int
    ) -> Vote:
        """From the ledger when it is there, else from the model, and then into the ledger."""
        spec_hash = judge.spec.spec_hash
        request, checksum = self._request(backend, next_state)
        call_id = ids.call_id(next_state.next_state_id, spec_hash, "verdict", number)
        entry = self._ledger.find(call_id, checksum)
        if entry is not None:
            self._metrics.increment("ledger_hits_total")
        else:
            try:
                answer, seconds = await self._caller.call(backend, request)
            except (EngineRejected, EngineProtocolError):
                return _vote(number, Opinion(abstention=Abstention.ERROR), None)
            entry = LlmCallEvent(
                call_id=call_id,
                next_state_id=next_state.next_state_id,
                session_id=next_state.session_id,
                judge_spec_hash=spec_hash,
                purpose="verdict",
                vote=number,
                model=judge.spec.model,
                request_sha256=checksum,
                response=answer.response,
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
                seconds=seconds,
                called_at=self._clock.now(),
            )
            entry = await self._ledger.record(entry)
        if not self._ledger.is_written(call_id):
            entry = await self._ledger.record(entry)
        return _vote(number, backend.interpret(entry.response), call_id)

    def _request(self, backend: ModelBackend, next_state: NextStateEvent) -> tuple[Mapping[str, JsonValue], str]:
        """The request and its checksum. The votes of an input ask right after one another: it is made once for all."""
        last = self._last_request
        if last is None or last[0] is not backend or last[1] is not next_state:
            request = backend.prepare(next_state)
            last = self._last_request = (backend, next_state, request, request_checksum(request))
        return last[2], last[3]


async def _code_opinion(backend: CodeBackend, next_state: NextStateEvent) -> Opinion:
    return await backend.judge(next_state)


def _vote(number: int, opinion: Opinion, call_id: str | None) -> Vote:
    return Vote(vote=number, verdict=opinion.verdict, abstention=opinion.abstention, call_id=call_id)


def _settled(results: Sequence[Vote | BaseException], accept_timeouts: bool) -> list[Vote]:
    """The votes. An outage of one is an outage of all. Those that timed out abstain, unless all of them did."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineTimeout):
            raise result
    timeouts = [result for result in results if isinstance(result, EngineTimeout)]
    if len(timeouts) == len(results) and not accept_timeouts:
        raise timeouts[0]
    return [
        result if isinstance(result, Vote) else _vote(number, Opinion(abstention=Abstention.TIMEOUT), None)
        for number, result in enumerate(results)
    ]


def _user_hints(next_state: NextStateEvent) -> list[Hint]:
    text = user_text(next_state.following_messages).strip()
    return [Hint(text=text, source="user")] if text else []
