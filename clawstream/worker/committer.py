"""Short transactions: outputs, dead letters and offsets of some inputs, all or nothing.

No call to anything but Kafka happens in here. A transaction that failed is aborted and its producer replaced: a late
end of the old transaction cannot touch the next one then. The inputs' outcomes are still with the caller, who sends
them again: nothing is handled twice.
"""

from collections.abc import Callable, Mapping, Sequence

from clawstream.bus.interface import (
    Bus,
    GroupMetadata,
    OutgoingRecord,
    TopicPartition,
    TransactionalProducer,
)
from clawstream.clock import Clock
from clawstream.errors import (
    BrokerUnavailable,
    BusError,
    FatalBusError,
    Fenced,
    TransactionAbortable,
    TransactionOutcomeUnknown,
)
from clawstream.log import Logger
from clawstream.metrics import Metrics

CommittedOffsets = Callable[[Sequence[TopicPartition]], Mapping[TopicPartition, int | None]]


class Committer:
    """Owns the transactional producer of a worker. For the Kafka thread alone."""

    def __init__(
        self,
        bus: Bus,
        transactional_id: str,
        *,
        metrics: Metrics,
        clock: Clock,
        logger: Logger,
    ) -> None:
        """Connects later, in `ensure_producer`."""
        self._bus = bus
        self._id = transactional_id
        self._metrics = metrics
        self._clock = clock
        self._log = logger
        self._producer: TransactionalProducer | None = None
        self._undecided: dict[TopicPartition, int] = {}

    def ensure_producer(self) -> None:
        """Makes, or replaces, the producer where that is needed. Raises BrokerUnavailable, Fenced, FatalBusError."""
        if self._producer is not None and self._producer.needs_replacement:
            self._drop_producer()
        if self._producer is None:
            self._producer = self._bus.transactional_producer(self._id)

    def settle(self, committed_offsets: CommittedOffsets) -> dict[TopicPartition, int]:
        """What the group has committed, if an earlier commit was not answered; else nothing.

        The new producer's initialisation decided the old transaction, so the group's offsets now tell whether its
        outputs are on the log. Raises BrokerUnavailable.
        """
        self.ensure_producer()
        if not self._undecided:
            return {}
        found = committed_offsets(list(self._undecided))
        decided = {
            partition: wanted
            for partition, wanted in self._undecided.items()
            if (offset := found.get(partition)) is not None and offset >= wanted
        }
        self._log.info("a transaction without an answer is decided", committed=bool(decided))
        self._undecided = {}
        return decided

    def commit(
        self, records: Sequence[OutgoingRecord], offsets: Mapping[TopicPartition, int], group: GroupMetadata
    ) -> None:
        """One transaction. `settle` must have been called before.

        Raises TransactionAbortable when nothing was written and it may be tried again (RecordRejected: not as it is),
        TransactionOutcomeUnknown when only `settle` can tell, Fenced and FatalBusError.
        """
        assert self._producer is not None
        started = self._clock.monotonic_seconds()
        try:
            self._producer.begin()
            for record in records:
                self._producer.produce(record)
            self._producer.send_offsets(offsets, group)
            self._producer.commit()
        except TransactionOutcomeUnknown:
            self._undecided = dict(offsets)
            self._drop_producer()
            raise
        except (Fenced, FatalBusError):
            self._metrics.increment("worker_transactions_total", result="fatal")
            raise
        except BusError as error:
            self._abort()
            if isinstance(error, TransactionAbortable):
                raise
            raise TransactionAbortable(str(error)) from error
        took = self._clock.monotonic_seconds() - started
        self._metrics.observe("worker_flush_seconds", took)
        self._metrics.increment("worker_transactions_total", result="commit")

    def close(self) -> None:
        """Releases the producer. What is open is aborted by a successor, or when its time is over."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def _abort(self) -> None:
        assert self._producer is not None
        self._metrics.increment("worker_transactions_total", result="abort")
        try:
            self._producer.abort()
        except (TransactionOutcomeUnknown, TransactionAbortable, BrokerUnavailable) as error:
            self._log.warning("the abort was not answered; the next producer's start aborts", error=str(error))
        self._drop_producer()

    def _drop_producer(self) -> None:
        """Whatever the old instance still has under way loses its epoch when the next one is initialised."""
        self._metrics.increment("worker_transactions_total", result="producer_replaced")
        self.close()
