"""The ledger of model calls: what was paid for once is never paid for again.

Every answer is written to `llm-calls` before the score that uses it, by a plain idempotent producer outside the
worker's transaction: a crash between the call and the commit leaves the answer on the log. When a partition of inputs
is assigned, the ledger's partition of the same number (both are partitioned by session) is read back from the time of
the oldest unresolved input on, and answers are taken from there. An entry answers only the very same request.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

import orjson
from pydantic import JsonValue

from clawstream.bus.interface import Bus, Consumer, Record, TopicPartition
from clawstream.codec import decode_as, encode
from clawstream.errors import BrokerUnavailable, BusError, DecodeError, RecordRejected
from clawstream.log import Logger
from clawstream.topics import LLM_CALLS, full_name, partition_for, topic_definitions
from schemas.events import LlmCallEvent
from services.judge.ledger_writer import LedgerWriter

CLOCK_TOLERANCE_MILLISECONDS = 300_000
"""How far the clocks of gateways and judges may differ: the read-back starts so much earlier."""


def request_checksum(request: Mapping[str, JsonValue]) -> str:
    """sha256 in hexadecimal over the canonical JSON of a request."""
    return hashlib.sha256(orjson.dumps(request, option=orjson.OPT_SORT_KEYS)).hexdigest()


class Ledger:
    """The part of the ledger that open inputs may need. Used on one event loop."""

    def __init__(self, bus: Bus, writer: LedgerWriter, *, namespace: str, source: str, logger: Logger) -> None:
        self._bus = bus
        self._writer = writer
        self._topic = full_name(namespace, LLM_CALLS)
        self._partitions = topic_definitions()[LLM_CALLS].partitions
        self._source = source
        self._logger = logger
        self._entries: dict[str, LlmCallEvent] = {}
        self._calls_of: defaultdict[str, set[str]] = defaultdict(set)
        self._open_inputs: defaultdict[int, set[str]] = defaultdict(set)
        self._unwritten: set[str] = set()

    async def read_back(self, inputs: Mapping[TopicPartition, int | None]) -> int:
        """Reads what the unresolved inputs may need; returns how many entries that were.

        `inputs` has the next offset of every partition that was assigned, None for its beginning. Raises
        BrokerUnavailable.
        """
        self.drop(inputs)
        records = await asyncio.to_thread(self._read, inputs)
        for record in records:
            try:
                self._remember(decode_as(record, LlmCallEvent))
            except DecodeError as error:
                self._logger.warning("a ledger entry cannot be read and will not be used", error=str(error))
        return len(records)

    def drop(self, inputs: Iterable[TopicPartition]) -> None:
        """Forgets everything of these partitions: others may judge them, or have judged them."""
        for partition in inputs:
            for next_state_id in self._open_inputs.pop(partition.partition, ()):
                self.forget(next_state_id)

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None:
        """The entry that answers this request, if any."""
        entry = self._entries.get(call_id)
        return entry if entry is not None and entry.request_sha256 == request_sha256 else None

    async def record(self, event: LlmCallEvent) -> None:
        """Returns when the entry is on the log.

        Raises BrokerUnavailable; the entry is kept then, so that it can be found and recorded again without another
        call. Raises RecordRejected for an answer that is too large for the log.
        """
        self._remember(event)
        self._unwritten.add(event.call_id)
        record = encode(
            event,
            topic=self._topic,
            key=f"{event.next_state_id}/{event.judge_spec_hash}/{event.purpose}/{event.vote}",
            event_id=event.call_id,
            source=self._source,
            partition=self._partition(event),
        )
        try:
            await self._writer.write(record)
        except RecordRejected:
            raise
        except BusError as error:
            # The writer makes a new producer: even what is fatal for a producer is an outage here.
            raise BrokerUnavailable(f"ledger entry {event.call_id} is not on the log: {error}") from error
        self._unwritten.discard(event.call_id)

    def is_written(self, call_id: str) -> bool:
        """Whether an entry that `find` gave is on the log."""
        return call_id not in self._unwritten

    def forget(self, next_state_id: str) -> None:
        """The input is done: its entries are not needed any more."""
        for call_id in self._calls_of.pop(next_state_id, ()):
            entry = self._entries.pop(call_id, None)
            self._unwritten.discard(call_id)
            if entry is not None:
                self._open_inputs[self._partition(entry)].discard(next_state_id)

    @property
    def entry_count(self) -> int:
        """How many entries are held in memory."""
        return len(self._entries)

    def _remember(self, event: LlmCallEvent) -> None:
        self._entries[event.call_id] = event
        self._calls_of[event.next_state_id].add(event.call_id)
        self._open_inputs[self._partition(event)].add(event.next_state_id)

    def _partition(self, event: LlmCallEvent) -> int:
        return partition_for(event.session_id, self._partitions)

    def _read(self, inputs: Mapping[TopicPartition, int | None]) -> list[Record]:
        reader = self._bus.reader()
        try:
            starts: dict[TopicPartition, int] = {}
            ends: dict[TopicPartition, int] = {}
            for partition, next_offset in inputs.items():
                oldest = _first_record(reader, partition, next_offset)
                if oldest is None:
                    continue
                entries = TopicPartition(self._topic, partition.partition)
                since = oldest.timestamp_milliseconds - CLOCK_TOLERANCE_MILLISECONDS
                start, (_, end) = reader.offset_for_time(entries, since), reader.watermarks(entries)
                if start < end:
                    starts[entries], ends[entries] = start, end
            reader.assign(starts)
            records: list[Record] = []
            while any((reader.position(entries) or 0) < end for entries, end in ends.items()):
                records += reader.consume(max_records=1000, timeout_seconds=0.1)
            return records
        finally:
            reader.close()


def _first_record(reader: Consumer, partition: TopicPartition, next_offset: int | None) -> Record | None:
    """The oldest input of `partition` at `next_offset` or later that is retained; None when there is none yet."""
    first, end = reader.watermarks(partition)
    start = max(first, next_offset if next_offset is not None else first)
    if start >= end:
        return None
    reader.assign({partition: start})
    while (reader.position(partition) or start) < end:
        for record in reader.consume(max_records=1, timeout_seconds=0.1):
            return record
    return None
