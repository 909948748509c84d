"""`clawstream export` and `clawstream restore` on a real Kafka: every byte comes back, once."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clawstream import topics
from clawstream.archives.export import export_topics
from clawstream.archives.manifest import read_manifest
from clawstream.archives.parquet_files import read_offsets, read_records
from clawstream.archives.restore import Restorer
from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.clock import SystemClock
from clawstream.errors import ArchiveError
from clawstream.topics import full_name
from tests.fixtures.buses import kafka_bus, read_all
from tests.fixtures.judged_log import JudgedLog
from tests.fixtures.service_process import REPOSITORY

pytestmark = pytest.mark.kafka
COMMAND_SECONDS = 400
YESTERDAY = int(SystemClock().now().timestamp() * 1000) - 86_400_000
TOPICS = (topics.SAMPLES, topics.TURNS)


@pytest.fixture
def log(broker: str, namespace: str) -> JudgedLog:
    made = JudgedLog(kafka_bus(broker, "tests"), namespace)
    made.create_topics()
    return made


@pytest.fixture
def copy(broker: str, namespace: str) -> JudgedLog:
    """Another namespace of the same broker."""
    made = JudgedLog(kafka_bus(broker, "tests"), f"{namespace}-copy")
    made.create_topics()
    return made


Clawstream = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def clawstream(broker: str) -> Clawstream:
    """Runs `clawstream ARGUMENTS` in a namespace."""

    def run(namespace: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "CLAWSTREAM_KAFKA__BOOTSTRAP_SERVERS": broker,
            "CLAWSTREAM_KAFKA__NAMESPACE": namespace,
        }
        return subprocess.run(
            [sys.executable, "-m", "clawstream", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    return run


def fill(log: JudgedLog) -> None:
    """Committed and aborted transactions, tombstones, odd bytes, repeated headers, a large value, old timestamps."""
    samples, turns = (log.topic(topic) for topic in TOPICS)
    producer = log.bus.transactional_producer(f"{log.namespace}.tests")
    for number in range(6):
        producer.begin()
        for part in range(3):
            key = f"key-{number}".encode()
            headers = (("a", b"1"), ("a", bytes([number, 255])), ("empty", b""))
            producer.produce(OutgoingRecord(turns, key, b"\x00\xff" * (number + 1), headers, partition=part))
            value = None if part == 2 else os.urandom(50)
            producer.produce(
                OutgoingRecord(samples, key, value, partition=number, timestamp_milliseconds=YESTERDAY + number)
            )
        producer.flush(30)
        if number % 3 == 2:
            producer.abort()
        else:
            producer.commit()
    producer.close()
    log.write([OutgoingRecord(turns, b"large", os.urandom(2_000_000), partition=1)])


def content(records: Sequence[Record]) -> list[tuple[object, ...]]:
    return [
        (each.topic.partition(".")[2], each.partition, each.key, each.value, each.headers, each.timestamp_milliseconds)
        for each in records
    ]


def records_of(log: JudgedLog) -> list[Record]:
    return [record for topic in TOPICS for record in read_all(log.bus, log.topic(topic))]


def test_an_archive_comes_back_byte_for_byte_and_only_once(
    log: JudgedLog, copy: JudgedLog, clawstream: Clawstream, tmp_path: Path
) -> None:
    fill(log)
    before = records_of(log)
    assert len(before) == 4 * 6 + 1
    archive = tmp_path / "archive"
    chosen = [argument for topic in TOPICS for argument in ("--topic", topic)]
    done = clawstream(log.namespace, "export", "--to", str(archive), *chosen)
    assert done.returncode == 0, done.stderr
    back = clawstream(copy.namespace, "restore", str(archive))
    assert back.returncode == 0, back.stderr
    after = records_of(copy)
    assert content(after) == content(before)

    old = {(each.topic.partition(".")[2], each.partition): [] for each in before}
    for each in before:
        old[each.topic.partition(".")[2], each.partition].append(each.offset)
    for (topic, partition), offsets in old.items():
        places = read_offsets(
            tmp_path / f"archive-offsets-{copy.namespace}" / topic / f"partition-{partition:05d}.parquet"
        )
        new = [each.offset for each in after if each.topic.endswith(topic) and each.partition == partition]
        assert places == dict(zip(offsets, new, strict=True))

    again = clawstream(copy.namespace, "restore", str(archive))
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    assert "--resume" in again.stderr
    resumed = clawstream(copy.namespace, "restore", str(archive), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert content(records_of(copy)) == content(before), "a finished restore has nothing to go on with"
    onto = clawstream(log.namespace, "export", "--to", str(archive))
    assert onto.returncode == 1
    assert "not empty" in onto.stderr


def test_an_interrupted_restore_goes_on_and_a_foreign_or_damaged_one_is_refused(
    log: JudgedLog, copy: JudgedLog, tmp_path: Path
) -> None:
    fill(log)
    before = records_of(log)
    archive = tmp_path / "archive"
    manifest = export_topics(log.bus, log.namespace, TOPICS, archive, SystemClock(), file_bytes=100)
    assert read_manifest(archive) == manifest
    files = [file for topic in manifest.topics for each in topic.partitions for file in each.files]
    assert len(files) > len({(each.topic, each.partition) for each in before}), "a partition may need several files"
    assert sum(file.rows for file in files) == len(before)

    def restorer(*, resume: bool) -> Restorer:
        return Restorer(
            copy.bus,
            copy.namespace,
            archive,
            offsets_directory=tmp_path / "offsets",
            resume=resume,
            now_milliseconds=YESTERDAY,
        )

    partition = next(each for each in manifest.topics[1].partitions if each.partition == 0)
    first = next(read_records(archive / partition.files[0].path, copy.topic(topics.TURNS), 0))
    copy.write(
        [
            OutgoingRecord(
                first.topic,
                first.key,
                first.value,
                first.headers,
                partition=0,
                timestamp_milliseconds=first.timestamp_milliseconds,
            )
        ]
    )
    with pytest.raises(ArchiveError, match="is not empty"):
        restorer(resume=False).run()
    report = restorer(resume=True).run()
    assert report.already == {topics.SAMPLES: 0, topics.TURNS: 1}
    assert content(records_of(copy)) == content(before)

    copy.write([OutgoingRecord(full_name(copy.namespace, topics.TURNS), b"key", b"foreign", partition=0)])
    with pytest.raises(ArchiveError, match="somebody else wrote"):
        restorer(resume=True).run()
    with pytest.raises(ArchiveError, match=r"holds no scores\.v1"):
        restorer(resume=True).run([topics.SCORES])
    damaged = archive / files[0].path
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ArchiveError, match="damaged"):
        restorer(resume=True)
    (archive / "manifest.json").unlink()
    with pytest.raises(ArchiveError, match="no archive"):
        restorer(resume=True)
