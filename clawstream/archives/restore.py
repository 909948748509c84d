"""An archive back to topics: the same keys, partitions, headers, values and timestamps, in the same order.

Offsets are the log's to give, so they are new, whether a topic was empty or not. The restore writes down where every
record went, and translates what refers to records by offset (references.py); so topics come in the order in which they
refer to each other. Everything else holds as it is: ids, keys, compaction, the order of a session.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clawstream.archives.manifest import ArchivedPartition, ArchivedTopic, read_manifest, verify_files
from clawstream.archives.parquet_files import OffsetFile, read_offsets, read_records
from clawstream.archives.references import TRANSLATED_TO, Places, Translator, in_order
from clawstream.archives.restored_keys import ArchivedKeys, names_master_key
from clawstream.bus.interface import Bus, Delivery, OutgoingRecord, Producer, Record, TopicPartition
from clawstream.bus.ranges import read_once, topic_ranges
from clawstream.encryption.master_key import MasterKeys
from clawstream.encryption.rotation import read_keys
from clawstream.errors import ArchiveError
from clawstream.topics import SESSION_KEYS, full_name, topic_definitions

_FLUSH_EVERY_RECORDS: Final = 2000
_FLUSH_SECONDS: Final = 60.0


@dataclass(slots=True)
class RestoreReport:
    """What a restore did."""

    written: dict[str, int] = field(default_factory=dict[str, int])
    """Topic to records that this run wrote."""
    already: dict[str, int] = field(default_factory=dict[str, int])
    """Topic to records that an interrupted run had written."""
    dangling: int = 0
    """References to records that are not in the archive: they lead nowhere now."""
    expired: int = 0
    """Records written with a timestamp that is past their topic's retention: the broker will remove them."""
    passed_over: int = 0
    """Records that would have made an older master key count: not written."""
    keys_warning: str = ""
    """What is to be done about master keys now; empty when nothing is."""
    offsets_directory: Path | None = None
    """Where the places of the records are written down."""


