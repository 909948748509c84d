"""Judging: votes by models through the ledger, explicit evidence without either."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import JsonValue

from clawstream import ids
from clawstream.clock import ManualClock
from clawstream.errors import (
    BrokerUnavailable,
    BusError,
    EngineBusy,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from clawstream.metrics import Metrics
from schemas.events import LlmCallEvent, NextStateEvent, ScoreEvent
from schemas.events.base import RolloutPosition
from schemas.events.score import ScoreStatus
from schemas.judge_spec import JudgeSpec
from services.judge.backends.generated import interpret_generation
from services.judge.backends.interface import Backend, ModelAnswer, Opinion
from services.judge.backends.rules import RulesBackend
from services.judge.calls import ModelCaller, RetryPolicy
from services.judge.judging import ActiveJudge, Judging
from tests.unit.judge.examples import REFERENCE, feedback, reply

SPEC = JudgeSpec(backend="openai", model="a-judge", votes=3)
UNAVAILABLE = EngineUnavailable("down")
TIMEOUT = EngineTimeout("silent")


class ScriptedBackend:
    """Gives or raises one thing per call, in order; the last one for ever. One answer, however many are wanted."""

    def __init__(self, *script: str | Exception) -> None:
        self._script = list(script)
        self.calls = 0
        self.most_at_once = 0
        self._now = 0

    def prepare(self, next_state: NextStateEvent) -> Mapping[str, JsonValue]:
        return {"messages": [str(message["content"]) for message in next_state.following_messages]}

    async def call(self, request: Mapping[str, JsonValue], answers: int = 1) -> Sequence[ModelAnswer]:
        step = self._script[min(self.calls, len(self._script) - 1)]
        self.calls += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0)
        self._now -= 1
        if isinstance(step, Exception):
            raise step
        return [ModelAnswer({"text": step, "finish_reason": "stop"}, prompt_tokens=5, completion_tokens=2)]

    def interpret(self, response: JsonValue) -> Opinion:
        return interpret_generation(response)

    async def close(self) -> None:
        pass


class MemoryLedger:
    """Keeps entries as the ledger does; can be made to fail."""

    def __init__(self) -> None:
        self.entries: dict[str, LlmCallEvent] = {}
        self.written: list[str] = []
        self.failures = 0

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None:
        entry = self.entries.get(call_id)
        return entry if entry is not None and entry.request_sha256 == request_sha256 else None

    def is_written(self, call_id: str) -> bool:
        return call_id in self.written

    async def record(self, events: Sequence[LlmCallEvent]) -> list[LlmCallEvent | BusError]:
        results: list[LlmCallEvent | BusError] = []
        for event in events:
            self.entries[event.call_id] = event
            if self.failures:
                self.failures -= 1
                results.append(BrokerUnavailable("away"))
            else:
                self.written.append(event.call_id)
                results.append(event)
        return results


class Sleeps:
    """Instead of sleeping, writes down for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Setting:
    """A judge with everything around it scripted. One call per vote, unless `several_answers`."""

    def __init__(
        self,
        *script: str | Exception,
        attempts: int = 1,
        max_concurrent_calls: int = 8,
        several_answers: bool = False,
        clock: ManualClock | None = None,
    ) -> None:
        self.backend = ScriptedBackend(*script)
        self.ledger = MemoryLedger()
        self.sleeps = Sleeps()
        self.metrics = Metrics()
        clock = clock or ManualClock()
        caller = ModelCaller(
            RetryPolicy(attempts=attempts, first_delay_seconds=1.0, longest_delay_seconds=3.0),
            max_concurrent_calls=max_concurrent_calls,
            clock=clock,
            metrics=self.metrics,
            several_answers=several_answers,
            uniform=lambda low, high: high,
            sleep=self.sleeps,
        )
        self.judging = Judging(self.ledger, caller, clock=clock, metrics=self.metrics)

    async def score(
        self,
        next_state: NextStateEvent,
        *,
        spec: JudgeSpec = SPEC,
        backend: Backend | None = None,
        accept_timeouts: bool = False,
    ) -> ScoreEvent:
        judge = ActiveJudge(spec=spec, promotion_epoch=4, backend=backend or self.backend)
        return await self.judging.score(next_state, REFERENCE, judge, accept_timeouts=accept_timeouts)

    def score_of_ledger(self, next_state: NextStateEvent) -> ScoreEvent:
        judge = ActiveJudge(spec=SPEC, promotion_epoch=4, backend=self.backend)
        return self.judging.score_of_ledger(next_state, REFERENCE, judge)


