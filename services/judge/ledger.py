"""The ledger of model calls: what was paid for once is never paid for again.

Every answer is written to `llm-calls` before the score that uses it, by a plain idempotent producer outside the
worker's transaction: a crash between the call and the commit leaves the answer on the log. When a partition of inputs
is assigned, the ledger's partition of the same number (both are partitioned by session) is read back from the time of
the oldest unresolved input on, and answers are taken from there. An entry answers only the very same request.
An answer that is too large for the log leaves an entry without it: its vote abstains, today and after a crash.
"""

import asyncio
import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import orjson
from pydantic import JsonValue

from clawstream.bus.interface import Bus, Consumer, OutgoingRecord, Record, TopicPartition
from clawstream.codec import decode_as, encode
from clawstream.errors import BusError, DecodeError, RecordRejected
from clawstream.log import Logger
from clawstream.topics import LLM_CALLS, full_name, partition_for, topic_definitions
from schemas.events import LlmCallEvent
from services.judge.ledger_writer import LedgerWriter

CLOCK_TOLERANCE_MILLISECONDS = 300_000
"""How far the clocks of gateways and judges may differ: the read-back starts so much earlier."""
PROGRESS_SECONDS = 5.0
"""How often a long read-back says how far it is."""
_WAIT_SECONDS = 0.1
"""For records, before looking whether to stop."""


def request_checksum(request: Mapping[str, JsonValue]) -> str:
    """sha256 in hexadecimal over the canonical JSON of a request."""
    return hashlib.sha256(orjson.dumps(request, option=orjson.OPT_SORT_KEYS)).hexdigest()


