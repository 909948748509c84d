"""Puts a crash point around what a service is wired with. Without one everything is returned as it was given."""

from collections.abc import Callable, Mapping, Sequence

from clawstream.blobs import BlobStore
from clawstream.bus.forwarding import ForwardingConsumer, ForwardingTransactionalProducer
from clawstream.bus.interface import (
    Admin,
    Bus,
    Consumer,
    DeliveryCallback,
    GroupMetadata,
    OutgoingRecord,
    Producer,
    RebalanceCallbacks,
    Record,
    TopicPartition,
    TransactionalProducer,
)
from clawstream.crash_points import point as points
from clawstream.crash_points.point import CrashPoint
from clawstream.topics import WEIGHTS
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import Outcome
from schemas.arrays import BlobReference

_FLUSH_SECONDS = 30.0


def with_bus_crash(bus: Bus, point: CrashPoint | None) -> Bus:
    """Consuming, revoking and the steps of transactions."""
    return bus if point is None else _CrashingBus(bus, point)


def with_handler_crash(handler: Handler, point: CrashPoint | None) -> Handler:
    """The answer to an input is there, and on no log yet."""
    return handler if point is None else _CrashingHandler(handler, point)


def with_blob_crash(url: str, point: CrashPoint | None, *, encrypts: bool = False) -> BlobStore:
    """A blob store at `url`. Raises SettingsError."""
    if point is None:
        return BlobStore(url, encrypts=encrypts)
    return _CrashingBlobStore(url, point, encrypts=encrypts)


def with_sync_crash(sync: Callable[[int], None], point: CrashPoint | None) -> Callable[[int], None]:
    """Making the outbox durable."""
    if point is None:
        return sync

    def crashing(descriptor: int) -> None:
        point.reach(points.BEFORE_OUTBOX_SYNC)
        sync(descriptor)
        point.reach(points.AFTER_OUTBOX_SYNC)

    return crashing


class _CrashingProducer(ForwardingTransactionalProducer):
    """Passes everything on, and the points between."""

    def __init__(self, inner: TransactionalProducer, point: CrashPoint) -> None:
        super().__init__(inner)
        self._point = point
        self._has_weights = False

    def begin(self) -> None:
        super().begin()
        self._has_weights = False
        self._point.reach(points.AFTER_BEGIN)

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        super().produce(record, on_delivery)
        self._has_weights = self._has_weights or record.topic.endswith(f".{WEIGHTS}")
        self._point.reach(points.AFTER_PRODUCE)

    def flush(self, timeout_seconds: float) -> None:
        super().flush(timeout_seconds)
        self._point.reach(points.AFTER_FLUSH)

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        if self._point.name == points.AFTER_FLUSH:
            # The worker leaves flushing to the commit; here the records are to be on the broker already.
            self.flush(_FLUSH_SECONDS)
        super().send_offsets(offsets, group)
        self._point.reach(points.AFTER_SEND_OFFSETS)

    def commit(self) -> None:
        if self._has_weights:
            self._point.reach(points.BEFORE_WEIGHTS_EVENT)
        self._point.reach(points.BEFORE_COMMIT)
        super().commit()
        self._point.reach(points.AFTER_COMMIT)
        if self._has_weights:
            self._point.reach(points.AFTER_WEIGHTS_EVENT)


class _CrashingConsumer(ForwardingConsumer):
    """A group's consumer: records are in memory, and nothing has come of them."""

    def __init__(self, inner: Consumer, point: CrashPoint) -> None:
        super().__init__(inner)
        self._point = point

    def consume(self, max_records: int, timeout_seconds: float) -> list[Record]:
        records = super().consume(max_records, timeout_seconds)
        if records:
            self._point.reach(points.AFTER_CONSUME)
        return records


class _CrashingBus:
    """Makes clients that pass the points."""

    def __init__(self, inner: Bus, point: CrashPoint) -> None:
        self._inner = inner
        self._point = point

    def group_consumer(
        self, topics: Sequence[str], *, group: str, instance: str, callbacks: RebalanceCallbacks
    ) -> Consumer:
        def revoked(partitions: Sequence[TopicPartition]) -> None:
            self._point.reach(points.IN_REVOKE)
            callbacks.revoked(partitions)
            self._point.reach(points.AFTER_REVOKE)

        crashing = RebalanceCallbacks(callbacks.assigned, revoked, callbacks.lost)
        consumer = self._inner.group_consumer(topics, group=group, instance=instance, callbacks=crashing)
        return _CrashingConsumer(consumer, self._point)

    def reader(self) -> Consumer:
        return self._inner.reader()

    def follower(self) -> Consumer:
        return self._inner.follower()

    def producer(self) -> Producer:
        return self._inner.producer()

    def transactional_producer(self, transactional_id: str) -> TransactionalProducer:
        return _CrashingProducer(self._inner.transactional_producer(transactional_id), self._point)

    def admin(self) -> Admin:
        return self._inner.admin()


class _CrashingHandler(Handler):
    def __init__(self, inner: Handler, point: CrashPoint) -> None:
        self._inner = inner
        self._point = point

    async def handle(self, record: Record) -> Outcome:
        outcome = await self._inner.handle(record)
        self._point.reach(points.AFTER_ANSWER)
        return outcome

    async def on_assigned(self, partitions: Mapping[TopicPartition, int | None]) -> None:
        await self._inner.on_assigned(partitions)

    async def on_released(self, partitions: Sequence[TopicPartition]) -> None:
        await self._inner.on_released(partitions)

    async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
        return await self._inner.on_deadline(record, deadline_seconds)

    async def close(self) -> None:
        await self._inner.close()


class _CrashingBlobStore(BlobStore):
    def __init__(self, url: str, point: CrashPoint, *, encrypts: bool) -> None:
        super().__init__(url, encrypts=encrypts)
        self._point = point

    def write(self, block: bytes) -> BlobReference:
        self._point.reach(points.BEFORE_BLOB_WRITE)
        reference = super().write(block)
        self._point.reach(points.AFTER_BLOB_WRITE)
        return reference
