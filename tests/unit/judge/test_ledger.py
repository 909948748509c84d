"""The ledger and its writer when something goes wrong: one entry too large, a broken thread, a broker that is away."""

import asyncio
import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from clawstream import topics
from clawstream.bus.interface import Bus, Delivery, DeliveryCallback, OutgoingRecord, Record, TopicPartition
from clawstream.bus.memory import MemoryBus
from clawstream.errors import BrokerUnavailable, BusError, FatalBusError, RecordRejected
from clawstream.log import Logger, get_logger
from schemas.events import LlmCallEvent
from services.judge.ledger import Ledger
from services.judge.ledger_writer import LedgerWriter
from tests.fixtures.judged_log import JudgedLog


class BatchProducer:
    """Refuses as a broker does: the whole batch, for one record that is too large."""

    def __init__(self) -> None:
        self.written: list[OutgoingRecord] = []
        self.flushes = 0
        self.closed = False
        self._queue: list[tuple[OutgoingRecord, DeliveryCallback | None]] = []
        self.may_flush = threading.Event()
        self.may_flush.set()

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        if record.value == b"refused at once":
            raise RecordRejected("too large for the client", record=record)
        self._queue.append((record, on_delivery))

    def poll(self, timeout_seconds: float = 0.0) -> None:
        pass

    def flush(self, timeout_seconds: float) -> None:
        self.may_flush.wait(60)
        self.flushes += 1
        queue, self._queue = self._queue, []
        for record, _ in queue:
            if record.value == b"too large":
                raise RecordRejected("too large for the topic", record=record)
        for offset, (record, on_delivery) in enumerate(queue):
            self.written.append(record)
            if on_delivery is not None:
                on_delivery(Delivery(record, 0, offset))

    def close(self) -> None:
        self.closed = True


@contextmanager
def writer_of(producer: BatchProducer) -> Iterator[LedgerWriter]:
    writer = LedgerWriter(lambda: producer, flush_timeout_seconds=60.0, on_failure=lambda: None)
    try:
        yield writer
    finally:
        producer.may_flush.set()
        writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_an_entry_that_is_too_large_is_refused_alone(together: bool) -> None:
    producer = BatchProducer()
    values = [b"a", b"too large", b"b", b"refused at once", b"too large", b"c"]
    with writer_of(producer) as writer:
        producer.may_flush.clear()
        first = asyncio.create_task(writer.write([OutgoingRecord("t", b"k", b"first")]))
        records = [OutgoingRecord("t", b"k", value) for value in values]
        groups = [records[:1], records[1:4], records[4:]] if together else [[record] for record in records]
        writes = [asyncio.create_task(writer.write(group)) for group in groups]
        await asyncio.sleep(0)  # All are queued: the writer takes those behind the first as one batch.
        producer.may_flush.set()
        assert await first == [None]
        results = [result for group in await asyncio.gather(*writes) for result in group]
    assert [type(result) for result in results] == [
        type(None),
        RecordRejected,
        type(None),
        RecordRejected,
        RecordRejected,
        type(None),
    ]
    assert sorted(record.value or b"" for record in producer.written) == [b"a", b"b", b"c", b"first"]
    assert writer.failure is None


