"""The teacher's handler: outages wait, misalignment is named, silence costs the signal and not the sample."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from pydantic import ValidationError

from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import ManualClock
from clawstream.codec import decode_value, encode
from clawstream.errors import EngineBusy, EngineProtocolError, EngineTimeout, EngineUnavailable, RetryLater
from clawstream.metrics import Metrics
from clawstream.worker.outcomes import DeadLetter, Outcome, Output, Skip
from schemas.arrays import float32_array
from schemas.events import SampleEvent, ScoreEvent, TurnEvent
from schemas.events.base import RecordReference
from schemas.events.sample import TeacherSignal
from schemas.events.score import Hint
from services.teacher.assembly import NoSignal, Signal
from services.teacher.handler import TeacherHandler
from services.teacher.settings import Mode, TeacherSettings
from services.teacher.signals import SignalMaker
from tests.fixtures.judged_log import turn_event
from tests.unit.teacher.test_assembly import FAILED, score_event

HINTS = [{"text": "Too long!", "source": "user"}]
SIGNAL = TeacherSignal(
    logprobs=float32_array([-0.1] * 3), hint="Too long!", hint_source="user", model="frozen", engine="teacher-0"
)


def record_of(event: ScoreEvent | TurnEvent) -> Record:
    out: OutgoingRecord = encode(event, topic="clawstream.any.v1", key="k", event_id="id", source="tests")
    return Record(out.topic, 3, 40, out.key, out.value, out.headers, 0)


class Turns:
    """Holds one turn."""

    def __init__(self, turn: TurnEvent) -> None:
        self._turn = turn
        self.fetched = 0

    def fetch(self, reference: RecordReference) -> "Future[Record]":
        self.fetched += 1
        found: Future[Record] = Future()
        found.set_result(record_of(self._turn))
        return found

    def close(self) -> None:
        pass


class ScriptedSignals:
    """Gives or raises one thing per call, in order; the last one for ever."""

    def __init__(self, *script: Signal | Exception) -> None:
        self._script = list(script)
        self.asked: list[list[str]] = []
        self.closed = False

    async def make(self, turn: TurnEvent, hints: Sequence[Hint]) -> Signal:
        step = self._script[min(len(self.asked), len(self._script) - 1)]
        self.asked.append([hint.text for hint in hints])
        if isinstance(step, Exception):
            raise step
        return step

    async def close(self) -> None:
        self.closed = True


class Setting:
    """A handler with everything around it scripted."""

    def __init__(self, *script: Signal | Exception, turn: TurnEvent | None = None, **settings: Any) -> None:
        self.signals = ScriptedSignals(*script)
        self.turns = Turns(turn or turn_event(1))
        self.metrics = Metrics()
        self.settings = TeacherSettings.model_validate(
            {
                "name": "teacher",
                "mode": "combine",
                "model_path": "model",
                "model": {"urls": ["http://127.0.0.1:1"], "max_timeouts": 3},
                **settings,
            }
        )
        self.handler = TeacherHandler(
            cast("RecordFetcher", self.turns),
            self.settings,
            cast("SignalMaker", self.signals),
            source="teacher/tests",
            clock=ManualClock(),
            metrics=self.metrics,
        )

    async def handle(self, **values: Any) -> Outcome:
        return await self.handler.handle(record_of(score_event(**{"hints": HINTS, **values})))


def sample_of(outcome: Outcome) -> SampleEvent:
    assert isinstance(outcome, Output)
    (record,) = outcome.records
    assert record.value is not None
    sample = decode_value(record.value, SampleEvent, where="a test")
    assert isinstance(sample, SampleEvent)
    return sample


async def test_a_hint_and_a_verdict_make_both_components() -> None:
    setting = Setting(SIGNAL)
    sample = sample_of(await setting.handle())
    assert (sample.reward, sample.teacher) == (-0.5, SIGNAL)
    assert setting.signals.asked == [["Too long!"]]
    assert b'teacher_signals_total{result="signal"} 1.0' in setting.metrics.exposition()
    await setting.handler.close()
    assert setting.signals.closed


async def test_binary_mode_asks_nobody() -> None:
    setting = Setting(SIGNAL, mode="binary")
    sample = sample_of(await setting.handle())
    assert (sample.reward, sample.teacher, setting.signals.asked) == (-0.5, None, [])
    assert await setting.handle(**FAILED) == Skip("failed_score")


async def test_what_can_make_no_sample_reads_no_turn() -> None:
    setting = Setting(SIGNAL)
    assert await setting.handle(hints=[], verdict=0, reward=0.0) == Skip("neutral_without_hint")
    assert await setting.handle(hints=[], **FAILED) == Skip("failed_score")
    # The user's words count only after a complaint: thanks and failures teach nothing by default.
    assert await setting.handle(**FAILED) == Skip("failed_score")
    assert setting.turns.fetched == 0
    assert sample_of(await setting.handle(verdict=1, reward=1.0)).teacher is None
    assert setting.signals.asked == []


async def test_a_turn_that_must_not_be_trained_costs_no_call() -> None:
    setting = Setting(SIGNAL, turn=turn_event(1, trainable=False, untrainable_reason="client_gone"))
    assert await setting.handle() == Skip("untrainable_client_gone")
    assert setting.signals.asked == []


async def test_why_there_is_no_signal_is_counted() -> None:
    setting = Setting(NoSignal("hint_too_long"))
    assert sample_of(await setting.handle()).teacher is None
    assert b'teacher_signals_total{result="hint_too_long"} 1.0' in setting.metrics.exposition()
    opd = Setting(NoSignal("hint_too_long"), mode="opd")
    assert await opd.handle() == Skip("no_signal_hint_too_long")


async def test_an_engine_that_is_away_or_busy_is_waited_for() -> None:
    setting = Setting(EngineUnavailable("down"), EngineBusy("full", retry_after_seconds=7.0), SIGNAL)
    with pytest.raises(EngineUnavailable):
        await setting.handle()
    with pytest.raises(RetryLater) as busy:
        await setting.handle()
    assert busy.value.retry_after_seconds == 7.0
    assert sample_of(await setting.handle()).teacher == SIGNAL


async def test_silence_again_and_again_costs_the_signal_and_not_the_sample() -> None:
    setting = Setting(EngineTimeout("silent"))
    for _ in range(2):
        with pytest.raises(RetryLater):
            await setting.handle()
    sample = sample_of(await setting.handle())
    assert (sample.reward, sample.teacher) == (-0.5, None)
    assert b'teacher_signals_total{result="timeout"} 1.0' in setting.metrics.exposition()


async def test_a_misaligned_answer_is_a_dead_letter_that_names_the_position() -> None:
    outcome = await Setting(EngineProtocolError("engine teacher-0: scored id 5 at token 2, asked for 7")).handle()
    assert isinstance(outcome, DeadLetter)
    assert outcome.reason == "teacher_misaligned"
    assert "at token 2" in str(outcome.error)


async def test_past_the_deadline_the_reward_is_left() -> None:
    setting = Setting(SIGNAL)
    sample = sample_of(await setting.handler.on_deadline(record_of(score_event(hints=HINTS)), 900.0))
    assert (sample.reward, sample.teacher, setting.signals.asked) == (-0.5, None, [])
    opd = Setting(SIGNAL, mode="opd")
    assert await opd.handler.on_deadline(record_of(score_event(hints=HINTS)), 900.0) == Skip("no_signal_timeout")


async def test_only_so_many_scores_are_at_the_engines_at_a_time() -> None:
    setting = Setting(SIGNAL, model={"urls": ["http://127.0.0.1:1"], "max_concurrent_scores": 2})
    now, most, go_on = 0, 0, asyncio.Event()

    async def make(turn: TurnEvent, hints: Sequence[Hint]) -> Signal:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if most == 2:
            go_on.set()
        await go_on.wait()
        now -= 1
        return SIGNAL

    setting.signals.make = make  # type: ignore[method-assign] - scripted
    outcomes = await asyncio.gather(*(setting.handle() for _ in range(5)))
    assert most == 2
    assert all(isinstance(outcome, Output) for outcome in outcomes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_path": None}, "mode 'combine' needs model_path"),
        ({"model": {}}, "mode 'combine' needs model.urls"),
        ({"model": {"computed_by": "trainer", "top_k": 4}}, "optimal selections, top_k and support_k ask an engine"),
        ({"model": {"computed_by": "trainer"}, "hint": {"selection": "token_optimal"}}, "ask an engine"),
    ],
)
def test_a_mode_that_lacks_what_it_needs_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Setting(SIGNAL, **settings)


def test_binary_mode_needs_no_teacher() -> None:
    assert TeacherSettings(name="teacher").mode is Mode.BINARY
