"""Reads `samples` from the positions of a checkpoint; never as a group: the checkpoint alone says what was trained."""

from collections.abc import Callable, Sequence

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.errors import DecodeError
from schemas.events.base import RecordReference
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.batcher import Batcher
from services.trainer.candidates import Candidate, CandidateRules, read_candidate, reference
from services.trainer.dead_letters import DeadLetter
from services.trainer.progress import Progress, WaitingSample

_MAX_RECORDS = 256


class SampleReader:
    """Feeds a batcher. Not thread-safe."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        *,
        partitions: Sequence[int],
        progress: Progress,
        batcher: Batcher,
        rules: CandidateRules,
        dead_letter: Callable[[Record, DecodeError], DeadLetter],
        now_seconds: float,
    ) -> None:
        """Starts at the progress's positions; at the first retained record of partitions that it does not know.

        `dead_letter` makes of a record that is no sample what the dead-letter topic gets with the next step.
        """
        self._topic = topic
        self._batcher = batcher
        self._rules = rules
        self._dead_letter = dead_letter
        self._dead_letters: list[DeadLetter] = []
        self._expected = {(sample.partition, sample.offset): sample for sample in progress.waiting}
        self._consumer = bus.reader()
        self._seen: dict[int, int] = {}
        positions: dict[TopicPartition, int] = {}
        for number in partitions:
            partition = TopicPartition(topic, number)
            first, _ = self._consumer.watermarks(partition)
            start = max(first, progress.next_offsets.get(number, first))
            positions[partition] = start
            self._seen[number] = max(start, progress.seen_offsets.get(number, start))
            self._list_vanished(number, start, now_seconds)
        self._consumer.assign(positions)

    @property
    def seen_offsets(self) -> dict[int, int]:
        """Partition to the offset after the last record that was taken in."""
        return dict(self._seen)

    @property
    def expected(self) -> list[WaitingSample]:
        """Samples that waited at the checkpoint and are still to be read again: a new checkpoint must hold them too."""
        return list(self._expected.values())

    def take_dead_letters(self) -> list[DeadLetter]:
        """What was read before `seen_offsets` and is no sample, since the last call."""
        taken, self._dead_letters = self._dead_letters, []
        return taken

    def poll(self, timeout_seconds: float, *, newest_published: int, now_seconds: float) -> int:
        """Takes in what is there, waiting at most so long for the first record. Returns how many were read."""
        records = self._consumer.consume(_MAX_RECORDS, timeout_seconds)
        for record in records:
            self._take(record, newest_published, now_seconds)
        for partition in sorted({partition for partition, _ in self._expected}):
            position = self._consumer.position(TopicPartition(self._topic, partition))
            if position is not None:
                self._list_vanished(partition, position, now_seconds)
        return len(records)

    def lag(self) -> int:
        """Offsets between what was taken in and the end of the topic. Asks the broker."""
        return sum(
            max(0, self._consumer.watermarks(TopicPartition(self._topic, partition))[1] - seen)
            for partition, seen in self._seen.items()
        )

    def close(self) -> None:
        """Releases the client."""
        self._consumer.close()

    def _take(self, record: Record, newest_published: int, now_seconds: float) -> None:
        if record.offset < self._seen[record.partition]:
            if self._expected.pop((record.partition, record.offset), None) is None:
                return  # trained, or listed as dropped, before the checkpoint
        else:
            self._seen[record.partition] = record.offset + 1
        if record.value is None:
            if record.key is not None:
                self._batcher.remove(record.key.decode(errors="replace"), reference(record), now_seconds)
            return
        try:
            found = read_candidate(record, self._rules, newest_published=newest_published)
        except DecodeError as error:
            self._dead_letters.append(self._dead_letter(record, error))
            self._batcher.dead_letter(len(record.value), now_seconds)
            return
        if isinstance(found, Candidate):
            self._batcher.add(found, now_seconds)
        else:
            self._batcher.drop(found, now_seconds)

    def _list_vanished(self, partition: int, position: int, now_seconds: float) -> None:
        """A sample that waited is no longer on the log: compaction keeps only a turn's newest, retention none."""
        gone: list[WaitingSample] = [
            sample for (number, offset), sample in self._expected.items() if number == partition and offset < position
        ]
        for sample in sorted(gone, key=lambda sample: sample.offset):
            del self._expected[sample.partition, sample.offset]
            self._batcher.drop(
                DroppedSample(
                    sample_id=sample.sample_id,
                    turn_id=sample.turn_id,
                    ref=RecordReference(topic=self._topic, partition=sample.partition, offset=sample.offset),
                    reason=DropReason.SUPERSEDED,
                    detail="no longer on the log: compacted away, or past the topic's retention",
                ),
                now_seconds,
            )
