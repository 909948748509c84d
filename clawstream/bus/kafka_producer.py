"""The producer over librdkafka that knows no transactions."""

from clawstream.bus.interface import DeliveryCallback, OutgoingRecord
from clawstream.bus.kafka_deliveries import Deliveries, new_client, translated
from clawstream.bus.kafka_properties import Properties
from clawstream.errors import BrokerUnavailable

_CLOSE_SECONDS = 5.0


class KafkaProducer:
    """Implements `Producer`."""

    def __init__(self, properties: Properties) -> None:
        self._deliveries = Deliveries(new_client(properties))
        self._closed = False

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        # Not a poll for every record: it gives the interpreter's lock away, and waits for it behind a busy event loop.
        self._deliveries.produce(record, on_delivery)

    def poll(self, timeout_seconds: float = 0.0) -> None:
        with translated("serving delivery reports"):
            self._deliveries.client.poll(timeout_seconds)

    def flush(self, timeout_seconds: float) -> None:
        with translated("flushing"):
            remaining = self._deliveries.client.flush(timeout_seconds)
        failure = self._deliveries.take_failure()
        if failure is not None:
            raise failure
        if remaining > 0:
            raise BrokerUnavailable(f"{remaining} record(s) are not on the log after {timeout_seconds:.1f} seconds")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._deliveries.client.flush(_CLOSE_SECONDS)
        self._deliveries.client.purge()
        self._deliveries.client.flush(0)
        del self._deliveries  # The last reference: ends librdkafka's threads.
