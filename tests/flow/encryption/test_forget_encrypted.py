"""Forgetting encrypted content on a real Kafka: samples, ledger, blobs, archives, and the key itself."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from clawstream import topics
from clawstream.archives.export import export_topics
from clawstream.archives.restore import Restorer
from clawstream.blobs import BlobReader
from clawstream.bus.interface import Record
from clawstream.clock import SystemClock
from clawstream.codec import decode, decode_as
from clawstream.encryption.bus import open_bus
from clawstream.encryption.session_keys import session_prefix
from clawstream.errors import BlobError, ForgottenContent
from clawstream.forgetting.batches import BatchTreatment
from clawstream.forgetting.forget import Forgetting
from clawstream.forgetting.survey import Subject
from clawstream.settings import EncryptionSettings, KafkaSettings
from clawstream.topics import full_name
from schemas.arrays import MAX_INLINE_BYTES
from schemas.events import SampleEvent, TurnEvent
from schemas.events.forgotten import ForgottenKind
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.candidates import CandidateRules, read_candidate
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.remembered_log import RememberedLog
from tests.fixtures.system import wait_for
from tests.flow.encryption.raw_log import read_raw

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
CONTENT_TOPICS = (topics.TURNS, topics.NEXT_STATES, topics.SAMPLES, topics.LLM_CALLS)


@pytest.fixture
def settings(broker: str, namespace: str) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=broker, namespace=namespace, encryption=EncryptionSettings(sessions=True))


@pytest.fixture
def log(settings: KafkaSettings, tmp_path: Path) -> RememberedLog:
    return RememberedLog(
        open_bus(settings, client_id="tests", renews_keys=True), settings.namespace, tmp_path, encrypts_blobs=True
    )


def forget(settings: KafkaSettings, kind: ForgottenKind, name: str) -> int:
    """Returns how many keys were deleted."""
    forgetting = Forgetting(kafka_bus(settings.bootstrap_servers, "forget"), settings.namespace, SystemClock())
    return forgetting.run(Subject(kind, name), BatchTreatment.KEEP).session_keys_deleted


def opened(settings: KafkaSettings, topic: str) -> list[Record]:
    """As a process reads a topic that starts now."""
    return read_all(open_bus(settings, client_id="late"), full_name(settings.namespace, topic))


def sessions_that_can_be_read(settings: KafkaSettings) -> dict[str, set[str]]:
    readable: dict[str, set[str]] = {}
    for topic in CONTENT_TOPICS:
        readable[topic] = set()
        for record in opened(settings, topic):
            try:
                event = decode(record) if record.value is not None else None
            except ForgottenContent:
                continue
            if event is not None:
                readable[topic].add(event.session_id)  # pyright: ignore[reportAttributeAccessIssue]
    return readable


def test_a_sessions_records_and_blobs_are_unreadable_and_the_others_are_not(
    log: RememberedLog, settings: KafkaSettings, tmp_path: Path
) -> None:
    gone = log.converse(1, "secret", "alice", prompt_fill=7)
    stays = log.converse(2, "other", "alice", prompt_fill=7)
    fill = np.full(64, 7, np.int32).tobytes()
    blobs = [file for file in (tmp_path / "blobs").rglob("*") if file.is_file()]
    assert len(blobs) == 2, "equal content is not stored as one: the other's key would open it"
    assert all(fill not in file.read_bytes() for file in blobs)
    assert all(len(file.read_bytes()) > MAX_INLINE_BYTES for file in blobs)
    raw = read_raw(settings.bootstrap_servers, settings.namespace)
    assert [each for each in raw if each.holds(b"secret reply") or each.holds(b"Question")] == []
    assert sessions_that_can_be_read(settings) == {topic: {"secret", "other"} for topic in CONTENT_TOPICS}

    kept = shutil.copytree(tmp_path / "blobs", tmp_path / "copy-of-blobs")
    assert forget(settings, ForgottenKind.SESSION, "secret") == 2, "the session's, and that of its paid calls"
    assert sessions_that_can_be_read(settings) == {topic: {"other"} for topic in CONTENT_TOPICS}
    lost = gone.prompt_ids.blob
    assert lost is not None
    with pytest.raises(BlobError):
        BlobReader().read(lost)
    for record in read_raw(settings.bootstrap_servers, settings.namespace):
        assert not record.holds(lost.encryption_key.encode()), "what opens a copy of the blob is on no log"
    assert len([file for file in kept.rglob("*") if file.is_file()]) == 2
    (turn,) = [decode_as(record, TurnEvent) for record in opened(settings, topics.TURNS) if record.unreadable is None]
    assert turn.turn_id == stays.turn_id
    assert set(BlobReader().resolve(turn.prompt_ids).tolist()) == {7}


def test_the_trainer_drops_a_sample_that_it_can_read_no_more(log: RememberedLog, settings: KafkaSettings) -> None:
    log.converse(1, "secret", "alice")
    (before,) = opened(settings, topics.SAMPLES)
    assert decode_as(before, SampleEvent).session_id == "secret"
    forget(settings, ForgottenKind.SESSION, "secret")
    record = next(each for each in opened(settings, topics.SAMPLES) if each.value is not None)
    dropped = read_candidate(record, CandidateRules("default", "", 1000, 1000), newest_published=0)
    assert isinstance(dropped, DroppedSample)
    assert (dropped.reason, dropped.turn_id) == (DropReason.TOMBSTONE, "turn-1")


def test_a_principal_is_forgotten_and_who_goes_on_talking_is_recorded_again(
    log: RememberedLog, settings: KafkaSettings
) -> None:
    log.converse(1, "shared", "alice")
    log.converse(2, "shared", "bob")
    assert forget(settings, ForgottenKind.PRINCIPAL, "alice") == 2
    readable = {each.principal for each in _turns(settings)}
    assert readable == {"bob"}, "who chose the same name for a session keeps his"
    wait_for(lambda: _converse_again(log, settings), "a gateway has read that the key is deleted, and makes another")
    assert forget(settings, ForgottenKind.PRINCIPAL, "alice") == 2
    assert {each.principal for each in _turns(settings)} == {"bob"}


def _converse_again(log: RememberedLog, settings: KafkaSettings) -> bool:
    log.converse(3, "shared", "alice")
    return any(each.principal == "alice" for each in _turns(settings))


def _turns(settings: KafkaSettings) -> list[TurnEvent]:
    return [decode_as(each, TurnEvent) for each in opened(settings, topics.TURNS) if each.unreadable is None]


def test_an_archive_holds_no_keys_and_forgets_with_the_log(
    log: RememberedLog, settings: KafkaSettings, tmp_path: Path
) -> None:
    log.converse(1, "secret", "alice")
    log.converse(2, "other", "bob")
    plain = kafka_bus(settings.bootstrap_servers, "archive")
    directory = tmp_path / "archive"
    export_topics(plain, settings.namespace, [topics.TURNS], directory, SystemClock())
    assert b"Question" not in b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())
    forget(settings, ForgottenKind.SESSION, "secret")
    Restorer(
        plain,
        settings.namespace,
        directory,
        offsets_directory=tmp_path / "offsets",
        append=True,
        new_timestamps=True,
        now_milliseconds=0,
    ).run()
    assert [each.session_id for each in _turns(settings)] == ["other", "other"]


def test_the_key_itself_leaves_the_log_when_the_broker_compacts(log: RememberedLog, settings: KafkaSettings) -> None:
    log.converse(1, "secret", "alice")
    log.converse(2, "other", "bob")
    admin = kafka_bus(settings.bootstrap_servers, "tests").admin()
    admin.alter_topic_config(
        full_name(settings.namespace, topics.SESSION_KEYS),
        {"segment.ms": "100", "max.compaction.lag.ms": "100", "delete.retention.ms": "0"},
    )
    admin.close()
    forget(settings, ForgottenKind.SESSION, "secret")

    def gone() -> bool:
        # A segment is rolled when something is written after its time: other sessions go on.
        log.converse(3, f"later-{_count(settings)}", "bob")
        return len(_keys_with_value(settings, "secret")) == 0

    assert len(_keys_with_value(settings, "other")) == 2
    wait_for(gone, "the cleaner came")
    assert len(_keys_with_value(settings, "other")) == 2


def _keys_with_value(settings: KafkaSettings, session_id: str) -> list[bytes]:
    prefix = session_prefix(session_id).encode()
    return [
        each.value
        for each in read_raw(settings.bootstrap_servers, settings.namespace)
        if each.topic == topics.SESSION_KEYS and each.value is not None and (each.key or b"").startswith(prefix)
    ]


def _count(settings: KafkaSettings) -> int:
    return len(read_raw(settings.bootstrap_servers, settings.namespace))
