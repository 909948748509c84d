"""Dead letters of every stage on a real Kafka: buried by the stage, sent back by the command, handled at last."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from clawstream import topics
from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import SystemClock
from clawstream.codec import header
from clawstream.errors import DecodeError
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from clawstream.settings import KafkaSettings, ServiceSettings
from clawstream.stages import JUDGE, TEACHER, Stage
from clawstream.worker.handler import Handler
from clawstream.worker.settings import WorkerSettings
from clawstream.worker_process import stage_worker
from schemas.events import NextStateEvent
from schemas.events.base import RecordReference
from schemas.judge_spec import JudgeSpec
from services.judge.active import ActiveJudges
from services.judge.backends.interface import Opinion
from services.judge.calls import ModelCaller, RetryPolicy
from services.judge.handler import JudgeHandler
from services.judge.judging import Judging
from services.judge.ledger import Ledger
from services.judge.ledger_writer import LedgerWriter
from services.teacher.handler import TeacherHandler
from services.teacher.settings import TeacherSettings
from services.trainer.batcher import Batcher, BatchRules
from services.trainer.candidates import CandidateRules
from services.trainer.dead_letters import DeadLetter
from services.trainer.progress import Progress
from services.trainer.reader import SampleReader
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog, next_state_of, turn_event
from tests.fixtures.samples import make_sample, sample_record
from tests.fixtures.service_process import REPOSITORY
from tests.fixtures.turn_ledgers import empty_ledger
from tests.fixtures.workers import eventually

pytestmark = pytest.mark.kafka
COMMAND_SECONDS = 120


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


Clawstream = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def clawstream(broker: str, namespace: str) -> Clawstream:
    """Runs `clawstream ARGUMENTS`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CLAWSTREAM_KAFKA__BOOTSTRAP_SERVERS": broker,
        "CLAWSTREAM_KAFKA__NAMESPACE": namespace,
    }

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "clawstream", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    return run


def json_of(done: "subprocess.CompletedProcess[str]", code: int = 0) -> Any:
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


@asynccontextmanager
async def working(log: JudgedLog, broker: str, stage: Stage, handler: Handler) -> AsyncGenerator[Metrics]:
    settings = ServiceSettings(
        name=f"{stage.name}-0", kafka=KafkaSettings(bootstrap_servers=broker, namespace=log.namespace)
    )
    metrics = Metrics()
    worker = stage_worker(
        log.bus,
        handler,
        stage,
        settings,
        WorkerSettings(shutdown_grace_seconds=1.0),
        metrics=metrics,
        clock=SystemClock(),
        logger=get_logger(),
    )
    running = asyncio.create_task(worker.run())
    try:
        yield metrics
    finally:
        worker.request_stop()
        await running


class OwnJudge:
    """Code with a bug, which is mended later."""

    def __init__(self, *, has_a_bug: bool) -> None:
        self._has_a_bug = has_a_bug

    async def judge(self, next_state: NextStateEvent) -> Opinion:
        if self._has_a_bug and next_state.following_messages[0]["content"] == "boom":
            raise ZeroDivisionError("a bug")
        return Opinion(verdict=1)

    async def close(self) -> None:
        pass


@asynccontextmanager
async def judging(log: JudgedLog, broker: str, judge: OwnJudge) -> AsyncGenerator[Metrics]:
    clock, logger, metrics = SystemClock(), get_logger(), Metrics()
    writer = LedgerWriter(log.bus.producer, flush_timeout_seconds=60.0, on_failure=lambda: None)
    ledger = Ledger(log.bus, writer, namespace=log.namespace, source="judge/tests", logger=logger)
    policy = RetryPolicy(attempts=1, first_delay_seconds=0.01, longest_delay_seconds=0.01)
    caller = ModelCaller(policy, max_concurrent_calls=16, clock=clock, metrics=metrics)
    handler = JudgeHandler(
        ActiveJudges(JudgeSpec(backend="rules"), lambda _: judge, logger=logger),
        Judging(ledger, caller, clock=clock, metrics=metrics),
        ledger,
        namespace=log.namespace,
        source="judge/tests",
        max_timeouts=3,
        logger=logger,
    )
    try:
        async with working(log, broker, JUDGE, handler) as worker_metrics:
            yield worker_metrics
    finally:
        await asyncio.to_thread(writer.close)


