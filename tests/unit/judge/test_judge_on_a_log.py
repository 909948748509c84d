"""The judge and the teacher in the real worker, on a log in memory."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from clawstream import topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import SystemClock
from clawstream.codec import header
from clawstream.errors import EngineTimeout, EngineUnavailable
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from clawstream.worker.handler import Handler
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.worker import EosWorker
from schemas.events import LlmCallEvent, NextStateEvent
from schemas.events.base import RecordReference
from schemas.judge_spec import JudgeSpec
from services.judge.active import ActiveJudges
from services.judge.backends.interface import Backend, Opinion
from services.judge.backends.rules import RulesBackend
from services.judge.calls import ModelCaller, RetryPolicy
from services.judge.handler import JudgeHandler
from services.judge.judging import Judging
from services.judge.ledger import Ledger
from services.judge.ledger_writer import LedgerWriter
from services.teacher.handler import TeacherHandler
from services.teacher.settings import TeacherSettings
from services.teacher.signals import SignalMaker
from tests.fixtures.buses import read_all
from tests.fixtures.judged_log import JudgedLog, next_state_of, turn_event
from tests.unit.judge.test_answers import SeveralBackend
from tests.unit.judge.test_judging import ScriptedBackend

RULES = JudgeSpec(backend="rules", rules=[("thanks", 1), ("no", -1)])
MODEL = JudgeSpec(backend="openai", model="m", votes=3)
WORKER = WorkerSettings(retry_initial_seconds=0.01, retry_max_seconds=0.02, shutdown_grace_seconds=0.0)


@pytest.fixture
def log() -> JudgedLog:
    made = JudgedLog(MemoryBus(), "clawstream")
    made.create_topics()
    return made


@asynccontextmanager
async def working(
    log: JudgedLog, handler: Handler, *, reads: str, dead_letters: str, metrics: Metrics, settings: WorkerSettings
) -> AsyncGenerator[None]:
    worker = EosWorker(
        log.bus,
        handler,
        input_topics=[log.topic(reads)],
        dead_letter_topic=log.topic(dead_letters),
        group=f"clawstream.{dead_letters}",
        instance=dead_letters,
        transactional_id=dead_letters,
        settings=settings,
        metrics=metrics,
        clock=SystemClock(),
        logger=get_logger(),
    )
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.request_stop()
        await running


@asynccontextmanager
async def judging(
    log: JudgedLog,
    spec: JudgeSpec,
    backend: Backend,
    *,
    max_timeouts: int = 3,
    max_concurrent_calls: int = 16,
    several_answers: bool = False,
    metrics: Metrics | None = None,
    settings: WorkerSettings = WORKER,
) -> AsyncGenerator[None]:
    """A judge with this backend."""
    metrics = metrics or Metrics()
    clock, logger = SystemClock(), get_logger()
    writer = LedgerWriter(log.bus.producer, flush_timeout_seconds=60.0, on_failure=lambda: None)
    ledger = Ledger(log.bus, writer, namespace="clawstream", source="judge/tests", logger=logger)
    policy = RetryPolicy(attempts=1, first_delay_seconds=0.01, longest_delay_seconds=0.01)
    caller = ModelCaller(
        policy,
        max_concurrent_calls=max_concurrent_calls,
        clock=clock,
        metrics=metrics,
        several_answers=several_answers,
    )
    handler = JudgeHandler(
        ActiveJudges(spec, lambda _: backend, logger=logger),
        Judging(ledger, caller, clock=clock, metrics=metrics),
        ledger,
        namespace="clawstream",
        source="judge/tests",
        max_timeouts=max_timeouts,
        logger=logger,
    )
    try:
        async with working(
            log,
            handler,
            reads=topics.NEXT_STATES,
            dead_letters=topics.JUDGE_DLQ,
            metrics=metrics,
            settings=settings,
        ):
            yield
    finally:
        await asyncio.to_thread(writer.close)
    assert ledger.entry_count == 0, "entries of inputs that are done, or not ours any more, are forgotten"


@asynccontextmanager
async def teaching(
    log: JudgedLog,
    metrics: Metrics | None = None,
    settings: TeacherSettings | None = None,
    signals: SignalMaker | None = None,
) -> AsyncGenerator[None]:
    metrics = metrics or Metrics()
    handler = TeacherHandler(
        RecordFetcher(log.bus, timeout_seconds=60.0),
        settings or TeacherSettings(name="teacher"),
        signals,
        source="teacher/tests",
        clock=SystemClock(),
        metrics=metrics,
    )
    async with working(
        log,
        handler,
        reads=topics.SCORES,
        dead_letters=topics.TEACHER_DLQ,
        metrics=metrics,
        settings=WORKER,
    ):
        yield


async def until(condition: Callable[[], bool]) -> None:
    """Waits for another thread; a test that waits in vain is ended by pytest's timeout."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_every_reply_becomes_one_score_and_one_sample(log: JudgedLog) -> None:
    replies = {number: ("thanks", "no, wrong", "hm")[number % 3] for number in range(30)}
    next_states = log.converse(replies)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(judging(log, RULES, RulesBackend(RULES.rules)))
        await stack.enter_async_context(teaching(log))
        await until(lambda: len(log.scores()) == 30 and len(log.samples()) == 20)
    scores = {score.next_state_id: score for score in log.scores()}
    assert set(scores) == {each.next_state_id for each in next_states}
    rewards = {sample.turn_id: sample.reward for sample in log.samples()}
    assert rewards == {f"turn-{n}": (1.0 if n % 3 == 0 else -1.0) for n in replies if n % 3 != 2}
    for sample in log.samples():
        turn = turn_event(int(sample.turn_id.removeprefix("turn-")))
        assert (sample.response_ids, sample.behaviour_logprobs) == (turn.response_ids, turn.response_logprobs)
    for record in read_all(log.bus, log.topic(topics.SAMPLES)):
        assert record.key is not None
        assert record.partition == topics.partition_for(f"session-{int(record.key.decode()[5:]) % 5}", 12)
        assert (header(record.headers, "traceparent") or "").startswith("00-")


