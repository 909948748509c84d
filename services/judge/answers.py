"""What models answered to the votes of an input: from the ledger, else asked for, and on the ledger before it is used.

Missing votes of one purpose are one request, so they are asked for in one call (`n`) where the model can: the prompt is
read once. Where fewer answers come back, or a call for several is refused, votes are asked for one by one. However it
was asked for, every answer has its own call id and its own entry.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from pydantic import JsonValue

from clawstream import ids
from clawstream.clock import Clock
from clawstream.errors import (
    BusError,
    EngineBusy,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EngineUnreachable,
)
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from schemas.events import LlmCallEvent, NextStateEvent
from schemas.judge_spec import JudgeSpec
from services.judge.backends.interface import HintBackend, ModelAnswer, ModelBackend
from services.judge.calls import ModelCaller
from services.judge.ledger import request_checksum

Purpose = Literal["verdict", "hint"]
Outcome = LlmCallEvent | EngineUnavailable | EngineTimeout | BusError | None
"""An entry that is on the log; why there is none yet; or None when the model refused this request for good."""

ONE_BY_ONE_SECONDS: Final = 600.0
"""So long a model that gave one answer where several were asked for is not asked for several again."""
SINGLY_FOR_NOW_SECONDS: Final = 120.0
"""So long after an outage or a timeout, which need not have to do with several answers."""


class CallLedger(Protocol):
    """What is needed of the ledger."""

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None: ...

    def is_written(self, call_id: str) -> bool: ...

    async def record(self, events: Sequence[LlmCallEvent]) -> list[LlmCallEvent | BusError]: ...


@dataclass(frozen=True, slots=True)
class Question:
    """What the votes of one purpose ask about an input."""

    next_state: NextStateEvent
    spec: JudgeSpec
    backend: ModelBackend | HintBackend
    purpose: Purpose

    def call_id(self, number: int) -> str:
        """Of a vote."""
        return ids.call_id(self.next_state.next_state_id, self.spec.spec_hash, self.purpose, number)


@dataclass(frozen=True, slots=True)
class _Request:
    question: Question
    body: Mapping[str, JsonValue]
    checksum: str
    call_ids: Sequence[str]
    """Of every vote."""


class Answers:
    """Used on one event loop."""

    def __init__(self, ledger: CallLedger, caller: ModelCaller, *, clock: Clock, metrics: Metrics) -> None:
        self._ledger = ledger
        self._caller = caller
        self._clock = clock
        self._metrics = metrics
        self._one_by_one_until: dict[ModelBackend | HintBackend, float] = {}

    def found(self, question: Question, votes: int) -> list[LlmCallEvent | None]:
        """What is on the ledger of votes 0 to `votes`: of an answer that is not there yet nothing may be made.

        Calls no model.
        """
        checksum = request_checksum(question.backend.prepare(question.next_state))
        call_ids = [question.call_id(number) for number in range(votes)]
        return [
            self._ledger.find(call_id, checksum) if self._ledger.is_written(call_id) else None for call_id in call_ids
        ]

    async def of(self, question: Question, votes: int) -> list[Outcome]:
        """The answers to votes 0 to `votes`. An outage of one does not keep the others from being paid and recorded."""
        body = question.backend.prepare(question.next_state)
        checksum = request_checksum(body)
        call_ids = [question.call_id(number) for number in range(votes)]
        known = [self._ledger.find(call_id, checksum) for call_id in call_ids]
        missing = [number for number, entry in enumerate(known) if entry is None]
        if len(missing) < votes:
            self._metrics.increment("ledger_hits_total", votes - len(missing))
        outcomes: dict[int, Outcome] = {
            number: entry for number, entry in enumerate(known) if entry is not None
        } | await self._again([entry for entry in known if entry is not None])
        if missing:
            outcomes |= await self._asked(_Request(question, body, checksum, call_ids), missing)
        return [outcomes[number] for number in range(votes)]

    async def _again(self, entries: Sequence[LlmCallEvent]) -> dict[int, Outcome]:
        """Records those that were paid for and could not be written then."""
        unwritten = [entry for entry in entries if not self._ledger.is_written(entry.call_id)]
        if not unwritten:
            return {}
        recorded = await self._ledger.record(unwritten)
        return {entry.vote: outcome for entry, outcome in zip(unwritten, recorded, strict=True)}

    async def _asked(self, request: _Request, numbers: Sequence[int]) -> dict[int, Outcome]:
        most = self._caller.most_answers
        if most == 1 or self._clock.monotonic_seconds() < self._one_by_one_until.get(request.question.backend, 0.0):
            return await self._one_by_one(request, numbers)
        groups = [numbers[start : start + most] for start in range(0, len(numbers), most)]
        return await _merged([self._together(request, group) for group in groups])

    async def _one_by_one(self, request: _Request, numbers: Sequence[int]) -> dict[int, Outcome]:
        return await _merged([self._together(request, [number]) for number in numbers])

    async def _together(self, request: _Request, numbers: Sequence[int]) -> dict[int, Outcome]:
        """One call for all of these votes; one each for those that it does not answer."""
        backend = request.question.backend
        try:
            answers, seconds = await self._caller.call(backend, request.body, len(numbers))
        except (EngineRejected, EngineProtocolError, EngineUnavailable, EngineTimeout) as error:
            if len(numbers) > 1 and isinstance(error, EngineRejected | EngineProtocolError):
                return await self._after_refusal(request, numbers)
            if len(numbers) > 1 and not isinstance(error, EngineBusy | EngineUnreachable):
                # It may be several that it cannot do, or not in time. No second round now: time for one was planned.
                self._remember_one_by_one(backend, f"it failed at several answers: {error}", SINGLY_FOR_NOW_SECONDS)
            return dict.fromkeys(numbers, _why_not(error))
        events = [
            self._event(request, number, answer, seconds) for number, answer in zip(numbers, answers, strict=False)
        ]
        rest = numbers[len(events) :]
        if not rest:
            return await self._recorded(events)
        if len(events) == 1:
            self._remember_one_by_one(backend, "it gave one answer where several were asked for")
        return await _merged([self._recorded(events), self._one_by_one(request, rest)])

    async def _after_refusal(self, request: _Request, numbers: Sequence[int]) -> dict[int, Outcome]:
        """Whether it refuses several, or this request, or is out of order, one vote alone tells."""
        outcomes = await self._together(request, numbers[:1])
        first = outcomes[numbers[0]]
        if isinstance(first, EngineUnavailable | EngineTimeout):
            return dict.fromkeys(numbers, first)
        if isinstance(first, LlmCallEvent):
            self._remember_one_by_one(request.question.backend, "it refuses to give several answers")
        return outcomes | await self._one_by_one(request, numbers[1:])

    def _remember_one_by_one(
        self, backend: ModelBackend | HintBackend, reason: str, seconds: float = ONE_BY_ONE_SECONDS
    ) -> None:
        self._one_by_one_until[backend] = self._clock.monotonic_seconds() + seconds
        get_logger().info("a judge model is asked for one answer at a time", reason=reason)

    async def _recorded(self, events: Sequence[LlmCallEvent]) -> dict[int, Outcome]:
        recorded = await self._ledger.record(events)
        return {event.vote: outcome for event, outcome in zip(events, recorded, strict=True)}

    def _event(self, request: _Request, number: int, answer: ModelAnswer, seconds: float) -> LlmCallEvent:
        question = request.question
        return LlmCallEvent(
            call_id=request.call_ids[number],
            next_state_id=question.next_state.next_state_id,
            session_id=question.next_state.session_id,
            judge_spec_hash=question.spec.spec_hash,
            purpose=question.purpose,
            vote=number,
            model=question.spec.model,
            request_sha256=request.checksum,
            response=answer.response,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            seconds=seconds,
            called_at=self._clock.now(),
        )


def _why_not(error: EngineRejected | EngineProtocolError | EngineUnavailable | EngineTimeout) -> Outcome:
    return error if isinstance(error, EngineUnavailable | EngineTimeout) else None


async def _merged(parts: Sequence[Coroutine[Any, Any, dict[int, Outcome]]]) -> dict[int, Outcome]:
    """All at once. What one raises is raised when all have ended: what the others paid for is recorded then."""
    if len(parts) == 1:  # The usual case needs no task of its own.
        return await parts[0]
    outcomes: dict[int, Outcome] = {}
    for result in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        outcomes |= result
    return outcomes
