"""Writes heartbeats to `weights-applied`, and numbers the owners.

An owner's epoch is the end offset of `weights-applied` when it took over: a successor of an owner that has written
anything reads a higher end, so epochs rise with every owner that mattered, over restarts, with no state of their own.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from clawstream import ids
from clawstream.bus.interface import Bus, Consumer, Delivery, Producer, TopicPartition
from clawstream.codec import encode
from clawstream.errors import BusError
from schemas.events import WeightsAppliedEvent


class HeartbeatLog:
    """The topic, as the owner writes it. Bus calls block, so they run on one thread of their own."""

    def __init__(self, bus: Bus, topic: str, *, gateway: str, flush_seconds: float) -> None:
        self._bus = bus
        self._partition = TopicPartition(topic, 0)
        self._source = f"gateway/{gateway}"
        self._flush_seconds = flush_seconds
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gate-heartbeats")
        self._producer: Producer | None = None
        self._reader: Consumer | None = None
        self._written = 0

    async def new_epoch(self) -> int:
        """The epoch of an owner that takes over now. Raises BusError."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._end_offset)

    async def write(self, events: Sequence[WeightsAppliedEvent]) -> int:
        """Writes the heartbeats and returns the last one's offset. Raises BusError unless all are on the log."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._write, events)

    def _end_offset(self) -> int:
        if self._reader is None:
            self._reader = self._bus.reader()
        return self._reader.watermarks(self._partition)[1]

    def _write(self, events: Sequence[WeightsAppliedEvent]) -> int:
        offsets: list[int] = []

        def delivered(delivery: Delivery) -> None:
            offsets.append(delivery.offset)

        try:
            if self._producer is None:
                self._producer = self._bus.producer()
            for event in events:
                self._written += 1
                event_id = ids.derive("weights-applied", event.engine, event.gate_epoch, self._written)
                record = encode(
                    event, topic=self._partition.topic, key=event.engine, event_id=event_id, source=self._source
                )
                self._producer.produce(record, delivered)
            self._producer.flush(self._flush_seconds)
        except BusError:
            # Undelivered heartbeats are worthless by the time the broker is back: they go with their producer.
            producer, self._producer = self._producer, None
            if producer is not None:
                producer.close()
            raise
        return max(offsets)

    async def close(self) -> None:
        """Releases the clients."""

        def release() -> None:
            for client in (self._producer, self._reader):
                if client is not None:
                    client.close()

        await asyncio.get_running_loop().run_in_executor(self._executor, release)
        self._executor.shutdown(wait=False)
