"""Judges one next state: explicit evidence as it is, everything else by votes; hints by votes of their own."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeVar

from pydantic import JsonValue

from clawstream import ids
from clawstream.clock import Clock
from clawstream.errors import EngineProtocolError, EngineRejected, EngineTimeout
from clawstream.metrics import Metrics
from schemas.events import LlmCallEvent, NextStateEvent, ScoreEvent
from schemas.events.base import RecordReference
from schemas.events.score import Hint, ScoreStatus, Vote
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import (
    Abstention,
    Backend,
    HintBackend,
    HintOpinion,
    ModelBackend,
    Opinion,
)
from services.judge.calls import ModelCaller
from services.judge.hints import HintSources, distinct_hints, user_hints
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
    hints: HintBackend | None = None
    """Asked for hints; None when the spec has no hint votes."""


VoteType = TypeVar("VoteType", Vote, HintSources)
Purpose = Literal["verdict", "hint"]


@dataclass(frozen=True, slots=True)
class _Request:
    backend: ModelBackend | HintBackend
    next_state: NextStateEvent
    body: Mapping[str, JsonValue]
    checksum: str


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
        self._last_requests: dict[Purpose, _Request] = {}

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
        votes, hints = await self._votes(next_state, judge, accept_timeouts)
        return self._of_votes(next_state, reference, judge, votes, hints, self._clock.monotonic_seconds() - started)

    def score_of_ledger(self, next_state: NextStateEvent, reference: RecordReference, judge: ActiveJudge) -> ScoreEvent:
        """The score when time is over: votes that are in the ledger count, the others abstain. Calls no model."""
        votes = [self._arrived(next_state, judge, number) for number in range(judge.spec.votes)]
        hints = [self._arrived_hint(next_state, judge, number) for number in range(_hint_votes(judge))]
        return self._of_votes(next_state, reference, judge, votes, hints, 0.0)

    def _of_votes(
        self,
        next_state: NextStateEvent,
        reference: RecordReference,
        judge: ActiveJudge,
        votes: list[Vote],
        hints: list[HintSources],
        judge_seconds: float,
    ) -> ScoreEvent:
        hint_votes = [each.vote for each in hints if each.vote is not None]
        for vote in votes:
            self._metrics.increment("votes_total", verdict=str(vote.verdict if vote.verdict is not None else "abstain"))
        for hint_vote in hint_votes:
            answer = {True: "hint", False: "none", None: "abstain"}[hint_vote.useful]
            self._metrics.increment("hint_votes_total", answer=answer)
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
            hints=distinct_hints(
                [
                    *(user_hints(next_state) if judge.spec.user_gives_hints else []),
                    *(hint for each in hints for hint in each.hints if judge.spec.judge_gives_hints),
                ]
            ),
            hint_votes=hint_votes,
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
            step_reward=feedback.step_score,
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
                "rollout": next_state.rollout,
                "judged_at": self._clock.now(),
                **values,
            }
        )

    async def _votes(
        self, next_state: NextStateEvent, judge: ActiveJudge, accept_timeouts: bool
    ) -> tuple[list[Vote], list[HintSources]]:
        """Verdict votes and hint votes, all at once."""
        if not isinstance(judge.backend, ModelBackend):
            opinion = await judge.backend.judge(next_state)
            return [_vote(0, opinion, None)], [HintSources.of_code(opinion)]
        backend, asked = judge.backend, judge.hints
        verdicts = [self._model_vote(next_state, judge, backend, number) for number in range(judge.spec.votes)]
        hint_numbers = range(_hint_votes(judge))
        hints = [self._hint_vote(next_state, judge, asked, number) for number in hint_numbers if asked is not None]
        verdict_results, hint_results = await asyncio.gather(
            asyncio.gather(*verdicts, return_exceptions=True), asyncio.gather(*hints, return_exceptions=True)
        )
        # An outage, wherever it was met, is an outage of all: only then is a vote's own silence looked at.
        for result in [*verdict_results, *hint_results]:
            if isinstance(result, BaseException) and not isinstance(result, EngineTimeout):
                raise result
        silent = Abstention.TIMEOUT
        return (
            _settled(verdict_results, accept_timeouts, lambda n: _vote(n, Opinion(abstention=silent), None)),
            _settled(
                hint_results, accept_timeouts, lambda n: HintSources.of_vote(n, HintOpinion(abstention=silent), None)
            ),
        )

    def _arrived(self, next_state: NextStateEvent, judge: ActiveJudge, number: int) -> Vote:
        """A vote as far as the ledger has it."""
        backend = judge.backend
        if isinstance(backend, ModelBackend):
            entry = self._found(next_state, judge, backend, "verdict", number)
            if entry is not None:
                return _vote(number, backend.interpret(entry.response), entry.call_id)
        return _vote(number, Opinion(abstention=Abstention.TIMEOUT), None)

    def _arrived_hint(self, next_state: NextStateEvent, judge: ActiveJudge, number: int) -> HintSources:
        assert judge.hints is not None
        entry = self._found(next_state, judge, judge.hints, "hint", number)
        if entry is not None:
            return HintSources.of_vote(number, judge.hints.interpret(entry.response), entry.call_id)
        return HintSources.of_vote(number, HintOpinion(abstention=Abstention.TIMEOUT), None)

    async def _model_vote(
        self, next_state: NextStateEvent, judge: ActiveJudge, backend: ModelBackend, number: int
    ) -> Vote:
        entry = await self._answer(next_state, judge, backend, "verdict", number)
        if entry is None:
            return _vote(number, Opinion(abstention=Abstention.ERROR), None)
        return _vote(number, backend.interpret(entry.response), entry.call_id)

    async def _hint_vote(
        self, next_state: NextStateEvent, judge: ActiveJudge, backend: HintBackend, number: int
    ) -> HintSources:
        entry = await self._answer(next_state, judge, backend, "hint", number)
        if entry is None:
            return HintSources.of_vote(number, HintOpinion(abstention=Abstention.ERROR), None)
        return HintSources.of_vote(number, backend.interpret(entry.response), entry.call_id)

    def _found(
        self,
        next_state: NextStateEvent,
        judge: ActiveJudge,
        backend: ModelBackend | HintBackend,
        purpose: Purpose,
        number: int,
    ) -> LlmCallEvent | None:
        call_id = ids.call_id(next_state.next_state_id, judge.spec.spec_hash, purpose, number)
        return self._ledger.find(call_id, self._request(backend, next_state, purpose)[1])

    async def _answer(
        self,
        next_state: NextStateEvent,
        judge: ActiveJudge,
        backend: ModelBackend | HintBackend,
        purpose: Purpose,
        number: int,
    ) -> LlmCallEvent | None:
        """From the ledger when it is there, else from the model, and then into the ledger.

        None when the model refused this request for good. Raises as `ModelCaller.call`, and BusError.
        """
        request, checksum = self._request(backend, next_state, purpose)
        call_id = ids.call_id(next_state.next_state_id, judge.spec.spec_hash, purpose, number)
        entry = self._ledger.find(call_id, checksum)
        if entry is not None:
            self._metrics.increment("ledger_hits_total")
        else:
            try:
                answer, seconds = await self._caller.call(backend, request)
            except (EngineRejected, EngineProtocolError):
                return None
            entry = LlmCallEvent(
                call_id=call_id,
                next_state_id=next_state.next_state_id,
                session_id=next_state.session_id,
                judge_spec_hash=judge.spec.spec_hash,
                purpose=purpose,
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
        if not self._ledger.is_written(entry.call_id):
            entry = await self._ledger.record(entry)
        return entry

    def _request(
        self, backend: ModelBackend | HintBackend, next_state: NextStateEvent, purpose: Purpose
    ) -> tuple[Mapping[str, JsonValue], str]:
        """The request and its checksum. The votes of an input ask right after one another: it is made once for all."""
        last = self._last_requests.get(purpose)
        if last is None or last.backend is not backend or last.next_state is not next_state:
            body = backend.prepare(next_state)
            last = self._last_requests[purpose] = _Request(backend, next_state, body, request_checksum(body))
        return last.body, last.checksum


def _hint_votes(judge: ActiveJudge) -> int:
    return judge.spec.hint_votes if judge.hints is not None else 0


def _vote(number: int, opinion: Opinion, call_id: str | None) -> Vote:
    return Vote(vote=number, verdict=opinion.verdict, abstention=opinion.abstention, call_id=call_id)


def _settled(
    results: Sequence[VoteType | BaseException], accept_timeouts: bool, silent: Callable[[int], VoteType]
) -> list[VoteType]:
    """The votes; those that timed out abstain, unless all of them did and that is not accepted: then EngineTimeout."""
    timeouts = [result for result in results if isinstance(result, BaseException)]
    if timeouts and len(timeouts) == len(results) and not accept_timeouts:
        raise timeouts[0]
    return [silent(number) if isinstance(result, BaseException) else result for number, result in enumerate(results)]