async def test_references_lead_from_the_sample_to_turn_and_next_state(log: JudgedLog) -> None:
    log.converse({1: "thanks"})
    async with judging(log, RULES, RulesBackend(RULES.rules)), teaching(log):
        await until(lambda: len(log.samples()) == 1)
    (sample,) = log.samples()
    (turn,) = read_all(log.bus, log.topic(topics.TURNS))
    (next_state,) = read_all(log.bus, log.topic(topics.NEXT_STATES))
    assert str(sample.turn_ref) == str(turn)
    assert str(sample.next_state_ref) == str(next_state)
    assert sample.revision.next_state_offset == next_state.offset


def counted(metrics: Metrics, result: str, reason: str) -> bool:
    wanted = f'clawstream_worker_inputs_total{{reason="{reason}",result="{result}"}} 1.0'
    return wanted.encode() in metrics.exposition()


async def test_ends_of_sessions_and_untrainable_turns_are_counted_skips(log: JudgedLog) -> None:
    turn = turn_event(1)
    (reference,) = log.write_turns([turn])
    end = next_state_of(turn, reference, "", kind="session_end", following_messages=[])
    side = next_state_of(turn, reference, "thanks", next_state_id="side", turn_trainable=False)
    log.write_next_states([end, side])
    metrics = Metrics()
    async with judging(log, RULES, RulesBackend(RULES.rules), metrics=metrics):
        await until(lambda: counted(metrics, "skip", "session_end") and counted(metrics, "skip", "untrainable_turn"))
    assert log.scores() == []


async def test_what_is_no_next_state_is_a_dead_letter_and_the_partition_goes_on(log: JudgedLog) -> None:
    log.write([OutgoingRecord(log.topic(topics.NEXT_STATES), b"session-1", b"{broken")])
    log.converse({1: "thanks"})
    async with judging(log, RULES, RulesBackend(RULES.rules)):
        await until(lambda: len(log.scores()) == 1)
    (dead,) = read_all(log.bus, log.topic(topics.JUDGE_DLQ))
    assert (dead.key, dead.value) == (b"session-1", b"{broken")


