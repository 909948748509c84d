"""The asyncio side of a worker: calls the handler, with a deadline and patience in outages."""

import asyncio
import queue
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from clawstream.bus.interface import Record, TopicPartition
from clawstream.clock import Clock
from clawstream.errors import (
    BrokerUnavailable,
    ContractError,
    EngineTimeout,
    EngineUnavailable,
    FatalBusError,
    Fenced,
    ForgottenContent,
    HandlerCancelled,
    NoEngineReady,
    RetryLater,
)
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.worker.deadline import Deadlines
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import DeadLetter, Outcome, Skip
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.tracker import Ticket

_OUTAGES = (RetryLater, EngineUnavailable, NoEngineReady, BrokerUnavailable)


@dataclass(frozen=True, slots=True)
class Result:
    """An input was handled."""

    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker must stop."""

    error: BaseException


Results = queue.SimpleQueue[Result | Failure]
"""From the loop to the Kafka thread."""


class HandlerPool:
    """Runs handlers in the event loop that was running when it was made. `submit`, `assign` and `release` may be called
    from any thread; what they start comes in the order of the calls.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        settings: WorkerSettings,
        metrics: Metrics,
        clock: Clock,
        logger: Logger,
    ) -> None:
        self.results: Results = queue.SimpleQueue()
        self._handler = handler
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._log = logger
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(settings.deadline_seconds)
        self._waiting: deque[Ticket] = deque()
        """Inputs that no task has taken up."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = False
        self._cancelling = False
        self._preparing: dict[TopicPartition, asyncio.Task[None]] = {}
        self._given_up: dict[TopicPartition, int] = {}
        """Partitions that were taken from us, and the newest epoch that we had of each: nobody waits for its inputs."""
        self._epochs: dict[TopicPartition, int] = {}

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Handles these inputs. Each gives one result, unless its partition is released meanwhile."""
        self._loop.call_soon_threadsafe(self._start_all, tickets)

    def assign(self, partitions: Mapping[TopicPartition, int | None]) -> None:
        """Tells the handler. Records of these partitions that are submitted later wait until it is ready."""
        self._loop.call_soon_threadsafe(self._prepare, partitions)

    def release(self, partitions: Sequence[TopicPartition]) -> None:
        """Tells the handler. Attempts that are under way go on; what fails in an outage is not tried again."""
        self._loop.call_soon_threadsafe(self._give_up, partitions)

    async def cancel(self) -> None:
        """Ends everything that is under way, without results."""
        self._cancelling = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_all(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._epochs[ticket.partition] = ticket.epoch
        self._waiting.extend(tickets)
        self._start_lane()

    def _start_lane(self) -> None:
        """Handlers run side by side: while one awaits something, the next input has a task of its own.

        Not a task for each input in any case: one that nothing has to be awaited for is handled in a fraction of the
        time in which a task comes and goes.
        """
        if self._waiting and not self._cancelling:
            self._start(self._lane())
            self._loop.call_soon(self._start_lane)  # Not before the new one has begun, and awaits something.

    async def _lane(self) -> None:
        """Ends when nothing waits, or when its task is not as it was: no input may inherit a cancellation, or context
        variables, from the one before. What waits then is the next lane's: one begins as long as anything does.
        """
        task = asyncio.current_task(self._loop)
        assert task is not None  # A coroutine runs in a task.
        context = copy_context()
        while self._waiting and not task.cancelling() and copy_context() == context:
            await self._handle(self._waiting.popleft())

    def _give_up(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self._given_up[partition] = self._epochs.get(partition, 0)
        self._start(self._release(partitions))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _prepare(self, partitions: Mapping[TopicPartition, int | None]) -> None:
        task = self._start(self._assign(partitions))
        for partition in partitions:
            self._preparing[partition] = task

    async def _assign(self, partitions: Mapping[TopicPartition, int | None]) -> None:
        try:
            await self._handler.on_assigned(partitions)
        except (Exception, asyncio.CancelledError) as error:  # Given to the Kafka thread, which stops the worker.
            self._failed = True
            self._fail(error, "on_assigned")

    async def _release(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            await self._handler.on_released(partitions)
        except (Exception, asyncio.CancelledError) as error:  # As above.
            self._fail(error, "on_released")

    def _fail(self, error: BaseException, doing: str) -> None:
        """Stops the worker with `error`. A cancellation is ours when the worker stops already, else a failure too."""
        if isinstance(error, asyncio.CancelledError):
            if self._cancelling:
                raise error
            error = _cancelled(doing)
        self.results.put(Failure(error))

    async def _handle(self, ticket: Ticket) -> None:
        """Every ticket ends here: with a result, with the worker's failure, or with the worker."""
        preparing = self._preparing.get(ticket.partition)
        if preparing is not None and not preparing.done():
            await asyncio.wait([preparing])
        if self._failed:
            return  # The handler is not prepared, and the worker stops.
        started = self._clock.monotonic_seconds()
        try:
            outcome = await self._outcome(ticket)
        except (Exception, asyncio.CancelledError) as error:  # As above.
            self._fail(error, str(ticket.record))
            return
        if outcome is None:
            return  # The partition is not ours any more: its new owner handles the input.
        self._metrics.observe("worker_handle_seconds", self._clock.monotonic_seconds() - started)
        self.results.put(Result(ticket, outcome))

    async def _outcome(self, ticket: Ticket) -> Outcome | None:
        """Tries until there is an outcome. An outage ends only when it ends; the deadline is for each attempt.

        None when the input's partition was taken from us in an outage.
        """
        record, delay, attempt, is_late = ticket.record, self._settings.retry_initial_seconds, 0, False
        while ticket.epoch > self._given_up.get(ticket.partition, 0):
            deadline = self._deadlines.begin()
            try:
                if is_late:
                    return await self._past_deadline(record, attempt)
                attempt += 1
                async with deadline:
                    return await self._handler.handle(record)
            except _OUTAGES as outage:
                least = outage.retry_after_seconds if isinstance(outage, RetryLater | NoEngineReady) else 0.0
                wait = max(delay, least)
                self._log.warning(
                    "cannot handle a record now", record=str(record), error=str(outage), again_in_seconds=wait
                )
                await asyncio.sleep(wait)
                delay = min(2 * delay, self._settings.retry_max_seconds)
            except (Fenced, FatalBusError):
                raise
            except ForgottenContent:
                return Skip("forgotten")
            except ContractError as error:
                return DeadLetter("undecodable", error, attempt)
            except asyncio.CancelledError:
                # Ours, when the worker stops. Else something that the handler awaited was cancelled under it, which
                # asyncio cannot tell from the end of this task: without an outcome its partition would stand still.
                if self._cancelling:
                    raise
                self._log.exception("handling a record was cancelled", record=str(record))
                return DeadLetter("handler_cancelled", _cancelled(str(record)), attempt)
            except Exception as error:  # The boundary of one input: it becomes a dead letter, the others go on.
                if deadline.expired():
                    is_late = True
                    continue
                self._log.exception("handling a record failed", record=str(record))
                return DeadLetter("handler_failed", error, attempt)
        return None

    async def _past_deadline(self, record: Record, attempt: int) -> Outcome:
        """The handler's better answer, if it has one in time."""
        seconds = self._settings.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._handler.on_deadline(record, seconds)
        except TimeoutError:
            overdue = EngineTimeout(f"{record}: not handled within {seconds:.0f} seconds, nor any time later")
            return DeadLetter("deadline", overdue, attempt)


def _cancelled(doing: str) -> HandlerCancelled:
    return HandlerCancelled(f"{doing}: something that the handler awaited was cancelled, though the worker goes on")
