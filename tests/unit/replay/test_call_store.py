"""What was paid for is found again, under another spec too, and survives the process."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from clawstream import ids, topics
from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.memory import MemoryBus
from clawstream.codec import encode
from schemas.events import LlmCallEvent
from services.judge.replay.call_store import CallStore
from tests.fixtures.judged_log import JudgedLog

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def call(vote: int, *, spec: str = "old", request: str = "a", model: str = "m", minutes: int = 0) -> LlmCallEvent:
    return LlmCallEvent(
        call_id=ids.call_id("n", spec, "verdict", vote),
        next_state_id="n",
        session_id="s",
        judge_spec_hash=spec,
        purpose="verdict",
        vote=vote,
        model=model,
        request_sha256=request * 64,
        response=f"{spec}-{vote}",
        prompt_tokens=10,
        completion_tokens=2,
        seconds=0.5,
        called_at=NOW + timedelta(minutes=minutes),
    )


def record(event: LlmCallEvent, topic: str) -> OutgoingRecord:
    return encode(event, topic=topic, key=event.call_id, event_id=event.call_id, source="tests")


@pytest.fixture
def log() -> JudgedLog:
    made = JudgedLog(MemoryBus(), "test")
    made.create_topics()
    return made


def test_the_fold_goes_on_where_it_was_and_costs_are_told_by_spec(log: JudgedLog, tmp_path: Path) -> None:
    topic = log.topic(topics.LLM_CALLS)
    log.write([record(call(0), topic), record(call(1), topic), OutgoingRecord(topic, b"broken", b"{")])
    store = CallStore(tmp_path / "calls.sqlite")
    assert store.catch_up(log.bus, "test", None) == 2
    store.close()
    log.write([record(call(2, minutes=5), topic)])
    store = CallStore(tmp_path / "calls.sqlite")
    assert store.catch_up(log.bus, "test", None) == 1, "only what is new is read"
    assert store.catch_up(log.bus, "test", None) == 0
    costs = store.costs("old")
    assert (costs.calls, costs.prompt_tokens, costs.completion_tokens, costs.seconds) == (3, 30, 6, 1.5)
    assert store.costs("old", (NOW + timedelta(minutes=1)).timestamp()).calls == 1
    assert store.costs("new").calls == 0


def test_another_spec_finds_the_same_request_to_the_same_model_only(tmp_path: Path) -> None:
    store = CallStore(tmp_path / "calls.sqlite")
    store.add([call(0), call(1)])

    def same(vote: int, **values: str) -> str | None:
        wanted = {"next_state_id": "n", "purpose": "verdict", "model": "m", "request_sha256": "a" * 64, **values}
        found = store.find_same(vote=vote, **wanted)
        return None if found is None else str(found.response)

    assert (same(0), same(1), same(2)) == ("old-0", "old-1", None)
    assert same(0, model="other") is None
    assert same(0, request_sha256="b" * 64) is None
    assert same(0, purpose="hint") is None
    assert same(0, next_state_id="other") is None
    found = store.find(ids.call_id("n", "old", "verdict", 1), "a" * 64)
    assert found == call(1)
    assert store.find(ids.call_id("n", "old", "verdict", 1), "b" * 64) is None