class ForeignRefusal(BatchProducer):
    """Tells of a record that is not of this batch, once."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def flush(self, timeout_seconds: float) -> None:
        if not self._told:
            self._told = True
            raise RecordRejected("too large", record=OutgoingRecord("t", b"k", b"of an earlier batch"))
        super().flush(timeout_seconds)


async def test_a_refusal_of_what_nobody_waits_for_is_an_outage_and_breaks_nothing() -> None:
    with writer_of(ForeignRefusal()) as writer:
        (failure,) = await writer.write([OutgoingRecord("t", b"k", b"v")])
        assert isinstance(failure, BrokerUnavailable)
        assert "a record that nobody waits for" in str(failure)
        assert await writer.write([OutgoingRecord("t", b"k", b"v")]) == [None]
        assert writer.failure is None


async def test_what_is_fatal_for_a_producer_is_an_outage_for_an_entry() -> None:
    producers: list[BatchProducer] = []

    def make() -> BatchProducer:
        producers.append(BatchProducer())
        if len(producers) == 1:
            raise BusError("no producer today")
        return producers[-1]

    writer = LedgerWriter(make, flush_timeout_seconds=60.0, on_failure=lambda: None)
    failures = await writer.write([OutgoingRecord("t", b"k", b"v"), OutgoingRecord("t", b"k", b"w")])
    assert [(type(failure), "no producer today" in str(failure)) for failure in failures] == [
        (BrokerUnavailable, True)
    ] * 2
    assert await writer.write([OutgoingRecord("t", b"k", b"v")]) == [None]
    await asyncio.to_thread(writer.close)
    assert [record.value for record in producers[1].written] == [b"v"]
    assert producers[1].closed


async def test_a_broken_writer_tells_everybody_and_ends_the_process() -> None:
    told = threading.Event()
    may_fail = threading.Event()

    def make() -> BatchProducer:
        may_fail.wait(60)
        raise ZeroDivisionError("a bug")

    writer = LedgerWriter(make, flush_timeout_seconds=60.0, on_failure=told.set)
    records = [OutgoingRecord("t", b"k", b"v")] * 2
    writes = [asyncio.create_task(writer.write(records)) for _ in range(3)]
    await asyncio.sleep(0)
    may_fail.set()
    results = [result for group in await asyncio.gather(*writes) for result in group]
    assert [type(result) for result in results] == [FatalBusError] * 6
    assert await asyncio.to_thread(told.wait, 60)
    assert writer.failure is not None
    (late,) = await writer.write([OutgoingRecord("t", b"k", b"late")])
    assert isinstance(late, FatalBusError)
    assert "ZeroDivisionError: a bug" in str(late)
    await asyncio.to_thread(writer.close)


@pytest.fixture
def log() -> JudgedLog:
    made = JudgedLog(MemoryBus(), "clawstream")
    made.create_topics()
    return made


def call(number: int, response: str = "fine") -> LlmCallEvent:
    return LlmCallEvent(
        call_id=f"call-{number}",
        next_state_id=f"next-{number}",
        session_id="session-1",
        judge_spec_hash="h",
        purpose="verdict",
        vote=0,
        model="m",
        request_sha256="0" * 64,
        response={"text": response, "finish_reason": "stop"},
        seconds=0.1,
        called_at=datetime(2026, 3, 1, tzinfo=UTC),
    )


async def test_an_answer_that_is_too_large_leaves_an_entry_without_it(log: JudgedLog) -> None:
    writer = LedgerWriter(log.bus.producer, flush_timeout_seconds=60.0, on_failure=lambda: None)
    ledger = Ledger(log.bus, writer, namespace="clawstream", source="judge/tests", logger=get_logger())
    kept, other = await ledger.record([call(1, "x" * 3_000_000), call(2)])
    assert isinstance(kept, LlmCallEvent)
    assert kept.response is None
    assert ledger.find("call-1", "0" * 64) == kept
    assert ledger.is_written("call-1")
    assert other == call(2)
    await asyncio.to_thread(writer.close)
    written = {event.call_id: event.response for event in log.events(topics.LLM_CALLS, LlmCallEvent)}
    assert written == {"call-1": None, "call-2": {"text": "fine", "finish_reason": "stop"}}


class SilentReader:
    """Knows that there is more to read, and never gets it: a broker that went away in the middle."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.closed = threading.Event()

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        return 0, 10

    def offset_for_time(self, partition: TopicPartition, timestamp_milliseconds: int) -> int:
        return 0

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._entries = any(partition.topic.endswith(topics.LLM_CALLS) for partition in positions)

    def position(self, partition: TopicPartition) -> int | None:
        return None

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        if not self._entries:
            return [Record("clawstream.next-states.v1", 0, 0, b"k", b"{}", (), 1_700_000_000_000)]
        self.asked.set()
        return []

    def close(self) -> None:
        self.closed.set()


class SilentBus:
    def __init__(self) -> None:
        self.reads = SilentReader()

    def reader(self) -> SilentReader:
        return self.reads


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **values: object) -> None:
        self.lines.append((event, values))


INPUTS = {TopicPartition("clawstream.next-states.v1", number): None for number in (0, 1)}


@pytest.mark.parametrize("end", ["cancel", "drop"])
async def test_reading_back_ends_when_it_is_cancelled_or_its_partitions_go(end: str) -> None:
    bus, lines, clock = SilentBus(), Lines(), itertools.count(step=10)
    writer: Any = None
    ledger = Ledger(
        cast("Bus", bus),
        writer,
        namespace="clawstream",
        source="judge/tests",
        logger=cast("Logger", lines),
        monotonic_seconds=lambda: float(next(clock)),
    )
    reading = asyncio.create_task(ledger.read_back(INPUTS))
    assert await asyncio.to_thread(bus.reads.asked.wait, 60)
    if end == "cancel":
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        first, second = INPUTS
        ledger.drop([first])
        assert not bus.reads.closed.is_set(), "the other partition is still ours"
        ledger.drop([second])
        assert await reading == 0
    assert await asyncio.to_thread(bus.reads.closed.wait, 60), "the thread has ended"
    event, values = lines.lines[0]
    assert (event, values) == ("reading the ledger back", {"entries": 0, "offsets_left": 20})