def verdicts(score: ScoreEvent) -> list[Any]:
    return [vote.verdict if vote.verdict is not None else vote.abstention for vote in score.votes]


async def test_m_votes_make_a_score_and_every_vote_is_kept() -> None:
    setting = Setting(r"\boxed{1}", "no idea", r"\boxed{1}")
    score = await setting.score(reply("Thanks"))
    assert (score.status, score.verdict, score.reward, score.tied) == (ScoreStatus.SCORED, 1, 1.0, False)
    assert verdicts(score) == [1, "unparsable", 1]
    assert [vote.call_id for vote in score.votes] == setting.ledger.written
    assert score.score_id == ids.score_id("next-state-1", SPEC.spec_hash)
    assert score.judge_spec_hash == SPEC.spec_hash
    assert score.promotion_epoch == 4
    assert score.next_state_ref == REFERENCE
    assert score.turn_ref == reply("Thanks").turn_ref
    assert not score.explicit


async def test_the_ledger_holds_the_raw_answers() -> None:
    setting = Setting("no idea")
    await setting.score(reply("Thanks"))
    entries = list(setting.ledger.entries.values())
    assert [entry.vote for entry in entries] == [0, 1, 2]
    assert entries[0].response == {"text": "no idea", "finish_reason": "stop"}
    assert (entries[0].prompt_tokens, entries[0].completion_tokens) == (5, 2)


async def test_unparsable_votes_fail_and_are_no_neutral_verdict() -> None:
    score = await Setting("no idea").score(reply("Thanks"))
    assert (score.status, score.verdict, score.reward) == (ScoreStatus.FAILED, None, None)


async def test_votes_run_together_within_the_limit() -> None:
    together = Setting(r"\boxed{1}")
    await together.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 5}))
    assert together.backend.most_at_once == 5
    limited = Setting(r"\boxed{1}", max_concurrent_calls=2)
    await limited.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 5}))
    assert limited.backend.most_at_once == 2


async def test_what_is_in_the_ledger_is_not_asked_again() -> None:
    setting = Setting(r"\boxed{-1}")
    first = await setting.score(reply("No"))
    second = await setting.score(reply("No"))
    assert setting.backend.calls == 3
    assert second.votes == first.votes
    assert b"clawstream_ledger_hits_total 3.0" in setting.metrics.exposition()


async def test_the_ledger_answers_only_the_same_request_under_the_same_spec() -> None:
    setting = Setting(r"\boxed{-1}")
    await setting.score(reply("No"))
    await setting.score(reply("Something else under the same id"))
    assert setting.backend.calls == 6
    await setting.score(reply("No"), spec=SPEC.model_copy(update={"temperature": 0.1}))
    assert setting.backend.calls == 9


async def test_an_outage_keeps_what_was_paid_for() -> None:
    setting = Setting(r"\boxed{1}", UNAVAILABLE, r"\boxed{1}", r"\boxed{1}")
    with pytest.raises(EngineUnavailable):
        await setting.score(reply("Thanks"))
    assert len(setting.ledger.written) == 2
    score = await setting.score(reply("Thanks"))
    assert setting.backend.calls == 4
    assert verdicts(score) == [1, 1, 1]


async def test_a_ledger_that_cannot_be_written_stops_the_score_but_pays_once() -> None:
    setting = Setting(r"\boxed{1}")
    setting.ledger.failures = 2
    with pytest.raises(BrokerUnavailable):
        await setting.score(reply("Thanks"))
    await setting.score(reply("Thanks"))
    assert setting.backend.calls == 3
    assert sorted(setting.ledger.written) == sorted(setting.ledger.entries)


@pytest.mark.parametrize("error", [EngineRejected("bad", status=400), EngineProtocolError("nonsense")])
async def test_a_request_that_is_refused_for_good_abstains(error: Exception) -> None:
    setting = Setting(error, r"\boxed{1}", attempts=3)
    score = await setting.score(reply("Thanks"))
    assert verdicts(score) == ["error", 1, 1]
    assert score.votes[0].call_id is None
    assert setting.backend.calls == 3


@pytest.mark.parametrize("status", [401, 403, 404, 429])
async def test_a_refusal_that_is_not_the_requests_fault_is_an_outage(status: int) -> None:
    with pytest.raises(EngineUnavailable):
        await Setting(EngineRejected("key", status=status)).score(reply("Thanks"))


