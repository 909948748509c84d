"""Judges one next state: explicit evidence as it is, everything else by votes; hints by votes of their own."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from clawstream import ids
from clawstream.clock import Clock
from clawstream.errors import EngineTimeout
from clawstream.metrics import Metrics
from schemas.events import LlmCallEvent, NextStateEvent, ScoreEvent
from schemas.events.base import RecordReference
from schemas.events.score import Hint, ScoreStatus, Vote
from schemas.judge_spec import JudgeSpec
from services.judge.answers import Answers, CallLedger, Outcome, Question
from services.judge.backends.interface import (
    Abstention,
    Backend,
    CodeBackend,
    HintBackend,
    HintOpinion,
    ModelBackend,
    Opinion,
)
from services.judge.calls import ModelCaller
from services.judge.hints import HintSources, distinct_hints, user_hints
from services.judge.votes import tally

NEUTRAL_BELOW: Final = 0.1
"""Explicit scores closer to zero than this have verdict 0. The reward is the score itself in any case."""


@dataclass(frozen=True)
class ActiveJudge:
    """The judge that counts now."""

    spec: JudgeSpec
    """Complete: with the prompt's checksum."""
    promotion_epoch: int
    """How often the active spec had been changed."""
    backend: Backend
    hints: HintBackend | None = None
    """Asked for hints; None when the spec has no hint votes."""

    @cached_property
    def model(self) -> ModelBackend | None:
        """The backend, when it calls a model; None for code. Looking into a protocol is slow: it is done once."""
        return self.backend if isinstance(self.backend, ModelBackend) else None

    @cached_property
    def code(self) -> CodeBackend | None:
        """The backend, when it is code."""
        return self.backend if not isinstance(self.backend, ModelBackend) else None


def verdict_of(score: float) -> int:
    """The sign of an explicit score; 0 within `NEUTRAL_BELOW` of zero."""
    return 0 if abs(score) < NEUTRAL_BELOW else (1 if score > 0 else -1)


class Judging:
    """Makes scores. Knows models and the ledger, not the log."""

    def __init__(self, ledger: CallLedger, caller: ModelCaller, *, clock: Clock, metrics: Metrics) -> None:
        self._answers = Answers(ledger, caller, clock=clock, metrics=metrics)
        self._clock = clock
        self._metrics = metrics

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
        votes, hints = [_silent(number) for number in range(judge.spec.votes)], list[HintSources]()
        backend = judge.model
        if backend is not None:
            entries = self._answers.found(_verdicts(next_state, judge, backend), judge.spec.votes)
            votes = [
                _silent(number) if entry is None else _vote_of(backend, number, entry)
                for number, entry in enumerate(entries)
            ]
        if judge.hints is not None:
            entries = self._answers.found(_hints(next_state, judge, judge.hints), judge.spec.hint_votes)
            hints = [
                _silent_hint(number) if entry is None else _hint_of(judge.hints, number, entry)
                for number, entry in enumerate(entries)
            ]
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
        verdicts = [vote.verdict for vote in votes]
        for verdict in set(verdicts):
            label = "abstain" if verdict is None else str(verdict)
            self._metrics.increment("votes_total", verdicts.count(verdict), verdict=label)
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
        code = judge.code
        if code is not None:
            opinion = await code.judge(next_state)
            return [_vote(0, opinion, None)], [HintSources.of_code(opinion)]
        backend, hints = judge.model, judge.hints
        assert backend is not None
        verdicts = self._answers.of(_verdicts(next_state, judge, backend), judge.spec.votes)
        if hints is None:
            verdict_outcomes, hint_outcomes = await verdicts, list[Outcome]()
        else:
            verdict_outcomes, hint_outcomes = await asyncio.gather(
                verdicts,
                self._answers.of(_hints(next_state, judge, hints), judge.spec.hint_votes),
                return_exceptions=True,
            )
            if isinstance(verdict_outcomes, BaseException):
                raise verdict_outcomes
            if isinstance(hint_outcomes, BaseException):
                raise hint_outcomes
        # An outage, wherever it was met, is an outage of all: only then is a vote's own silence looked at.
        for outcome in [*verdict_outcomes, *hint_outcomes]:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineTimeout):
                raise outcome
        _raise_if_all_silent(verdict_outcomes, accept_timeouts)
        _raise_if_all_silent(hint_outcomes, accept_timeouts)
        return (
            [_vote_of(backend, number, outcome) for number, outcome in enumerate(verdict_outcomes)],
            [_hint_of(hints, number, outcome) for number, outcome in enumerate(hint_outcomes) if hints is not None],
        )


def _verdicts(next_state: NextStateEvent, judge: ActiveJudge, backend: ModelBackend) -> Question:
    return Question(next_state, judge.spec, backend, "verdict")


def _hints(next_state: NextStateEvent, judge: ActiveJudge, backend: HintBackend) -> Question:
    return Question(next_state, judge.spec, backend, "hint")


def _raise_if_all_silent(outcomes: Sequence[Outcome], accept_timeouts: bool) -> None:
    """Votes that timed out abstain, unless all of them did and that is not accepted: then EngineTimeout."""
    timeouts = [outcome for outcome in outcomes if isinstance(outcome, EngineTimeout)]
    if timeouts and len(timeouts) == len(outcomes) and not accept_timeouts:
        raise timeouts[0]


def _vote_of(backend: ModelBackend, number: int, outcome: Outcome) -> Vote:
    if isinstance(outcome, LlmCallEvent):
        return _vote(number, backend.interpret(outcome.response), outcome.call_id)
    return _silent(number) if outcome is not None else _vote(number, Opinion(abstention=Abstention.ERROR), None)


def _hint_of(backend: HintBackend, number: int, outcome: Outcome) -> HintSources:
    if isinstance(outcome, LlmCallEvent):
        return HintSources.of_vote(number, backend.interpret(outcome.response), outcome.call_id)
    if outcome is not None:
        return _silent_hint(number)
    return HintSources.of_vote(number, HintOpinion(abstention=Abstention.ERROR), None)


def _silent(number: int) -> Vote:
    return _vote(number, Opinion(abstention=Abstention.TIMEOUT), None)


def _silent_hint(number: int) -> HintSources:
    return HintSources.of_vote(number, HintOpinion(abstention=Abstention.TIMEOUT), None)


def _vote(number: int, opinion: Opinion, call_id: str | None) -> Vote:
    return Vote(vote=number, verdict=opinion.verdict, abstention=opinion.abstention, call_id=call_id)
