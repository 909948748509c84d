"""Carrying out a request: first the keys of encrypted content, which nobody can read from then on; then its record, so
that nobody uses the data any more; then what holds the data.

Every part may be repeated: a run that was interrupted is finished by the next, and a run after a finished one finds
nothing to do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from clawstream.blobs import remove_blob
from clawstream.bus.interface import Bus, OutgoingRecord
from clawstream.bus.overtaken import telling_who_overtook
from clawstream.bus.ranges import read_once, topic_ranges
from clawstream.bus.write_together import write_together
from clawstream.clock import Clock
from clawstream.codec import encode
from clawstream.encryption.deletion import delete_keys
from clawstream.forgetting.batches import BatchRewriter, BatchTreatment, treat_batch
from clawstream.forgetting.forgotten import Forgotten, forgotten_key
from clawstream.forgetting.survey import Subject, Survey, survey
from clawstream.ids import derive
from clawstream.topics import FORGOTTEN, full_name
from schemas.events import ForgottenEvent
from schemas.events.forgotten import ForgottenBatch, ForgottenKind

_TOMBSTONES_PER_TRANSACTION: Final = 2000
_SOURCE: Final = "cli/forget"


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """What a run found, and what it did."""

    found: Survey
    """As of the beginning of the removal, or of the look alone."""
    request: ForgottenEvent | None
    """The record on the log; None when there is none, as after a look that is the first."""
    tombstones: dict[str, int]
    """Topic, without namespace, to the keys that this run removed."""
    blobs_removed: int
    """Blobs that this run removed."""
    session_keys_deleted: int
    """Keys of sessions that this run deleted."""
    changed: bool
    """Whether this run wrote or removed anything."""


class Forgetting:
    """Looks, and forgets. Not thread-safe; two runs at once fence each other."""

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        clock: Clock,
        *,
        rewrite_batch: BatchRewriter | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`progress` is told what is being done, in a few words."""
        self._bus = bus
        self._namespace = namespace
        self._clock = clock
        self._rewrite_batch = rewrite_batch
        self._progress = progress

    def look(self, subject: Subject) -> ForgetReport:
        """What a run would find. Changes nothing. Raises BusError."""
        self._progress("reading the log")
        return ForgetReport(survey(self._bus, self._namespace, subject), self.request(subject), {}, 0, 0, changed=False)

    def run(self, subject: Subject, batches: BatchTreatment) -> ForgetReport:
        """Forgets. Raises BusError, BlobError, OSError; then run it again.

        A session that the log does not know is forgotten too: nothing of it will be used when it comes.
        """
        before = self.request(subject)
        request = before or ForgottenEvent(kind=subject.kind, subject=subject.name, requested_at=self._clock.now())
        self._progress("reading the log")
        found = survey(self._bus, self._namespace, subject)
        keys_deleted = self._delete_keys(found)
        request = request.model_copy(update={"turn_ends": self._turn_ends(subject, before, found)})
        if before is None or request != before or any(found.live.values()):
            request = request.model_copy(update={"completed_at": None})
            self._write_request(request)
        if before is None:
            # Who had not read the request yet may have written since the first look.
            found = survey(self._bus, self._namespace, subject)
            keys_deleted += self._delete_keys(found)
        self._progress("writing tombstones")
        tombstones = self._write_tombstones(found)
        self._progress("removing blobs")
        blobs_removed = sum(remove_blob(reference) for reference in found.blobs.values())
        self._progress("archived batches")
        request = request.model_copy(
            update={
                "turns": max(request.turns, len(found.turn_ids)),
                "tombstones": _sums(request.tombstones, tombstones),
                "session_keys": request.session_keys + keys_deleted,
                "blobs_removed": request.blobs_removed + blobs_removed,
                "weight_versions": sorted({*request.weight_versions, *found.weight_versions}),
                "batches": self._treated(found, request.batches, batches),
            }
        )
        changed = before is None or before.completed_at is None or request != before
        if changed:
            request = request.model_copy(update={"completed_at": self._clock.now()})
            self._write_request(request)
        return ForgetReport(found, request, tombstones, blobs_removed, keys_deleted, changed=changed)

    def request(self, subject: Subject) -> ForgottenEvent | None:
        """The record of an earlier request for `subject`. Raises BusError and DecodeError."""
        return read_forgotten(self._bus, self._namespace).get(subject.kind, subject.name)

    def _turn_ends(self, subject: Subject, before: ForgottenEvent | None, found: Survey) -> dict[str, int]:
        """Of a principal, what is on the log now. Moved only when there is something new of theirs."""
        if subject.kind is ForgottenKind.SESSION:
            return {}
        if before is not None and len(found.turn_ids) <= before.turns and not any(found.live.values()):
            return before.turn_ends
        return found.turn_ends

    def _delete_keys(self, found: Survey) -> int:
        self._progress("deleting keys")
        if found.session_keys:
            delete_keys(self._bus, self._namespace, found.session_keys, _SOURCE)
        return len(found.session_keys)

    def _write_request(self, request: ForgottenEvent) -> None:
        key = forgotten_key(request.kind, request.subject)
        record = encode(
            request,
            topic=full_name(self._namespace, FORGOTTEN),
            key=key,
            event_id=derive("forgotten", key),
            source=_SOURCE,
        )
        self._write_together([record])

    def _write_tombstones(self, found: Survey) -> dict[str, int]:
        """One for every key that has a value, in the partition of that value."""
        tombstones = (
            OutgoingRecord(
                full_name(self._namespace, topic), key, None, (("ce_source", _SOURCE.encode()),), partition=partition
            )
            for topic, keys in found.live.items()
            for key, partition in keys
        )
        while chunk := list(islice(tombstones, _TOMBSTONES_PER_TRANSACTION)):
            self._write_together(chunk)
        return {topic: len(keys) for topic, keys in found.live.items() if keys}

    def _write_together(self, records: Sequence[OutgoingRecord]) -> None:
        """One transaction of a producer of its own: runs are rare, and a new one fences what a killed run left."""
        producer = self._bus.transactional_producer(f"{self._namespace}.forget")
        try:
            with telling_who_overtook(
                f"{records[0].topic}: forgetting",
                "another `clawstream forget`",
                then="What was done before stays done: run it again, when the other one has ended",
            ):
                write_together(producer, records)
        finally:
            producer.close()

    def _treated(
        self, found: Survey, known: Iterable[ForgottenBatch], treatment: BatchTreatment
    ) -> list[ForgottenBatch]:
        """Batches that earlier runs listed stay listed, also when retention has removed their steps."""
        treated = {(batch.lineage, batch.step): batch for batch in known}
        for step in found.steps:
            place = (step.lineage, step.step)
            treated[place] = treat_batch(step, treated.get(place), treatment, self._rewrite_batch)
        return list(treated.values())


def read_forgotten(bus: Bus, namespace: str) -> Forgotten:
    """All requests. Raises BusError, and DecodeError for a record that is none."""
    forgotten = Forgotten()
    for record in read_once(bus, topic_ranges(bus, [full_name(namespace, FORGOTTEN)])):
        forgotten.apply(record)
    return forgotten


def _sums(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {topic: first.get(topic, 0) + second.get(topic, 0) for topic in sorted({*first, *second})}