class Restorer:
    """Writes one archive to one namespace."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        directory: Path,
        *,
        offsets_directory: Path,
        resume: bool = False,
        append: bool = False,
        new_timestamps: bool = False,
        dangling_references: bool = False,
        now_milliseconds: int,
        masters: MasterKeys | None = None,
        progress: Callable[[int, int], None] = lambda _done, _of: None,
    ) -> None:
        """`resume` continues what was interrupted, after checking that it is a beginning of this archive. `append`
        writes after whatever the topics hold. `new_timestamps` gives records the present time, so that their retention
        begins anew. `dangling_references` lets events refer to topics that were never restored. `masters` are
        needed for archived keys that are wrapped. `progress` is told records done and records in all.

        Raises ArchiveError for an archive that is damaged or incomplete.
        """
        self._bus = bus
        self._namespace = namespace
        self._directory = directory
        self._offsets_directory = offsets_directory
        self._resume = resume
        self._append = append
        self._new_timestamps = new_timestamps
        self._now_milliseconds = now_milliseconds
        self._masters = masters or MasterKeys(list)
        self._keeps_master_key = False
        """Whether one counts already, and goes on to."""
        self._progress = progress
        self._manifest = read_manifest(directory)
        verify_files(directory, self._manifest)
        self._translator = Translator(self._manifest.namespace, namespace, Places(), dangling_references)
        self._done = 0
        self._total = sum(topic.rows for topic in self._manifest.topics)

    def run(self, topics: Sequence[str] = ()) -> RestoreReport:
        """Restores these topics (without namespace), or all of the archive.

        Raises ArchiveError when a topic is not in the archive, has other partitions, or is not empty, and when a master
        key of archived keys is missing, before anything is written; BusError and OSError later, after which `resume`
        goes on.
        """
        named = {each.topic: each for each in self._manifest.topics if not topics or each.topic in topics}
        chosen = [named[topic] for topic in in_order(list(named))]
        unknown = set(topics) - {each.topic for each in chosen}
        if unknown:
            raise ArchiveError(f"{self._directory}: holds no {', '.join(sorted(unknown))}")
        self._total = sum(topic.rows for topic in chosen)
        ranges = {topic.topic: self._checked(topic) for topic in chosen}
        report = RestoreReport(offsets_directory=self._offsets_directory)
        if SESSION_KEYS in named:
            report.keys_warning = self._check_master_keys(named[SESSION_KEYS])
        self._recall_places({each.topic for each in chosen})
        producer = self._bus.producer()
        try:
            for topic in chosen:
                report.written[topic.topic] = report.already[topic.topic] = 0
                for partition in topic.partitions:
                    place = TopicPartition(full_name(self._namespace, topic.topic), partition.partition)
                    already, written = self._restore(
                        producer, topic, partition, place, ranges[topic.topic][place], report
                    )
                    report.already[topic.topic] += already
                    report.written[topic.topic] += written
                self._recall(topic.topic)
            report.dangling = self._translator.dangling
        finally:
            producer.close()
        return report

    def _recall_places(self, restored_now: set[str]) -> None:
        """Of topics that an earlier run restored with the same folder of offsets."""
        for topic in self._manifest.topics:
            if topic.topic not in restored_now:
                self._recall(topic.topic)

    def _recall(self, topic: str) -> None:
        if topic in TRANSLATED_TO:
            for file in sorted((self._offsets_directory / topic).glob("partition-*.parquet")):
                self._translator.places.add(topic, int(file.stem.removeprefix("partition-")), read_offsets(file))

    def _checked(self, topic: ArchivedTopic) -> dict[TopicPartition, tuple[int, int]]:
        name = full_name(self._namespace, topic.topic)
        ranges = topic_ranges(self._bus, [name])
        if len(ranges) != len(topic.partitions):
            raise ArchiveError(f"{name} has {len(ranges)} partitions, its archive {len(topic.partitions)}")
        filled = {str(partition): end - first for partition, (first, end) in ranges.items() if end > first}
        if filled and not (self._resume or self._append):
            raise ArchiveError(
                f"{name} is not empty ({', '.join(filled)}): was it restored before? --resume goes on with what was "
                "interrupted, --append writes after what is there"
            )
        return ranges

    def _check_master_keys(self, topic: ArchivedTopic) -> str:
        """What is to be done afterwards. Raises ArchiveError for keys that nobody could use."""
        name = full_name(self._namespace, topic.topic)
        archived = ArchivedKeys.of(
            record for each in topic.partitions for record in self._records(each, TopicPartition(name, each.partition))
        )
        counting = read_keys(self._bus, self._namespace).named if self._append else None
        self._keeps_master_key = counting is not None
        return archived.check(self._masters, counting, self._directory)

    def _restore(
        self,
        producer: Producer,
        topic: ArchivedTopic,
        archived: ArchivedPartition,
        place: TopicPartition,
        present: tuple[int, int],
        report: RestoreReport,
    ) -> tuple[int, int]:
        folder = self._offsets_directory / topic.topic
        folder.mkdir(parents=True, exist_ok=True)
        offsets = OffsetFile(folder / f"partition-{place.partition:05d}.parquet")
        records = self._records(archived, place)
        already = self._pass_over(topic.topic, records, place, present, offsets) if self._resume else 0
        written = 0
        waiting: dict[int, int] = {}
        try:
            for archived_record in records:
                if topic.topic == SESSION_KEYS and self._keeps_master_key and names_master_key(archived_record):
                    report.passed_over += 1
                    self._done += 1
                    continue
                record = self._translator.translated(topic.topic, archived_record)

                def delivered(delivery: Delivery, old_offset: int = record.offset) -> None:
                    waiting[old_offset] = delivery.offset

                producer.produce(
                    OutgoingRecord(
                        place.topic,
                        record.key,
                        record.value,
                        record.headers,
                        partition=place.partition,
                        timestamp_milliseconds=None if self._new_timestamps else record.timestamp_milliseconds,
                    ),
                    delivered,
                )
                written += 1
                report.expired += self._is_expired(topic.topic, record)
                if written % _FLUSH_EVERY_RECORDS == 0:
                    self._settle(producer, waiting, offsets)
            self._settle(producer, waiting, offsets)
        finally:
            offsets.close()
        self._done += already
        self._progress(self._done, self._total)
        return already, written

    def _settle(self, producer: Producer, waiting: dict[int, int], offsets: OffsetFile) -> None:
        producer.flush(_FLUSH_SECONDS)
        for old_offset, new_offset in sorted(waiting.items()):
            offsets.append(old_offset, new_offset)
        self._done += len(waiting)
        waiting.clear()
        self._progress(self._done, self._total)

    def _records(self, archived: ArchivedPartition, place: TopicPartition) -> Iterator[Record]:
        for file in archived.files:
            yield from read_records(self._directory / file.path, place.topic, place.partition)

    def _is_expired(self, topic: str, record: Record) -> bool:
        retention = int(topic_definitions()[topic].config.get("retention.ms", "-1"))
        age = 0 if self._new_timestamps else self._now_milliseconds - record.timestamp_milliseconds
        return 0 <= retention < age

    def _content(self, record: Record) -> tuple[object, ...]:
        time = None if self._new_timestamps else record.timestamp_milliseconds
        return (record.key, record.value, record.headers, time)

    def _pass_over(
        self,
        topic: str,
        records: Iterator[Record],
        place: TopicPartition,
        present: tuple[int, int],
        offsets: OffsetFile,
    ) -> int:
        """Skips what the partition holds already. Raises ArchiveError unless it is a beginning of the archive."""
        passed = 0
        for found in read_once(self._bus, {place: present}):
            record = next(records, None)
            if record is not None:
                record = self._translator.translated(topic, record)
            if record is None or self._content(record) != self._content(found):
                offsets.close()
                raise ArchiveError(f"{found} is not what the archive holds there: somebody else wrote to {place.topic}")
            offsets.append(record.offset, found.offset)
            passed += 1
        return passed
