"""`clawstream forget` on a real Kafka: what is removed, what is refused, what stays and is said to stay."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from clawstream import topics
from clawstream.blobs import BlobReader
from clawstream.bus.fold import latest_by_key
from clawstream.bus.interface import Record
from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.clock import SystemClock
from clawstream.codec import encode
from clawstream.errors import BlobError
from clawstream.forgetting.forget import read_forgotten
from clawstream.log import get_logger
from clawstream.metrics import Metrics
from clawstream.worker.outcomes import Output, Skip
from schemas.events import ScoreEvent
from schemas.events.forgotten import ForgottenKind
from schemas.events.score import ScoreStatus
from schemas.events.train_step import DropReason
from services.gateway.index_follower import IndexFollower
from services.gateway.turn_index import TurnIndex
from services.gateway.turn_index_store import TurnIndexStore
from services.teacher.handler import TeacherHandler
from services.teacher.settings import TeacherSettings
from services.trainer.batch_archive import read_batch
from services.trainer.batcher import Batcher, BatchRules
from services.trainer.candidates import CandidateRules, read_candidate
from services.trainer.progress import Progress
from services.trainer.reader import SampleReader
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import NOW
from tests.fixtures.remembered_log import RememberedLog
from tests.fixtures.samples import make_sample, sample_record
from tests.fixtures.service_process import REPOSITORY
from tests.fixtures.turn_ledgers import empty_ledger
from tests.fixtures.workers import eventually

pytestmark = pytest.mark.kafka
COMMAND_SECONDS = 400
SCORE = {"next_state_id": "n", "score_id": "s", "judge_spec_hash": "spec", "reward": 1.0, "verdict": 1}


@pytest.fixture
def log(broker: str, namespace: str, tmp_path: Path) -> RememberedLog:
    return RememberedLog(kafka_bus(broker, "tests"), namespace, tmp_path)


Forget = Callable[..., dict[str, Any]]


@pytest.fixture
def forget(broker: str, namespace: str) -> Forget:
    """Runs `clawstream forget ARGUMENTS --json`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CLAWSTREAM_KAFKA__BOOTSTRAP_SERVERS": broker,
        "CLAWSTREAM_KAFKA__NAMESPACE": namespace,
    }

    def run(*arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "clawstream", "forget", *arguments, "--json"],
            capture_output=True,
            text=True,
            env=environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def live(log: RememberedLog, topic: str) -> set[str]:
    return {key.decode() for key in latest_by_key(read_all(log.bus, log.log.topic(topic)))}


async def test_a_session_is_forgotten_once_and_everywhere(
    log: RememberedLog, forget: Forget, tmp_path: Path, namespace: str
) -> None:
    gone = [log.converse(1, "secret", "alice", prompt_fill=7), log.converse(2, "secret", "alice", prompt_fill=8)]
    stays = [log.converse(3, "other", "alice", prompt_fill=8), log.converse(4, "bobs", "bob")]
    first = log.train(1, [gone[0], stays[0]], 0, 1)
    log.train(2, [stays[1]], 1, 2)
    before = {topic: live(log, topic) for topic in (topics.SAMPLES, topics.TURN_INDEX, topics.LLM_CALLS)}
    store = TurnIndexStore(tmp_path / "index.sqlite", cache_bytes=1 << 20)
    index = TurnIndex(store)
    follower = IndexFollower(
        bus=log.bus,
        topic=log.log.topic(topics.TURN_INDEX),
        source="gateway/tests",
        store=store,
        index=index,
        retention=timedelta(days=10_000),
        clock=SystemClock(),
        logger=get_logger(),
    )
    follower.start()
    await eventually(lambda: store.count() == 4, "indexed")

    shown = forget("--session", "secret")
    assert (shown["dry_run"], shown["changed"], shown["turns"], shown["request"]) == (True, False, 2, None)
    assert shown["live_keys"] == {"llm-calls.v1": 2, "samples.v1": 2, "turn-index.v1": 2}
    assert (shown["blobs"], shown["blobs_shared"]) == (1, 1)
    assert {topic: live(log, topic) for topic in before} == before, "a dry run changes nothing"

    done = forget("--session", "secret", "--yes", "--batches", "rewrite")
    assert done["tombstones_written"] == {"llm-calls.v1": 2, "samples.v1": 2, "turn-index.v1": 2}
    assert live(log, topics.SAMPLES) == {"turn-3", "turn-4"}
    assert {key.rpartition("/")[2] for key in live(log, topics.TURN_INDEX)} == {"turn-3", "turn-4"}
    assert len(live(log, topics.LLM_CALLS)) == 2
    await eventually(lambda: store.count() == 2, "the gateway's index forgets")
    assert index.by_response("alice", "chatcmpl-1") is None
    assert index.by_response("alice", "chatcmpl-3") is not None
    follower.stop()
    store.close()

    alone, shared = log.blobs["turn-1"].blob, log.blobs["turn-3"].blob
    assert alone is not None
    assert shared is not None
    with pytest.raises(BlobError):
        BlobReader().read(alone)
    assert BlobReader().read(shared), "a blob that another turn names stays"
    assert done["weight_versions"] == [1, 2], "version 2 descends from version 1, which learned from it"
    assert {topic: kept["records"] for topic, kept in done["stays_readable"].items()} == {
        "next-states.v1": 2,
        "turns.v1": 2,
    }
    assert len(read_all(log.bus, log.log.topic(topics.TURNS))) == 4, "and so they do"
    (batch,) = done["request"]["batches"]
    assert (batch["step"], batch["fate"], batch["sha256"]) == (1, "rewritten", first.batch_sha256)
    (archive,) = (log.directory / "batches").glob("*/step-00000001.safetensors")
    left = read_batch(archive, batch["new_sha256"])
    assert [sample.sample_id for sample in left] == [first.samples[1].sample_id]

    written = len(read_all(log.bus, log.log.topic(topics.FORGOTTEN)))
    again = forget("--session", "secret", "--yes", "--batches", "rewrite")
    assert (again["changed"], again["tombstones_written"], again["blobs_removed"]) == (False, {}, 0)
    assert again["request"] == done["request"]
    assert len(read_all(log.bus, log.log.topic(topics.FORGOTTEN))) == written, "nothing was left to do"

    # What comes after is refused by teacher and trainer; the session's own partition goes on for others.
    forgotten = read_forgotten(log.bus, namespace)
    late = make_sample("turn-1", session_id="secret", revision=(1, False, 9))
    log.log.write([sample_record(late, namespace)])
    batcher = Batcher(BatchRules(4, 1000.0, None), empty_ledger(), current_version=0)
    reader = SampleReader(
        log.bus,
        log.log.topic(topics.SAMPLES),
        partitions=range(12),
        progress=Progress(lineage="l"),
        batcher=batcher,
        rules=CandidateRules("default", "", 1000, 1_000_000, forgotten=forgotten),
        dead_letter=lambda _, error: pytest.fail(str(error)),
        now_seconds=0.0,
        blob_patience_seconds=0.0,
        wait=lambda _: pytest.fail("nothing is unreachable here"),
        logger=get_logger(),
    )
    read = 0
    while read < 7:
        read += reader.poll(0.1, newest_published=0, now_seconds=0.0)
    reader.close()
    assert {candidate.turn_id for candidate in batcher.waiting()} == {"turn-3", "turn-4"}
    assert set(batcher.drop_counts) == {DropReason.TOMBSTONE.value}