@pytest.mark.parametrize("values", [{"status": "failed"}, {"missing": True}, {"untrainable": True}])
async def test_what_the_teacher_makes_no_sample_of(log: JudgedLog, values: Mapping[str, object]) -> None:
    turn = turn_event(1)
    if "untrainable" in values:
        turn = turn_event(1, trainable=False, untrainable_reason="client_gone")
    (reference,) = log.write_turns([turn])
    if "missing" in values:
        reference = RecordReference(topic=reference.topic, partition=reference.partition, offset=999)
    state = next_state_of(turn, reference, "hm" if "status" in values else "thanks", turn_trainable=True)
    log.write_next_states([state])
    metrics = Metrics()
    async with judging(log, RULES, RulesBackend(RULES.rules)), teaching(log, metrics):
        if "missing" in values:
            await until(lambda: len(read_all(log.bus, log.topic(topics.TEACHER_DLQ))) == 1)
        else:
            reason = "failed_score" if "status" in values else "untrainable_client_gone"
            await until(lambda: counted(metrics, "skip", reason))
    assert log.samples() == []
    if "missing" in values:
        (dead,) = read_all(log.bus, log.topic(topics.TEACHER_DLQ))
        assert header(dead.headers, "dlq.reason") == "missing_turn"
        assert "turn-1" in (header(dead.headers, "dlq.error.message") or "")


async def test_a_reference_to_another_turn_is_a_dead_letter(log: JudgedLog) -> None:
    first, second = turn_event(1), turn_event(6)
    (_, wrong) = log.write_turns([first, second])
    log.write_next_states([next_state_of(first, wrong, "thanks")])
    async with judging(log, RULES, RulesBackend(RULES.rules)), teaching(log):
        await until(lambda: len(read_all(log.bus, log.topic(topics.TEACHER_DLQ))) == 1)
    assert log.samples() == []


async def test_explicit_feedback_after_a_reply_gives_a_higher_revision(log: JudgedLog) -> None:
    turn = turn_event(1)
    (reference,) = log.write_turns([turn])
    feedback = {"feedback_id": "f", "score": -0.75, "text": "Shorter!"}
    explicit = next_state_of(
        turn, reference, "", next_state_id="explicit", kind="feedback", following_messages=[], feedback=feedback
    )
    later = next_state_of(turn, reference, "thanks", next_state_id="later")
    log.write_next_states([next_state_of(turn, reference, "thanks"), explicit, later])
    async with judging(log, RULES, RulesBackend(RULES.rules)), teaching(log):
        await until(lambda: len(log.samples()) == 3)
    best = max(log.samples(), key=lambda sample: sample.revision.order)
    assert best.reward == -0.75
    assert best.revision.explicit


async def test_an_outage_of_the_model_is_waited_out_in_order_and_pays_once(log: JudgedLog) -> None:
    backend = ScriptedBackend(r"\boxed{1}", r"\boxed{1}", *[EngineUnavailable("down")] * 7, r"\boxed{1}")
    log.converse({1: "thanks", 6: "thanks"})
    async with judging(log, MODEL, backend):
        await until(lambda: len(log.scores()) == 2)
    assert [score.turn_id for score in log.scores()] == ["turn-1", "turn-6"]
    calls = log.events(topics.LLM_CALLS, LlmCallEvent)
    assert len({call.call_id for call in calls}) == len(calls) == 6
    assert backend.calls == 6 + 7
    assert read_all(log.bus, log.topic(topics.JUDGE_DLQ)) == []


async def test_a_model_that_never_answers_ends_as_a_failed_score(log: JudgedLog) -> None:
    backend = ScriptedBackend(EngineTimeout("silent"))
    log.converse({1: "thanks"})
    async with judging(log, MODEL, backend, max_timeouts=3):
        await until(lambda: len(log.scores()) == 1)
    (score,) = log.scores()
    assert [vote.abstention for vote in score.votes] == ["timeout"] * 3
    assert backend.calls == 3 * 3


class HangingBackend(ScriptedBackend):
    """The first two votes are answered, everything later hangs."""

    async def call(self, request, answers=1):  # type: ignore[no-untyped-def] - as the base class
        if self.calls >= 2:
            self.calls += 1
            await asyncio.Event().wait()
        return await super().call(request, answers)


async def test_at_the_deadline_the_votes_that_arrived_count(log: JudgedLog) -> None:
    log.converse({1: "thanks"})
    settings = WORKER.model_copy(update={"deadline_seconds": 2.0})
    async with judging(log, MODEL, HangingBackend(r"\boxed{1}"), settings=settings):
        await until(lambda: len(log.scores()) == 1)
    (score,) = log.scores()
    assert [vote.verdict for vote in score.votes] == [1, 1, None]
    assert (score.verdict, score.votes[2].abstention) == (1, "timeout")


