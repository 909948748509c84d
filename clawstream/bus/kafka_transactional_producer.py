"""The transactional producer over librdkafka."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress

from confluent_kafka import KafkaException
from confluent_kafka import Producer as LibrdkafkaProducer
from confluent_kafka import TopicPartition as LibrdkafkaTopicPartition

from clawstream.bus.interface import DeliveryCallback, GroupMetadata, OutgoingRecord, TopicPartition
from clawstream.bus.kafka_deliveries import Deliveries, new_client, translated
from clawstream.bus.kafka_errors import is_invalid_transaction_state, kafka_error, translate
from clawstream.bus.kafka_properties import (
    SLOW_END_OF_TRANSACTION_SECONDS,
    TRANSACTION_TIMEOUT_SECONDS,
    Properties,
)
from clawstream.deadline_calls import DeadlineThread
from clawstream.errors import (
    BrokerUnavailable,
    BusError,
    FatalBusError,
    Fenced,
    RecordRejected,
    TransactionAbortable,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
)

_INITIALISE_SECONDS = 10.0
_OVERDUE_SECONDS = 5.0
"""A call that has not returned so long after its timeout never will."""


class KafkaTransactionalProducer:
    """Implements `TransactionalProducer`.

    Rule (reference: Jepsen's reports on Kafka transactions): an EndTxn that timed out may arrive late and end the next
    transaction of the same producer epoch. A successor's `init_transactions` raises the epoch and so disarms it. Hence
    `needs_replacement` after every end that raised or took nearly as long as the socket timeout, and after any error.
    """

    def __init__(
        self,
        properties: Properties,
        *,
        transactional_id: str,
        transaction_timeout_seconds: float = TRANSACTION_TIMEOUT_SECONDS,
        client: LibrdkafkaProducer | None = None,
        monotonic_seconds: Callable[[], float] = time.monotonic,
        overdue_seconds: float = _OVERDUE_SECONDS,
    ) -> None:
        """Initialises: raises BrokerUnavailable when no coordinator answers. `client` is for tests.

        `transaction_timeout_seconds` must be what `properties` say.
        A call that has not returned `overdue_seconds` after its own timeout is given up with FatalBusError.
        """
        self._deliveries = Deliveries(client if client is not None else new_client(properties))
        self._client = self._deliveries.client
        self._id = transactional_id
        self._transaction_timeout_seconds = transaction_timeout_seconds
        self._began_at_seconds: float | None = None
        """Of the open transaction, if one is."""
        self._monotonic_seconds = monotonic_seconds
        self._needs_replacement = False
        self._closed = False
        self._overdue_seconds = overdue_seconds
        self._calls = DeadlineThread(f"transactions {transactional_id}")
        self._retried("initialising transactions", _INITIALISE_SECONDS, self._client.init_transactions)

    @property
    def needs_replacement(self) -> bool:
        return self._needs_replacement

    def begin(self) -> None:
        self._deliveries.take_failure()
        self._retried("beginning a transaction", 0.0, lambda _timeout: self._client.begin_transaction())
        self._began_at_seconds = self._monotonic_seconds()

    def produce(self, record: OutgoingRecord, on_delivery: DeliveryCallback | None = None) -> None:
        try:
            # Reports are served by `flush` and `commit`.
            with self._own_timeout_told_apart():
                self._deliveries.produce(record, on_delivery)
        except (Fenced, FatalBusError, TransactionAbortable):
            self._needs_replacement = True
            raise
        except BusError as error:
            self._needs_replacement = True
            raise TransactionAbortable(str(error)) from error

    def flush(self, timeout_seconds: float) -> None:
        failure: BusError | None
        try:
            with translated(f"transactional id {self._id}: flushing"):
                remaining = self._client.flush(timeout_seconds)
        except BusError as error:
            failure = error
        else:
            failure = self._deliveries.take_failure()
            if failure is None and remaining > 0:
                failure = BrokerUnavailable(f"{remaining} record(s) undelivered after {timeout_seconds:.1f} seconds")
        if failure is not None:
            self._needs_replacement = True
            with self._own_timeout_told_apart():
                if isinstance(failure, Fenced | FatalBusError | TransactionAbortable):
                    raise failure
                raise TransactionAbortable(str(failure)) from failure

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMetadata) -> None:
        positions = [
            LibrdkafkaTopicPartition(partition.topic, partition.partition, offset)
            for partition, offset in offsets.items()
        ]
        try:
            self._retried(
                "sending offsets to the transaction",
                TRANSACTION_TIMEOUT_SECONDS,
                lambda timeout: self._client.send_offsets_to_transaction(positions, group, timeout),
            )
        except BrokerUnavailable as error:
            raise TransactionAbortable(str(error)) from error

    def commit(self) -> None:
        try:
            self._end("committing", self._client.commit_transaction)
        except TransactionAbortable as error:
            # librdkafka says only that some delivery failed; the delivery itself knows which and why.
            failure = self._deliveries.take_failure()
            if isinstance(failure, RecordRejected):
                raise failure from error
            raise

    def abort(self) -> None:
        try:
            self._end("aborting", self._client.abort_transaction)
        except FatalBusError as error:
            # When little was sent, librdkafka may end a transaction of which the broker does not know yet, and takes
            # the refusal for fatal. It is for this client; the successor's initialisation aborts what may be open.
            if not is_invalid_transaction_state(error):
                raise
            raise TransactionOutcomeUnknown(str(error)) from error
        # What an abort purges is reported as failed deliveries: expected.
        self._deliveries.take_failure()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._calls.close()
        # Not librdkafka's own close: it would end an open transaction, and wait for a broker that may be away.
        # The successor's initialisation aborts what is open.
        with suppress(KafkaException):  # A client that is fenced or failed for good refuses even this.
            self._client.purge()
            self._client.poll(0)
        del self._client, self._deliveries  # The last references: ends librdkafka's threads.

    def _end(self, doing: str, call: Callable[[float], None]) -> None:
        started = self._monotonic_seconds()
        try:
            self._retried(doing, TRANSACTION_TIMEOUT_SECONDS, call)
            self._began_at_seconds = None
        except BrokerUnavailable as error:
            raise TransactionOutcomeUnknown(str(error)) from error
        finally:
            if self._monotonic_seconds() - started > SLOW_END_OF_TRANSACTION_SECONDS:
                self._needs_replacement = True

    @contextmanager
    def _own_timeout_told_apart(self) -> Generator[None]:
        """A fence after the timeout is most likely the broker's own: it ends what is open for too long."""
        try:
            yield
        except Fenced as error:
            if self._began_at_seconds is None:
                raise
            open_seconds = self._monotonic_seconds() - self._began_at_seconds
            if open_seconds < self._transaction_timeout_seconds:
                raise
            raise TransactionTimedOut(
                f"transactional id {self._id}: the transaction was open for {open_seconds:.1f} seconds, longer than "
                f"its timeout of {self._transaction_timeout_seconds:.1f}, and the broker fenced it: {error}"
            ) from error

    def _retried(self, doing: str, budget_seconds: float, call: Callable[[float], None]) -> None:
        """Calls again after retriable errors, as librdkafka asks, until the budget is spent."""
        deadline = self._monotonic_seconds() + budget_seconds
        while True:
            try:
                timeout_seconds = max(deadline - self._monotonic_seconds(), 0.1)
                self._call_within(call, timeout_seconds, f"transactional id {self._id}: {doing}")
            except FatalBusError:
                self._needs_replacement = True
                raise
            except KafkaException as exception:
                self._needs_replacement = True
                error = kafka_error(exception)
                if error.retriable() and self._monotonic_seconds() < deadline:
                    continue
                with self._own_timeout_told_apart():
                    raise translate(error, f"transactional id {self._id}: {doing}") from exception
            else:
                return

    def _call_within(self, call: Callable[[float], None], timeout_seconds: float, doing: str) -> None:
        """Calls with the timeout, and does not trust it.

        librdkafka 2.16 does not return from sending offsets when the broker is killed at the wrong moment, whatever
        timeout it was given (seen in `tests/faults`). The call is then left behind on its thread and FatalBusError
        raised: the process ends, and its successor's `init_transactions` aborts what is open.
        """
        allowed_seconds = timeout_seconds + self._overdue_seconds
        try:
            self._calls.call(lambda: call(timeout_seconds), what=doing, seconds=allowed_seconds)
        except TimeoutError:
            raise FatalBusError(
                f"{doing}: the Kafka client did not return {self._overdue_seconds:.0f} seconds after its own timeout "
                f"of {timeout_seconds:.1f}; start the process again"
            ) from None
