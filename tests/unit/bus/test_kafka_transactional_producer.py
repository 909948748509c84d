"""The transactional producer over a librdkafka that a test plays: when it must be replaced, and what errors mean."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from clawstream.bus.interface import OutgoingRecord
from clawstream.bus.kafka_properties import SLOW_END_OF_TRANSACTION_SECONDS, TRANSACTION_TIMEOUT_SECONDS
from clawstream.bus.kafka_transactional_producer import KafkaTransactionalProducer
from clawstream.errors import (
    FatalBusError,
    Fenced,
    RecordRejected,
    TransactionAbortable,
    TransactionOutcomeUnknown,
    TransactionTimedOut,
)


class FakeLibrdkafka:
    """Every call takes `seconds` on a clock of its own and raises what `errors` holds for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, list[KafkaError]] = {}
        self.delivery_error: KafkaError | None = None
        self.calls: list[str] = []
        self._deliveries: list[Callable[[], None]] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.now += self.seconds.get(name, 0.0)
        if self.errors.get(name):
            raise KafkaException(self.errors[name].pop(0))

    def init_transactions(self, timeout: float) -> None:
        self._call("init")

    def begin_transaction(self) -> None:
        self._call("begin")

    def commit_transaction(self, timeout: float) -> None:
        self.poll(0)
        self._call("commit")

    def abort_transaction(self, timeout: float) -> None:
        self._call("abort")

    def produce(self, topic: str, **arguments: Any) -> None:
        self._deliveries.append(lambda: arguments["on_delivery"](self.delivery_error, None))

    def poll(self, timeout: float) -> int:
        return 0

    def flush(self, timeout: float) -> int:
        self._call("flush")
        return 0

    def purge(self) -> None:
        self._call("purge")

    def deliver(self) -> None:
        for delivery in self._deliveries:
            delivery()


def producer_over(fake: FakeLibrdkafka) -> KafkaTransactionalProducer:
    return KafkaTransactionalProducer(
        {},
        transactional_id="t",
        client=fake,  # pyright: ignore[reportArgumentType] - plays the part that is used
        monotonic_seconds=lambda: fake.now,
    )


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize(
    ("seconds", "replaced"),
    [(0.01, False), (SLOW_END_OF_TRANSACTION_SECONDS - 0.01, False), (SLOW_END_OF_TRANSACTION_SECONDS + 0.01, True)],
)
def test_a_slow_end_asks_for_a_new_producer_though_it_succeeded(end: str, seconds: float, replaced: bool) -> None:
    fake = FakeLibrdkafka()
    fake.seconds[end] = seconds
    producer = producer_over(fake)
    producer.begin()
    getattr(producer, end)()
    assert producer.needs_replacement is replaced


def test_a_retriable_error_is_tried_again_and_still_asks_for_a_new_producer() -> None:
    fake = FakeLibrdkafka()
    fake.errors["commit"] = [KafkaError(KafkaError._TIMED_OUT, "slow", retriable=True)]
    producer = producer_over(fake)
    producer.begin()
    producer.commit()
    assert fake.calls.count("commit") == 2
    assert producer.needs_replacement


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KafkaError(KafkaError.ILLEGAL_GENERATION, "moved", txn_requires_abort=True), TransactionAbortable),
        (KafkaError(KafkaError._FENCED, "fenced", fatal=True), Fenced),
        (KafkaError(KafkaError.PRODUCER_FENCED, "newer epoch", txn_requires_abort=True), Fenced),
        (KafkaError(KafkaError._FATAL, "Fatal error: Static consumer fenced by other consumer"), Fenced),
        (KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "broken", fatal=True), FatalBusError),
    ],
)
def test_an_error_of_commit_means_what_librdkafka_says(error: KafkaError, expected: type[Exception]) -> None:
    fake = FakeLibrdkafka()
    fake.errors["commit"] = [error]
    producer = producer_over(fake)
    producer.begin()
    with pytest.raises(expected, match="transactional id t: committing"):
        producer.commit()
    assert producer.needs_replacement


def test_a_commit_that_is_never_answered_has_an_unknown_outcome() -> None:
    fake = FakeLibrdkafka()
    fake.seconds["commit"] = TRANSACTION_TIMEOUT_SECONDS / 2
    fake.errors["commit"] = [KafkaError(KafkaError._TIMED_OUT, "slow", retriable=True) for _ in range(10)]
    producer = producer_over(fake)
    producer.begin()
    with pytest.raises(TransactionOutcomeUnknown):
        producer.commit()
    assert producer.needs_replacement
    assert fake.calls.count("commit") == 2, "not for ever"