class SlowBackend(ScriptedBackend):
    """Answers after a while."""

    async def call(self, request, answers=1):  # type: ignore[no-untyped-def] - as the base class
        await asyncio.sleep(0.05)
        return await super().call(request, answers)


async def test_a_backlog_at_a_slow_model_makes_late_scores_and_no_failed_ones(log: JudgedLog) -> None:
    log.converse(dict.fromkeys(range(20), "thanks"))
    settings = WORKER.model_copy(update={"deadline_seconds": 1.5})
    # All begin together, and one call follows the other: the last input waits twice its deadline.
    async with judging(log, MODEL, SlowBackend(r"\boxed{1}"), settings=settings, max_concurrent_calls=1):
        await until(lambda: len(log.scores()) == 20)
    assert [[vote.verdict for vote in score.votes] for score in log.scores()] == [[1, 1, 1]] * 20


async def test_an_answer_too_large_for_the_ledger_makes_one_vote_abstain(log: JudgedLog) -> None:
    log.converse({1: "thanks", 6: "thanks"})
    backend = ScriptedBackend(r"\boxed{1}", "x" * 3_000_000 + r"\boxed{1}", r"\boxed{1}")
    async with judging(log, MODEL, backend):
        await until(lambda: len(log.scores()) == 2)
    votes = [vote for score in log.scores() for vote in score.votes]
    assert sorted(str(vote.abstention) for vote in votes) == ["None"] * 5 + ["error"]
    assert all(score.verdict == 1 for score in log.scores())
    assert read_all(log.bus, log.topic(topics.JUDGE_DLQ)) == []


async def test_a_crash_between_call_and_commit_does_not_repeat_the_call(log: JudgedLog) -> None:
    log.converse(dict.fromkeys(range(10), "thanks"))
    hanging = HangingBackend(r"\boxed{-1}")

    def two_calls_are_on_the_log() -> bool:
        return len(log.events(topics.LLM_CALLS, LlmCallEvent)) == 2

    async with judging(log, MODEL, hanging):
        await until(two_calls_are_on_the_log)
    assert log.scores() == []

    backend, metrics = ScriptedBackend(r"\boxed{-1}"), Metrics()
    async with judging(log, MODEL, backend, metrics=metrics):
        await until(lambda: len(log.scores()) == 10)
    assert backend.calls == 30 - 2
    assert b"clawstream_ledger_hits_total 2.0" in metrics.exposition()
    calls = log.events(topics.LLM_CALLS, LlmCallEvent)
    assert len({call.call_id for call in calls}) == len(calls) == 30


async def test_a_crash_between_several_answers_and_commit_repeats_the_missing_votes_alone(log: JudgedLog) -> None:
    log.converse({1: "thanks"})
    hanging = HangingBackend(r"\boxed{-1}")
    async with judging(log, MODEL, hanging):
        await until(lambda: len(log.events(topics.LLM_CALLS, LlmCallEvent)) == 2)
    several = SeveralBackend([r"\boxed{1}"] * 3)
    async with judging(log, MODEL, several, several_answers=True):
        await until(lambda: len(log.scores()) == 1)
    assert several.asked == [1]
    assert [vote.verdict for vote in log.scores()[0].votes] == [-1, -1, 1]
    log.converse({6: "thanks"})
    async with judging(log, MODEL, several, several_answers=True):
        await until(lambda: len(log.scores()) == 2)
    assert several.asked == [1, 3]
    calls = log.events(topics.LLM_CALLS, LlmCallEvent)
    assert len({call.call_id for call in calls}) == len(calls) == 6


class StrangeJudge:
    """Code that fails for one text."""

    async def judge(self, next_state: NextStateEvent) -> Opinion:
        if next_state.following_messages[0]["content"] == "boom":
            raise ZeroDivisionError("a bug")
        return Opinion(verdict=1)

    async def close(self) -> None:
        pass


async def test_a_bug_in_a_judge_of_your_own_costs_one_record(log: JudgedLog) -> None:
    log.converse({1: "boom", 6: "fine"})
    async with judging(log, RULES, StrangeJudge()):
        await until(lambda: len(log.scores()) == 1)
    (dead,) = read_all(log.bus, log.topic(topics.JUDGE_DLQ))
    assert header(dead.headers, "dlq.error.type") == "ZeroDivisionError"
