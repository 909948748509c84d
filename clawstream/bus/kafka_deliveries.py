"""What every producer over librdkafka does: hand records over, and find out which of them did not arrive."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka import Producer as LibrdkafkaProducer

from clawstream.bus.interface import Delivery, DeliveryCallback, OutgoingRecord
from clawstream.bus.kafka_errors import PURGED, TOO_LARGE, kafka_error, translate
from clawstream.bus.kafka_properties import Properties
from clawstream.errors import BrokerUnavailable, BusError, RecordRejected

_QUEUE_FULL_SECONDS = 10.0


def new_client(properties: Properties) -> LibrdkafkaProducer:
    """Connects in the background; logs as `clawstream.librdkafka`."""
    return LibrdkafkaProducer(dict(properties), logger=logging.getLogger("clawstream.librdkafka"))


@contextmanager
def translated(doing: str) -> Generator[None]:
    """Errors as ours. Polls and flushes raise what has ended the client for good, whatever they were called for."""
    try:
        yield
    except KafkaException as error:
        raise translate(kafka_error(error), doing) from error


class Deliveries:
    """A librdkafka producer whose failed deliveries are kept until somebody asks."""

    def __init__(self, client: LibrdkafkaProducer) -> None:
        self.client = client
        self._first_failure: BusError | None = None

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None) -> None:
        """Queues a record, waiting for room if need be; whether it arrived is known after a poll or a flush.

        Raises BrokerUnavailable when there is no room for long, RecordRejected, and what has ended the client.
        """
        deadline = time.monotonic() + _QUEUE_FULL_SECONDS
        while True:
            try:
                self.client.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    partition=-1 if record.partition is None else record.partition,
                    headers=list(record.headers),
                    timestamp=record.timestamp_milliseconds or 0,
                    on_delivery=lambda error, message: self._delivered(record, on_delivery, error, message),
                )
            except BufferError as error:
                if time.monotonic() >= deadline:
                    raise BrokerUnavailable(
                        f"{record.topic}: the producer's queue stayed full for {_QUEUE_FULL_SECONDS:.0f} seconds"
                    ) from error
                with translated(f"writing to {record.topic}"):
                    self.client.poll(0.1)
            except KafkaException as error:
                raise self._failure(record, kafka_error(error)) from error
            else:
                return

    def _delivered(
        self,
        record: OutgoingRecord,
        on_delivery: DeliveryCallback | None,
        error: KafkaError | None,
        message: Message,
    ) -> None:
        if error is None:
            if on_delivery is not None:
                partition, offset = message.partition(), message.offset()
                assert partition is not None
                assert offset is not None
                on_delivery(Delivery(record, partition, offset))
        elif error.code() not in PURGED:
            failure = self._failure(record, error)
            if self._first_failure is None or _is_larger(failure, self._first_failure):
                self._first_failure = failure

    def _failure(self, record: OutgoingRecord, error: KafkaError) -> BusError:
        size = len(record.value or b"")
        if error.code() in TOO_LARGE:
            return RecordRejected(
                f"{record.topic}: a record of {size} bytes (key {record.key!r}) is larger than the topic's "
                "max.message.bytes",
                record=record,
            )
        return translate(error, f"writing a record of {size} bytes (key {record.key!r}) to {record.topic}")

    def take_failure(self) -> BusError | None:
        """The first failure since the last call, or the one that explains the others; None when all arrived."""
        failure, self._first_failure = self._first_failure, None
        return failure


def _is_larger(failure: BusError, than: BusError) -> bool:
    """A broker refuses whole batches, and every record of the batch is reported: the largest is the one at fault."""
    return (
        isinstance(failure, RecordRejected)
        and isinstance(than, RecordRejected)
        and _size_bytes(failure.record) > _size_bytes(than.record)
    )


def _size_bytes(record: object) -> int:
    return len(record.value or b"") if isinstance(record, OutgoingRecord) else 0
