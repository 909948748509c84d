"""The ledger of model calls: what was paid for once is never paid for again.

Every answer is written to `llm-calls` before the score that uses it, by a plain idempotent producer outside the
worker's transaction: a crash between the call and the commit leaves the answer on the log. When a partition of inputs
is assigned, the ledger's partition of the same number is read back from the time of the oldest unresolved input on,
and answers are taken from there. An entry answers only the very same request (checksum).
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Mapping

import orjson
from pydantic import JsonValue

from clawstream.bus.interface import Bus, Record, TopicPartition
from clawstream.codec import decode_as, encode
from clawstream.errors import DecodeError
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
        self._unwritten: set[str] = set()

    async def read_back(self, partition: int, since_milliseconds: int) -> int:
        """Reads `partition` from `since_milliseconds` (less a tolerance for clocks) to its end; returns the count."""
        start = since_milliseconds - CLOCK_TOLERANCE_MILLISECONDS
        records = await asyncio.to_thread(self._read, TopicPartition(self._topic, partition), start)
        for record in records:
            try:
                self._remember(decode_as(record, LlmCallEvent))
            except DecodeError as error:
                self._logger.warning("a ledger entry cannot be read and will not be used", error=str(error))
        return len(records)

    def find(self, call_id: str, request_sha256: str) -> LlmCallEvent | None:
        """The entry that answers this request, if any."""
        entry = self._entries.get(call_id)
        return entry if entry is not None and entry.request_sha256 == request_sha256 else None

    async def record(self, event: LlmCallEvent) -> None:
        """Returns when the entry is on the log. After a failure the entry is kept: `find` and `record` it again."""
        self._remember(event)
        self._unwritten.add(event.call_id)
        await self._writer.write(
            encode(
                event,
                topic=self._topic,
                key=f"{event.next_state_id}/{event.judge_spec_hash}/{event.purpose}/{event.vote}",
                event_id=event.call_id,
                source=self._source,
                partition=partition_for(event.session_id, self._partitions),
            )
        )
        self._unwritten.discard(event.call_id)

    def is_written(self, call_id: str) -> bool:
        """Whether an entry that `find` gave is on the log."""
        return call_id not in self._unwritten

    def forget(self, next_state_id: str) -> None:
        """The input is done: its entries are not needed any more."""
        for call_id in self._calls_of.pop(next_state_id, ()):
            self._entries.pop(call_id, None)
            self._unwritten.discard(call_id)

    @property
    def entry_count(self) -> int:
        """How many entries are held in memory."""
        return len(self._entries)

    def _remember(self, event: LlmCallEvent) -> None:
        self._entries[event.call_id] = event
        self._calls_of[event.next_state_id].add(event.call_id)

    def _read(self, partition: TopicPartition, start_milliseconds: int) -> list[Record]:
        reader = self._bus.reader()
        try:
            start = reader.offset_for_time(partition, start_milliseconds)
            _, end = reader.watermarks(partition)
            if start >= end:
                return []
            reader.assign({partition: start})
            records: list[Record] = []
            while (reader.position(partition) or start) < end:
                records += reader.consume(max_records=1000, timeout_seconds=1.0)
            return records
        finally:
            reader.close()