class Ledger:
    """The part of the ledger that open inputs may need. Used on one event loop."""

    def __init__(
        self,
        bus: Bus,
        writer: LedgerWriter,
        *,
        namespace: str,
        source: str,
        logger: Logger,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._writer = writer
        self._topic = full_name(namespace, LLM_CALLS)
        self._partitions = topic_definitions()[LLM_CALLS].partitions
        self._source = source
        self._logger = logger
        self._monotonic_seconds = monotonic_seconds
        self._entries: dict[str, LlmCallEvent] = {}
        self._calls_of: defaultdict[str, set[str]] = defaultdict(set)
        self._open_inputs: defaultdict[int, set[str]] = defaultdict(set)
        self._partition_of: dict[str, int] = {}
        """Of inputs that have entries: worked out once for all of them."""
        self._unwritten: set[str] = set()
        self._readings: dict[int, threading.Event] = {}

    async def read_back(self, inputs: Mapping[TopicPartition, int | None]) -> int:
        """Reads what the unresolved inputs may need; returns how many entries that were.

        `inputs` has the next offset of every partition that was assigned, None for its beginning. Goes on while no
        broker answers; ends at once when it is cancelled, or when every one of its partitions is dropped. Raises
        BusError.
        """
        self.drop(inputs)
        enough = threading.Event()
        numbers = [partition.partition for partition in inputs]
        self._readings.update(dict.fromkeys(numbers, enough))
        try:
            records = await asyncio.to_thread(self._read, inputs, enough)
        except asyncio.CancelledError:
            enough.set()  # The thread does not know that nobody waits for it; a process would not end before it.
            raise
        ours = {number for number in numbers if self._readings.get(number) is enough}
        for number in ours:
            del self._readings[number]
        for record in records:
            if record.partition not in ours:
                continue
            try:
                self._remember(decode_as(record, LlmCallEvent))
            except DecodeError as error:
                self._logger.warning("a ledger entry cannot be read and will not be used", error=str(error))
        return len(records)

    def drop(self, inputs: Iterable[TopicPartition]) -> None:
        """Forgets everything of these partitions: others may judge them, or have judged them."""
        for partition in inputs:
            reading = self._readings.pop(partition.partition, None)
            if reading is not None and reading not in self._readings.values():
                reading.set()
            for next_state_id in self._open_inputs.pop(partition.partition, ()):
                self.forget(next_state_id)

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None:
        """The entry that answers this request, if any."""
        entry = self._entries.get(call_id)
        return entry if entry is not None and entry.request_sha256 == request_sha256 else None

    async def record(self, events: Sequence[LlmCallEvent]) -> list[LlmCallEvent | BusError]:
        """Each entry as it is on the log (without its response when that is too large, so the vote abstains), or why it
        is not known to be there.

        BrokerUnavailable: the entry is kept, so that it can be found and recorded again without another call.
        FatalBusError: nothing can be written any more.
        """
        return await self._record(events)

    async def _record(self, events: Sequence[LlmCallEvent]) -> list[LlmCallEvent | BusError]:
        """`record`, by itself again for what is too large: not by what a subclass makes of `record`."""
        for event in events:
            self._remember(event)
            self._unwritten.add(event.call_id)
        failures = await self._writer.write([self._encoded(event) for event in events])
        results: list[LlmCallEvent | BusError] = []
        for event, failure in zip(events, failures, strict=True):
            if isinstance(failure, RecordRejected) and event.response is not None:
                self._logger.warning("an answer does not fit into the ledger; its vote abstains", error=str(failure))
                results += await self._record([event.model_copy(update={"response": None})])
                continue
            if failure is None:
                self._unwritten.discard(event.call_id)
            results.append(event if failure is None else failure)
        return results

    def _encoded(self, event: LlmCallEvent) -> OutgoingRecord:
        return encode(
            event,
            topic=self._topic,
            key=f"{event.next_state_id}/{event.judge_spec_hash}/{event.purpose}/{event.vote}",
            event_id=event.call_id,
            source=self._source,
            partition=self._partition(event),
        )

    def is_written(self, call_id: str) -> bool:
        """Whether an entry that `find` gave is on the log."""
        return call_id not in self._unwritten

    def forget(self, next_state_id: str) -> None:
        """The input is done: its entries are not needed any more."""
        for call_id in self._calls_of.pop(next_state_id, ()):
            self._entries.pop(call_id, None)
            self._unwritten.discard(call_id)
        partition = self._partition_of.pop(next_state_id, None)
        if partition is not None:
            self._open_inputs[partition].discard(next_state_id)

    @property
    def entry_count(self) -> int:
        """How many entries are held in memory."""
        return len(self._entries)

    def _remember(self, event: LlmCallEvent) -> None:
        self._entries[event.call_id] = event
        self._calls_of[event.next_state_id].add(event.call_id)
        self._open_inputs[self._partition(event)].add(event.next_state_id)

    def _partition(self, event: LlmCallEvent) -> int:
        partition = self._partition_of.get(event.next_state_id)
        if partition is None:
            partition = self._partition_of[event.next_state_id] = partition_for(event.session_id, self._partitions)
        return partition

    def _read(self, inputs: Mapping[TopicPartition, int | None], enough: threading.Event) -> list[Record]:
        reader = self._bus.reader()
        try:
            starts: dict[TopicPartition, int] = {}
            ends: dict[TopicPartition, int] = {}
            for partition, next_offset in inputs.items():
                oldest = _first_record(reader, partition, next_offset, enough)
                if oldest is None:
                    continue
                entries = TopicPartition(self._topic, partition.partition)
                since = oldest.timestamp_milliseconds - CLOCK_TOLERANCE_MILLISECONDS
                start, (_, end) = reader.offset_for_time(entries, since), reader.watermarks(entries)
                if start < end:
                    starts[entries], ends[entries] = start, end
            return self._read_until(reader, starts, ends, enough)
        finally:
            reader.close()

    def _read_until(
        self,
        reader: Consumer,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        enough: threading.Event,
    ) -> list[Record]:
        reader.assign(starts)
        records: list[Record] = []
        progress_due = self._monotonic_seconds() + PROGRESS_SECONDS
        while not enough.is_set():
            left = sum(max(0, end - (reader.position(entries) or starts[entries])) for entries, end in ends.items())
            if left == 0:
                break
            if self._monotonic_seconds() >= progress_due:
                progress_due = self._monotonic_seconds() + PROGRESS_SECONDS
                self._logger.info("reading the ledger back", entries=len(records), offsets_left=left)
            records += reader.consume(max_records=1000, timeout_seconds=_WAIT_SECONDS)
        return records


def _first_record(
    reader: Consumer, partition: TopicPartition, next_offset: int | None, enough: threading.Event
) -> Record | None:
    """The oldest input of `partition` at `next_offset` or later that is retained; None when there is none yet."""
    first, end = reader.watermarks(partition)
    start = max(first, next_offset if next_offset is not None else first)
    if start >= end:
        return None
    reader.assign({partition: start})
    while (reader.position(partition) or start) < end and not enough.is_set():
        for record in reader.consume(max_records=1, timeout_seconds=_WAIT_SECONDS):
            return record
    return None
