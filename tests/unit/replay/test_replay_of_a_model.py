"""A replay by a model, in memory: calls that were made before are free, whoever made them."""

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawstream import ids, topics
from clawstream.bus.memory import MemoryBus
from clawstream.clock import SystemClock
from clawstream.codec import encode
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from schemas.events import LlmCallEvent, NextStateEvent, ReplayScoreEvent
from schemas.judge_spec import JudgeSpec
from services.judge.ledger import request_checksum
from services.judge.ledger_writer import LedgerWriter
from services.judge.replay.call_store import CallStore
from services.judge.replay.comparison import compare
from services.judge.replay.ledger import ReplayLedger
from services.judge.replay.planning import make_plan
from services.judge.replay.report import html_report, json_report, tables
from services.judge.replay.run import run_replay
from services.judge.settings import JudgeSettings
from services.judge.specs import completed
from tests.fixtures.judged_log import JudgedLog
from tests.unit.judge.test_judging import ScriptedBackend

NOW = datetime(2026, 3, 1, tzinfo=UTC)
OLD = completed(JudgeSpec(backend="openai", model="m", votes=3))
NEW = completed(JudgeSpec(backend="openai", model="m", votes=5))
INPUTS = 4


@pytest.fixture
def log() -> JudgedLog:
    made = JudgedLog(MemoryBus(), "test")
    made.create_topics()
    return made


def already_called(log: JudgedLog, next_states: list[NextStateEvent]) -> None:
    """What the old spec asked of the same model."""
    backend = ScriptedBackend("")
    events = [
        LlmCallEvent(
            call_id=ids.call_id(each.next_state_id, OLD.spec_hash, "verdict", vote),
            next_state_id=each.next_state_id,
            session_id=each.session_id,
            judge_spec_hash=OLD.spec_hash,
            purpose="verdict",
            vote=vote,
            model="m",
            request_sha256=request_checksum(backend.prepare(each)),
            response={"text": r"\boxed{1}", "finish_reason": "stop"},
            prompt_tokens=7,
            seconds=1.0,
            called_at=NOW,
        )
        for each in next_states
        for vote in range(OLD.votes)
    ]
    topic = log.topic(topics.LLM_CALLS)
    log.write([encode(each, topic=topic, key=each.call_id, event_id=each.call_id, source="tests") for each in events])


async def replay(
    log: JudgedLog, store: CallStore, name: str, backend: ScriptedBackend, folder: Path
) -> tuple[str, int, int]:
    """(replay id, calls paid, calls that were free)."""
    clock = SystemClock()
    plan = make_plan(log.bus, namespace="test", name=name, spec=NEW, baseline_epoch=0, now=clock.now())
    store.catch_up(log.bus, "test", plan.oldest_milliseconds)
    counts = [0, 0]

    def progress(_done: int, _of: int, _handler: object, ledger: object) -> None:
        counts[:] = [ledger.paid, ledger.reused]  # pyright: ignore[reportAttributeAccessIssue] - the replay's own

    is_done = await run_replay(
        plan,
        log.bus,
        store,
        JudgeSettings(name="judge"),
        lambda _: backend,
        worker_name="replay-0",
        stop=threading.Event(),
        clock=clock,
        metrics=Metrics(),
        logger=get_logger(),
        progress=progress,
    )
    assert is_done
    comparison = compare(log.bus, plan, store, folder / f"{name}.sqlite", worst=3)
    assert comparison.inputs_new == INPUTS
    assert comparison.cost_new.calls == 2 * INPUTS
    assert name in html_report(comparison)
    assert NEW.spec_hash.encode() in json_report(comparison)
    assert len(tables(comparison)) == 3
    return plan.replay_id, counts[0], counts[1]


async def test_only_votes_that_nobody_asked_for_are_paid_and_those_once(log: JudgedLog, tmp_path: Path) -> None:
    already_called(log, log.converse(dict.fromkeys(range(INPUTS), "thanks")))
    backend = ScriptedBackend(r"\boxed{-1}")
    store = CallStore(tmp_path / "calls.sqlite")
    first, paid, free = await replay(log, store, "first", backend, tmp_path)
    assert (paid, free, backend.calls) == (2 * INPUTS, 3 * INPUTS, 2 * INPUTS)
    second, paid, free = await replay(log, CallStore(tmp_path / "another.sqlite"), "second", backend, tmp_path)
    assert (paid, free, backend.calls) == (0, 5 * INPUTS, 2 * INPUTS), "the log has the ledger"
    scores = log.events(topics.SCORES_REPLAY, ReplayScoreEvent)
    votes = {
        replay_id: {
            each.next_state_id: [vote.verdict for vote in each.votes] for each in scores if each.replay_id == replay_id
        }
        for replay_id in (first, second)
    }
    assert votes[first] == votes[second]
    assert list(votes[first].values()) == [[1, 1, 1, -1, -1]] * INPUTS
    assert {each.verdict for each in scores} == {1}


FITS, TOO_LARGE = "fine", "x" * 3_000_000


@pytest.mark.parametrize("answers", [[FITS], [TOO_LARGE], [FITS, TOO_LARGE, FITS], [TOO_LARGE, TOO_LARGE]])
async def test_every_answer_is_paid_once_whether_the_log_takes_it_or_not(
    log: JudgedLog, tmp_path: Path, answers: list[str]
) -> None:
    writer = LedgerWriter(log.bus.producer, flush_timeout_seconds=60.0, on_failure=lambda: None)
    store = CallStore(tmp_path / "calls.sqlite")
    ledger = ReplayLedger(log.bus, writer, store, NEW, namespace="test", source="judge/tests", logger=get_logger())
    events = [
        LlmCallEvent(
            call_id=f"call-{number}",
            next_state_id="next",
            session_id="session",
            judge_spec_hash=NEW.spec_hash,
            purpose="verdict",
            vote=number,
            model="m",
            request_sha256="0" * 64,
            response={"text": answer, "finish_reason": "stop"},
            seconds=1.0,
            called_at=NOW,
        )
        for number, answer in enumerate(answers)
    ]
    recorded = await ledger.record(events)
    await asyncio.to_thread(writer.close)
    assert [isinstance(each, LlmCallEvent) and each.response is not None for each in recorded] == [
        answer == FITS for answer in answers
    ]
    assert (ledger.paid, store.costs(NEW.spec_hash).calls) == (len(answers), len(answers))
    store.close()