def dead(log: JudgedLog, topic: str) -> list[Record]:
    return read_all(log.bus, log.topic(topic))


def without_redrive(record: Record) -> Mapping[str, bytes]:
    return {name: value for name, value in record.headers if not name.startswith("redrive.")}


async def test_the_judges_letters_are_scored_after_the_bug_is_mended(
    log: JudgedLog, broker: str, clawstream: Clawstream
) -> None:
    log.converse({1: "boom", 6: "fine", 2: "boom"})
    async with judging(log, broker, OwnJudge(has_a_bug=True)):
        await eventually(lambda: len(dead(log, topics.JUDGE_DLQ)) == 2 and len(log.scores()) == 1, "buried")

    listed = json_of(await asyncio.to_thread(clawstream, "dlq", "list", "--json"))
    assert [(each["stage"], each["reason"], each["error_type"]) for each in listed] == [
        ("judge", "handler_failed", "ZeroDivisionError")
    ] * 2
    shown = json_of(await asyncio.to_thread(clawstream, "dlq", "show", listed[0]["letter"], "--json"))
    assert json.loads(shown["value"])["following_messages"][0]["content"] == "boom"
    nothing = json_of(await asyncio.to_thread(clawstream, "dlq", "redrive", "--reason", "undecodable", "--json"))
    assert nothing["stages"]["judge"] == {"redriven": [], "already_redriven": [], "refused": []}

    one = json_of(await asyncio.to_thread(clawstream, "dlq", "redrive", listed[0]["letter"], "--json"))
    assert one["stages"] == {"judge": {"redriven": [listed[0]["letter"]], "already_redriven": [], "refused": []}}
    rest = json_of(await asyncio.to_thread(clawstream, "dlq", "redrive", "--all", "--stage", "judge", "--json"))
    assert rest["stages"]["judge"]["redriven"] == [listed[1]["letter"]]
    assert rest["stages"]["judge"]["already_redriven"] == [listed[0]["letter"]]
    async with judging(log, broker, OwnJudge(has_a_bug=False)) as metrics:
        await eventually(lambda: len(log.scores()) == 3, "scored")
        line = b'clawstream_redriven_inputs_total{result="output"} 2.0'
        await eventually(lambda: line in metrics.exposition(), "counted")

    assert sorted(score.turn_id for score in log.scores()) == ["turn-1", "turn-2", "turn-6"]
    records = read_all(log.bus, log.topic(topics.NEXT_STATES))
    again = [record for record in records if header(record.headers, "redrive.count") == "1"]
    assert len(again) == 2
    for record in again:
        (before,) = [each for each in records if each.value == record.value and each is not record]
        assert (record.key, record.partition) == (before.key, before.partition)
        assert without_redrive(record) == dict(before.headers)
    assert json_of(await asyncio.to_thread(clawstream, "dlq", "list", "--json")) == []
    table = await asyncio.to_thread(clawstream, "dlq", "list", "--all")
    assert "handler_failed  0     2" in table.stdout, table.stdout


