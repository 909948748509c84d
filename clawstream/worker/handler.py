"""What a service implements: one input at a time, as many at once as the worker allows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from clawstream.bus.interface import Record, TopicPartition
from clawstream.errors import EngineTimeout
from clawstream.worker.outcomes import DeadLetter, Outcome


class Handler(ABC):
    """All methods run in the worker's event loop.

    `handle` may run for many records at once, and again for a record that was handled before a crash: its outputs must
    follow from the record, so their ids are the same again.
    """

    @abstractmethod
    async def handle(self, record: Record) -> Outcome:
        """What becomes of `record`.

        ContractError makes a dead letter (`undecodable`). RetryLater, EngineUnavailable, NoEngineReady and
        BrokerUnavailable mean an outage: the input stays unresolved, and `handle` is called again after a while.
        Fenced and FatalBusError stop the worker. Anything else makes a dead letter (`handler_failed`), also when
        something that it awaits is cancelled under it (`handler_cancelled`).
        Is cancelled at the deadline and when the worker stops. The deadline stands still inside of
        `clawstream.worker.deadline.waiting_for_a_turn`.
        """

    async def on_assigned(self, partitions: Mapping[TopicPartition, int | None]) -> None:  # noqa: B027 - optional
        """Partitions are ours, with the group's committed offsets. No record of theirs is handled before this returns.

        What it raises stops the worker.
        """

    async def on_released(self, partitions: Sequence[TopicPartition]) -> None:  # noqa: B027 - optional
        """Partitions are ours no more. Handling that is under way goes on, and its results are dropped; what meets an
        outage is not tried again.
        """

    async def on_deadline(self, record: Record, deadline_seconds: float) -> Outcome:
        """`handle` took too long and was cancelled. A handler that has a better answer than a dead letter gives it.

        What it raises means what it means of `handle`: in an outage it is called again after a while.
        """
        return DeadLetter("deadline", EngineTimeout(f"{record}: not handled within {deadline_seconds:.0f} seconds"))

    async def close(self) -> None:  # noqa: B027 - optional
        """The worker has stopped."""
