"""Topics to Parquet: every committed record up to the end that each partition has when the export begins."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from clawstream.archives.manifest import (
    ArchivedFile,
    ArchivedPartition,
    ArchivedTopic,
    Manifest,
    write_manifest,
)
from clawstream.archives.parquet_files import RecordFile
from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.bus.ranges import read_once, topic_ranges
from clawstream.clock import Clock
from clawstream.durable_files import PARTIAL_PREFIX, sha256_of_file, sync_directory, sync_file
from clawstream.errors import ArchiveError
from clawstream.topics import full_name

DEFAULT_FILE_BYTES: Final = 256 * 1024 * 1024
"""Content of one file, before compression."""


def export_topics(
    bus: Bus,
    namespace: str,
    topics: Sequence[str],
    directory: Path,
    clock: Clock,
    *,
    file_bytes: int = DEFAULT_FILE_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Manifest:
    """Exports `topics` (without namespace) to `directory`, which must be empty or absent.

    `progress` is told offsets passed and offsets in all. Raises ArchiveError, BusError and OSError; what was written
    until then has no manifest and is no archive.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ArchiveError(f"{directory}: not empty; an archive goes into a folder of its own")
    directory.mkdir(parents=True, exist_ok=True)
    exported_at = clock.now()
    ranges = {topic: topic_ranges(bus, [full_name(namespace, topic)]) for topic in topics}
    total = sum(end - first for each in ranges.values() for first, end in each.values())
    passed = 0
    archived: list[ArchivedTopic] = []
    for topic in topics:
        partitions: list[ArchivedPartition] = []
        for partition, (first, end) in sorted(ranges[topic].items()):
            files = _PartitionFiles(directory, topic, partition, file_bytes)
            for record in read_once(bus, {partition: (first, end)}):
                files.append(record)
                progress(passed + record.offset - first, total)
            passed += end - first
            progress(passed, total)
            partitions.append(
                ArchivedPartition(
                    partition=partition.partition, start_offset=first, end_offset=end, files=files.close()
                )
            )
        archived.append(ArchivedTopic(topic=topic, partitions=partitions))
    manifest = Manifest(namespace=namespace, exported_at=exported_at, topics=archived)
    write_manifest(directory, manifest)
    return manifest


class _PartitionFiles:
    """The files of one partition, a new one whenever the last is full."""

    def __init__(self, directory: Path, topic: str, partition: TopicPartition, file_bytes: int) -> None:
        self._directory = directory
        self._folder = directory / topic
        self._folder.mkdir(exist_ok=True)
        self._number = partition.partition
        self._file_bytes = file_bytes
        self._open: RecordFile | None = None
        self._partial = self._folder / f"{PARTIAL_PREFIX}{self._number}.parquet"
        self._first = self._last = 0
        self._done: list[ArchivedFile] = []

    def append(self, record: Record) -> None:
        if self._open is None:
            self._open = RecordFile(self._partial)
            self._first = record.offset
        self._open.append(record)
        self._last = record.offset
        if self._open.content_bytes >= self._file_bytes:
            self._finish()

    def close(self) -> list[ArchivedFile]:
        """The finished files."""
        self._finish()
        return self._done

    def _finish(self) -> None:
        if self._open is None:
            return
        self._open.close()
        final = self._folder / f"partition-{self._number:05d}-offset-{self._first:019d}.parquet"
        sync_file(self._partial)
        self._partial.replace(final)
        sync_directory(self._folder)
        self._done.append(
            ArchivedFile(
                path=str(final.relative_to(self._directory)),
                sha256=sha256_of_file(final),
                rows=self._open.rows,
                first_offset=self._first,
                last_offset=self._last,
            )
        )
        self._open = None