async def test_the_teachers_letter_becomes_a_sample_once_its_turn_is_there(
    log: JudgedLog, broker: str, clawstream: Clawstream
) -> None:
    log.write_turns([turn_event(6)])
    turn = turn_event(1)
    partition = topics.partition_for(turn.session_id, 12)
    missing = RecordReference(topic=log.topic(topics.TURNS), partition=partition, offset=1)
    log.write_next_states([next_state_of(turn, missing, "thanks")])
    async with judging(log, broker, OwnJudge(has_a_bug=False)):
        await eventually(lambda: len(log.scores()) == 1, "scored")

    def teacher() -> TeacherHandler:
        return TeacherHandler(
            RecordFetcher(log.bus, timeout_seconds=30.0),
            TeacherSettings.model_validate({"name": "teacher", "kafka": {"namespace": log.namespace}}),
            None,
            source="teacher/tests",
            clock=SystemClock(),
            metrics=Metrics(),
        )

    async with working(log, broker, TEACHER, teacher()):
        await eventually(lambda: len(dead(log, topics.TEACHER_DLQ)) == 1, "buried")
    assert log.write_turns([turn]) == [missing]
    done = json_of(await asyncio.to_thread(clawstream, "dlq", "redrive", "--reason", "missing_turn", "--json"))
    assert len(done["stages"]["teacher"]["redriven"]) == 1
    async with working(log, broker, TEACHER, teacher()):
        await eventually(lambda: len(log.samples()) == 1, "a sample")
    assert log.samples()[0].turn_id == "turn-1"


def sample_reader(log: JudgedLog) -> tuple[SampleReader, Batcher]:
    """The trainer's, from the beginning; what it cannot decode goes to its dead letters."""
    batcher = Batcher(BatchRules(4, 1000.0, None), empty_ledger(), current_version=0)

    def bury(record: Record, error: DecodeError) -> DeadLetter:
        now_iso = SystemClock().now().isoformat()
        letter = DeadLetter.of(record, error, process="trainer-0", now_iso=now_iso)
        log.write([letter.outgoing(log.topic(topics.TRAINER_DLQ))])
        return letter

    reader = SampleReader(
        log.bus,
        log.topic(topics.SAMPLES),
        partitions=range(12),
        progress=Progress(lineage="l"),
        batcher=batcher,
        rules=CandidateRules("default", "", 1000, 1000),
        dead_letter=bury,
        now_seconds=0.0,
        blob_patience_seconds=0.0,
        wait=lambda _: pytest.fail("nothing is unreachable here"),
        logger=get_logger(),
    )
    return reader, batcher


def take_all(log: JudgedLog) -> Batcher:
    reader, batcher = sample_reader(log)
    left = len(read_all(log.bus, log.topic(topics.SAMPLES)))
    while left > 0:
        left -= reader.poll(0.1, newest_published=0, now_seconds=0.0)
    reader.close()
    return batcher


def test_the_trainers_letters_come_back_to_their_partition_and_count_on(
    log: JudgedLog, clawstream: Clawstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = sample_record(make_sample("turn-1"), log.namespace)
    log.write([sample, OutgoingRecord(sample.topic, b"turn-2", b"{broken", (), partition=sample.partition)])

    def cannot_read(*_: object, **__: object) -> None:
        raise DecodeError("written by a newer clawstream")

    with monkeypatch.context() as older:
        older.setattr("services.trainer.reader.read_candidate", cannot_read)
        take_all(log)
    listed = json_of(clawstream("dlq", "list", "--json", "--stage", "trainer"))
    assert [each["key"] for each in listed] == ["turn-1", "turn-2"]
    assert {each["reason"] for each in listed} == {"undecodable"}
    done = json_of(clawstream("dlq", "redrive", "--stage", "trainer", "--all", "--json"))
    assert len(done["stages"]["trainer"]["redriven"]) == 2

    # A trainer of today reads everything: both at their first place too, for its checkpoint is empty.
    batcher = take_all(log)
    assert batcher.have == 1
    buried = [record for record in dead(log, topics.TRAINER_DLQ) if header(record.headers, "dlq.topic")]
    broken = [record for record in buried if record.value == b"{broken"]
    assert [header(record.headers, "redrive.count") for record in broken].count("1") == 1
    records = read_all(log.bus, log.topic(topics.SAMPLES))
    assert {record.partition for record in records} == {sample.partition}
    assert [record.value for record in records][:2] == [record.value for record in records][2:]
    refused = clawstream("dlq", "redrive")
    assert refused.returncode == 2
    assert "say which" in refused.stderr
