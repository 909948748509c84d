"""Reads `samples` from the positions of a checkpoint; never as a group: the checkpoint alone says what was trained."""

from collections import deque
from collections.abc import Callable, Sequence

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.errors import BlobUnavailable, DecodeError, UntrainableSample
from clawstream.log import Logger
from schemas.events.base import RecordReference
from schemas.events.train_step import DroppedSample, DropReason
from services.trainer.batcher import Batcher
from services.trainer.blob_patience import BlobPatience
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
        blob_patience_seconds: float,
        wait: Callable[[float], object],
        logger: Logger,
    ) -> None:
        """Starts at the progress's positions; at the first retained record of partitions that it does not know.

        `dead_letter` makes of a record that is no sample what the dead-letter topic gets with the next step. A record
        whose blob's store does not answer holds up what comes after it, for at most `blob_patience_seconds`; `wait`
        then waits.
        """
        self._topic = topic
        self._batcher = batcher
        self._rules = rules
        self._dead_letter = dead_letter
        self._dead_letters: list[DeadLetter] = []
        self._expected = {(sample.partition, sample.offset): sample for sample in progress.waiting}
        self._untaken: deque[Record] = deque()
        """What was read and not taken in yet: behind a blob whose store does not answer."""
        self._patience = BlobPatience(blob_patience_seconds)
        self._wait = wait
        self._logger = logger
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
        """Takes in what is there, waiting at most so long for the first record. Returns how many were taken in."""
        if not self._untaken:
            self._untaken.extend(self._consumer.consume(_MAX_RECORDS, timeout_seconds))
        elif not self._patience.is_due(now_seconds):
            self._wait(timeout_seconds)
            return 0
        taken = 0
        while self._untaken and self._take(self._untaken[0], newest_published, now_seconds):
            self._untaken.popleft()
            taken += 1
        if self._untaken:
            return taken  # The consumer's positions are ahead of what was taken in.
        for partition in sorted({partition for partition, _ in self._expected}):
            position = self._consumer.position(TopicPartition(self._topic, partition))
            if position is not None:
                self._list_vanished(partition, position, now_seconds)
        return taken

    def lag(self) -> int:
        """Offsets between what was taken in and the end of the topic. Asks the broker."""
        return sum(
            max(0, self._consumer.watermarks(TopicPartition(self._topic, partition))[1] - seen)
            for partition, seen in self._seen.items()
        )

    def close(self) -> None:
        """Releases the client."""
        self._consumer.close()

    def _take(self, record: Record, newest_published: int, now_seconds: float) -> bool:
        """Whether the record was taken in. If not, nothing has changed, and it is to be tried again."""
        place = (record.partition, record.offset)
        is_new = record.offset >= self._seen[record.partition]
        if not is_new and place not in self._expected:
            return True  # trained, or listed as dropped, before the checkpoint
        found: Candidate | DroppedSample | DecodeError | None = None
        if record.value is not None:
            try:
                found = read_candidate(record, self._rules, newest_published=newest_published)
            except DecodeError as error:
                found = error
            except BlobUnavailable as error:
                if self._patience.failed(now_seconds):
                    self._logger.warning("a sample waits for its blob", sample=str(record), error=str(error))
                    return False
                found = UntrainableSample(f"{record}: given up after {self._patience.seconds:.0f} seconds: {error}")
        self._patience.ended()
        self._expected.pop(place, None)
        if is_new:
            self._seen[record.partition] = record.offset + 1
        self._put(record, found, now_seconds)
        return True

    def _put(self, record: Record, found: Candidate | DroppedSample | DecodeError | None, now_seconds: float) -> None:
        if found is None:
            if record.key is not None:
                self._batcher.remove(record.key.decode(errors="replace"), reference(record), now_seconds)
        elif isinstance(found, DecodeError):
            self._dead_letters.append(self._dead_letter(record, found))
            self._batcher.dead_letter(len(record.value or b""), now_seconds)
        elif isinstance(found, Candidate):
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