async def test_a_principal_is_forgotten_up_to_now(
    log: RememberedLog, forget: Forget, namespace: str, broker: str
) -> None:
    log.converse(1, "one", "alice")
    log.converse(2, "two", "alice")
    log.converse(3, "bobs", "bob")
    done = forget("--user", "alice", "--yes")
    assert done["tombstones_written"] == {"llm-calls.v1": 2, "samples.v1": 2, "turn-index.v1": 2}
    assert live(log, topics.SAMPLES) == {"turn-3"}
    log.converse(4, "one", "alice")
    forgotten = read_forgotten(log.bus, namespace)
    assert forgotten.get(ForgottenKind.PRINCIPAL, "alice") is not None
    settings = TeacherSettings.model_validate(
        {"name": "tests", "kafka": {"bootstrap_servers": broker, "namespace": namespace}}
    )
    teacher = TeacherHandler(
        RecordFetcher(log.bus, timeout_seconds=30.0),
        settings,
        None,
        source="teacher/tests",
        clock=SystemClock(),
        metrics=Metrics(),
        forgotten=forgotten,
    )
    outcomes: dict[str, object] = {}
    for number, session in ((1, "one"), (4, "one")):
        reference = log.references[f"turn-{number}"]
        score = ScoreEvent.model_validate(
            {
                **SCORE,
                "turn_id": f"turn-{number}",
                "turn_ref": reference,
                "next_state_ref": reference,
                "session_id": session,
                "principal": "alice",
                "status": ScoreStatus.SCORED,
                "votes": [],
                "judged_at": NOW,
            }
        )
        record = read_record(log, score)
        outcomes[f"turn-{number}"] = await teacher.handle(record)
    await teacher.close()
    assert outcomes["turn-1"] == Skip("forgotten")
    assert isinstance(outcomes["turn-4"], Output), "what was said afterwards counts"
    sample = next(each for each in read_all(log.bus, log.log.topic(topics.SAMPLES)) if each.key == b"turn-4")
    rules = CandidateRules("default", "", 1000, 1000, forgotten=forgotten)
    assert type(read_candidate(sample, rules, newest_published=0)).__name__ == "Candidate"
    later = forget("--user", "alice", "--yes")
    assert (later["changed"], later["tombstones_written"]) == (
        True,
        {"llm-calls.v1": 1, "samples.v1": 1, "turn-index.v1": 1},
    )


def read_record(log: RememberedLog, score: ScoreEvent) -> Record:
    log.log.write(
        [encode(score, topic=log.log.topic(topics.SCORES), key=score.session_id, event_id="s", source="tests")]
    )
    return read_all(log.bus, log.log.topic(topics.SCORES))[-1]