@pytest.mark.parametrize("code", [KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT])
def test_what_an_abort_purged_is_no_failure(code: int) -> None:
    fake = FakeLibrdkafka()
    fake.delivery_error = KafkaError(code)
    producer = producer_over(fake)
    producer.begin()
    producer.produce(OutgoingRecord("t", b"k", b"v"))
    fake.deliver()
    producer.abort()
    producer.flush(1)
    assert not producer.needs_replacement


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KafkaError(KafkaError._FENCED, "by a newer instance", fatal=True), Fenced),
        (KafkaError(KafkaError._FATAL, "it is over", fatal=True), FatalBusError),
    ],
)
def test_a_fatal_error_that_a_flush_raises_is_one_of_ours(error: KafkaError, expected: type[Exception]) -> None:
    """librdkafka's own flush raises it, whatever has failed."""
    fake = FakeLibrdkafka()
    fake.errors["flush"] = [error]
    producer = producer_over(fake)
    producer.begin()
    with pytest.raises(expected):
        producer.flush(1)
    assert producer.needs_replacement


def test_a_delivery_that_is_too_large_is_named_by_commit() -> None:
    fake = FakeLibrdkafka()
    fake.delivery_error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    fake.errors["commit"] = [KafkaError(KafkaError._FAIL, "delivery failed", txn_requires_abort=True)]
    producer = producer_over(fake)
    record = OutgoingRecord("t", b"k", b"v")
    producer.begin()
    producer.produce(record)
    fake.deliver()
    with pytest.raises(RecordRejected) as caught:
        producer.commit()
    assert caught.value.record is record


def test_close_does_not_end_a_transaction() -> None:
    fake = FakeLibrdkafka()
    producer = producer_over(fake)
    producer.begin()
    producer.close()
    producer.close()
    assert fake.calls == ["init", "begin", "purge"]


def test_a_call_that_never_returns_is_fatal() -> None:
    """librdkafka may hang in a call whatever its timeout: the process must end instead of waiting for ever."""
    fake = FakeLibrdkafka()
    released = threading.Event()
    fake.commit_transaction = lambda timeout: released.wait()  # type: ignore[method-assign] - the played client hangs
    producer = KafkaTransactionalProducer(
        {},
        transactional_id="test",
        client=fake,  # pyright: ignore[reportArgumentType] - a played client
        monotonic_seconds=iter(range(0, 1_000_000, int(TRANSACTION_TIMEOUT_SECONDS) + 5)).__next__,
    )
    producer.begin()
    producer._overdue_seconds = 0.05  # pyright: ignore[reportPrivateUsage] - only the commit may not take long
    with pytest.raises(FatalBusError, match="did not return"):
        producer.commit()
    assert producer.needs_replacement
    released.set()


@pytest.mark.parametrize(
    ("open_seconds", "expected"),
    [(TRANSACTION_TIMEOUT_SECONDS - 0.1, Fenced), (TRANSACTION_TIMEOUT_SECONDS + 0.1, TransactionTimedOut)],
)
def test_a_fence_after_the_timeout_is_told_apart(open_seconds: float, expected: type[Exception]) -> None:
    fake = FakeLibrdkafka()
    producer = producer_over(fake)
    producer.begin()
    fake.now += open_seconds
    fake.errors["commit"] = [KafkaError(KafkaError._FENCED, "fenced", fatal=True)]
    with pytest.raises(Fenced) as caught:
        producer.commit()
    assert type(caught.value) is expected


def test_a_fence_of_the_next_transaction_is_measured_from_its_own_begin() -> None:
    fake = FakeLibrdkafka()
    producer = producer_over(fake)
    producer.begin()
    fake.now += TRANSACTION_TIMEOUT_SECONDS - 1
    producer.commit()
    fake.now += TRANSACTION_TIMEOUT_SECONDS
    fake.errors["begin"] = [KafkaError(KafkaError._FENCED, "fenced", fatal=True)]
    with pytest.raises(Fenced) as caught:
        producer.begin()
    assert type(caught.value) is Fenced


def test_a_producer_that_failed_for_good_can_be_closed() -> None:
    fake = FakeLibrdkafka()
    fake.errors["purge"] = [KafkaError(KafkaError._FENCED, "fenced", fatal=True)]
    producer = producer_over(fake)
    producer.close()
    assert fake.calls == ["init", "purge"]
