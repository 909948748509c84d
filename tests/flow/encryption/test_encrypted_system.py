"""The whole system with content encrypted: it learns as ever, the log holds no word, a forgotten session is gone."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clawstream import topics
from clawstream.bus.interface import Record
from clawstream.codec import decode, decode_as, header
from clawstream.encryption.bus import open_bus
from clawstream.encryption.envelope import KEY_HEADER
from clawstream.errors import ForgottenContent
from clawstream.topics import full_name
from schemas.events import EVENT_MODELS, TurnEvent
from tests.fixtures.buses import read_all
from tests.fixtures.service_process import REPOSITORY
from tests.fixtures.system import BAD, GOOD, RunningSystem, wait_for
from tests.flow.encryption.raw_log import RawRecord, read_raw

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1200)]
MASTER_KEY = base64.b64encode(b"m" * 32).decode()
WITH_CONTENT = (topics.TURNS, topics.NEXT_STATES, topics.SCORES, topics.SAMPLES)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's file; encryption comes from the environment, which its processes inherit."""
    monkeypatch.setenv("CLAWSTREAM_KAFKA__ENCRYPTION__SESSIONS", "true")
    monkeypatch.setenv("CLAWSTREAM_MASTER_KEY", MASTER_KEY)
    return tmp_path / "clawstream.toml"


def clawstream(config: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "clawstream", *arguments, "--config", str(config)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def document(config: Path, *arguments: str) -> dict[str, Any]:
    done = clawstream(config, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def opened(system: RunningSystem, topic: str) -> list[Record]:
    """As a process that starts now reads a topic: with the master key, and no memory of any other."""
    bus = open_bus(system.settings.kafka, client_id="tests")
    return read_all(bus, full_name(system.layout.namespace, topic))


def raw(system: RunningSystem) -> list[RawRecord]:
    return read_raw(system.layout.kafka, system.layout.namespace)


def words_found(records: Sequence[RawRecord], words: Sequence[bytes]) -> list[tuple[str, int, int, bytes]]:
    return [
        (record.topic, record.partition, record.offset, each)
        for record in records
        for each in words
        if record.holds(each)
    ]


def test_the_log_holds_no_word_the_policy_learns_and_a_forgotten_session_cannot_be_read(
    config: Path, start_system: Callable[..., RunningSystem]
) -> None:
    system = start_system(batch_size=4)
    responses = [system.converse(number) for number in range(4)]
    wait_for(lambda: system.engine_version() == "1", "version 1 is in service: judge, teacher and trainer can read")

    turns = {event.response_id: event for event in readable_turns(system)}
    words = [b"question ", GOOD.encode(), BAD.encode(), b'"role"']
    arrays = [array for each in responses for array in (turns[each].response_ids, turns[each].response_logprobs)]
    words += [(array.data or "").encode() for array in arrays]
    assert all(len(each) >= 6 for each in words)
    before = raw(system)
    assert {record.topic for record in before} >= {*WITH_CONTENT, topics.SESSION_KEYS, topics.TRAIN_STEPS}
    assert words_found(before, words) == []
    for record in before:
        model = EVENT_MODELS.get((dict(record.headers).get("ce_type") or b"").decode())
        if model is not None and record.value is not None:
            assert (KEY_HEADER in dict(record.headers)) == bool(model.content_fields), record.topic
    assert document(config, "audit")["first_violation"] is None

    # Every process reads its keys again before it goes on.
    for name in ("gateway-0", "judge", "teacher", "trainer"):
        system.kill(name)
    late = [system.converse(number) for number in range(4, 8)]
    wait_for(lambda: system.engine_version() == "2", "version 2 is in service: after a restart, too")

    gone = turns[responses[2]]
    report = document(config, "forget", "--session", gone.session_id, "--yes")
    assert report["session_keys_deleted"] >= 1
    assert report["weight_versions"] == [1, 2]
    assert {topic: kept["encrypted_records"] for topic, kept in report["stays_readable"].items()} == {
        topic: kept["records"] for topic, kept in report["stays_readable"].items()
    }
    after = raw(system)
    held = {record.key for record in after if record.topic == topics.TURNS}
    assert gone.session_id.encode() in held, "the records are still there"
    assert words_found(after, words) == []
    counted = {"forgotten": 0, "others": 0}
    for topic in WITH_CONTENT:
        for record in opened(system, topic):
            if record.value is None:
                continue
            if json.loads(record.value)["session_id"] != gone.session_id:
                decode(record)
                counted["others"] += 1
                continue
            assert header(record.headers, KEY_HEADER)
            with pytest.raises(ForgottenContent):
                decode(record)
            counted["forgotten"] += 1
    assert counted["forgotten"] >= 5, "two turns, their next states, a score; the sample if no compaction came"
    assert counted["others"] >= 7 * 4
    assert document(config, "forget", "--session", gone.session_id, "--yes")["changed"] is False

    assert document(config, "audit")["first_violation"] is None
    trace = clawstream(config, "trace", gone.turn_id)
    assert trace.returncode == 0, trace.stderr
    assert "question" not in trace.stdout
    assert clawstream(config, "report", "drift").returncode == 0
    for name in ("gateway-0", "judge", "teacher"):
        system.kill(name)
    for number in range(8, 12):
        system.converse(number)
    wait_for(lambda: system.engine_version() == "3", "the others go on, past what is forgotten")
    assert document(config, "audit")["first_violation"] is None
    for topic in (topics.JUDGE_DLQ, topics.TEACHER_DLQ, topics.TRAINER_DLQ):
        assert opened(system, topic) == []
    readable = {turn.response_id for turn in readable_turns(system)}
    assert gone.response_id not in readable
    assert {*responses, *late} - readable == {gone.response_id}


def readable_turns(system: RunningSystem) -> list[TurnEvent]:
    records = opened(system, topics.TURNS)
    return [decode_as(record, TurnEvent) for record in records if not isinstance(record.unreadable, ForgottenContent)]