async def test_silence_of_some_votes_is_their_abstention() -> None:
    score = await Setting(TIMEOUT, r"\boxed{1}").score(reply("Thanks"))
    assert verdicts(score) == ["timeout", 1, 1]


async def test_silence_of_all_votes_is_an_outage_until_it_is_accepted() -> None:
    setting = Setting(TIMEOUT)
    with pytest.raises(EngineTimeout):
        await setting.score(reply("Thanks"))
    score = await setting.score(reply("Thanks"), accept_timeouts=True)
    assert score.status is ScoreStatus.FAILED
    assert verdicts(score) == ["timeout"] * 3


async def test_calls_are_repeated_a_few_times_with_growing_pauses() -> None:
    setting = Setting(UNAVAILABLE, TIMEOUT, UNAVAILABLE, r"\boxed{1}", attempts=4)
    await setting.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 1}))
    assert setting.sleeps.seconds == [1.0, 2.0, 3.0]


async def test_calls_are_not_repeated_for_ever() -> None:
    setting = Setting(UNAVAILABLE, attempts=3)
    with pytest.raises(EngineUnavailable):
        await setting.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 1}))
    assert setting.backend.calls == 3


async def test_an_endpoint_that_asks_for_time_gets_it() -> None:
    setting = Setting(EngineBusy("slow down", retry_after_seconds=2.5), r"\boxed{1}", attempts=2)
    await setting.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 1}))
    assert setting.sleeps.seconds == [2.5]
    too_long = Setting(EngineBusy("slow down", retry_after_seconds=60), r"\boxed{1}", attempts=2)
    with pytest.raises(EngineBusy):
        await too_long.score(reply("Thanks"), spec=SPEC.model_copy(update={"votes": 1}))
    assert too_long.backend.calls == 1


@pytest.mark.parametrize(
    ("given", "verdict"), [(1.0, 1), (0.25, 1), (0.1, 1), (0.09, 0), (0.0, 0), (-0.09, 0), (-0.1, -1), (-1.0, -1)]
)
@pytest.mark.parametrize("kind", ["feedback", "outcome"])
async def test_explicit_evidence_needs_no_model(given: float, verdict: int, kind: str) -> None:
    setting = Setting(UNAVAILABLE)
    score = await setting.score(feedback(given, kind=kind))
    assert (score.verdict, score.reward, score.explicit, score.votes) == (verdict, given, True, [])
    assert score.status is ScoreStatus.SCORED
    assert setting.backend.calls == 0
    assert setting.ledger.entries == {}


async def test_an_outcome_keeps_its_step_score_and_its_place_in_the_rollout() -> None:
    position = RolloutPosition(task_id="t", group_id="g", rollout_id="r", step_index=0, last_step_index=1)
    outcome = feedback(1.0, kind="outcome").model_copy(update={"rollout": position})
    assert outcome.feedback is not None
    stepped = outcome.model_copy(update={"feedback": outcome.feedback.model_copy(update={"step_score": -0.5})})
    score = await Setting(UNAVAILABLE).score(stepped)
    assert (score.reward, score.step_reward, score.rollout) == (1.0, -0.5, position)


async def test_what_people_say_with_their_feedback_is_a_hint() -> None:
    score = await Setting("").score(feedback(-1.0, "  Shorter, please. "))
    assert [(hint.text, hint.source) for hint in score.hints] == [("Shorter, please.", "user")]
    assert (await Setting("").score(feedback(-1.0, "  "))).hints == []


async def test_replies_become_hints_only_when_the_spec_says_so() -> None:
    setting = Setting(r"\boxed{-1}")
    assert (await setting.score(reply("Shorter."))).hints == []
    score = await setting.score(reply("Shorter."), spec=SPEC.model_copy(update={"hints": "user"}))
    assert [(hint.text, hint.source) for hint in score.hints] == [("Shorter.", "user")]


async def test_rules_judge_without_the_ledger() -> None:
    setting = Setting(UNAVAILABLE)
    score = await setting.score(
        reply("Thanks"), spec=JudgeSpec(backend="rules", votes=1), backend=RulesBackend([("Thanks", 1)])
    )
    assert verdicts(score) == [1]
    assert score.votes[0].call_id is None
    assert setting.ledger.entries == {}
