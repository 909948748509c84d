"""The asyncio side of a worker: calls the handler, with a deadline and patience in outages."""

import asyncio
import queue
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.bus.interface import TopicPartition
from clawstream.clock import Clock
from clawstream.errors import (
    BrokerUnavailable,
    ContractError,
    EngineUnavailable,
    FatalBusError,
    Fenced,
    NoEngineReady,
    RetryLater,
)
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import DeadLetter, Outcome
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = False
        self._preparing: dict[TopicPartition, asyncio.Task[None]] = {}

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Handles these inputs. Each gives one result."""
        self._loop.call_soon_threadsafe(self._start_all, tickets)

    def assign(self, partitions: Mapping[TopicPartition, int | None]) -> None:
        """Tells the handler. Records of these partitions that are submitted later wait until it is ready."""
        self._loop.call_soon_threadsafe(self._prepare, partitions)

    def release(self, partitions: Sequence[TopicPartition]) -> None:
        """Tells the handler."""
        self._loop.call_soon_threadsafe(self._start, self._release(partitions))

    async def cancel(self) -> None:
        """Ends everything that is under way, without results."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_all(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._start(self._handle(ticket))

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
        except Exception as error:  # Given to the Kafka thread, which stops the worker with it.
            self._failed = True
            self.results.put(Failure(error))

    async def _release(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            await self._handler.on_released(partitions)
        except Exception as error:  # As above.
            self.results.put(Failure(error))

    async def _handle(self, ticket: Ticket) -> None:
        preparing = self._preparing.get(ticket.partition)
        if preparing is not None and not preparing.done():
            await asyncio.wait([preparing])
        if self._failed:
            return  # The handler is not prepared, and the worker stops.
        started = self._clock.monotonic_seconds()
        try:
            outcome = await self._outcome(ticket)
        except Exception as error:  # Given to the Kafka thread, which stops the worker: a ticket must never be lost.
            self.results.put(Failure(error))
            return
        self._metrics.observe("worker_handle_seconds", self._clock.monotonic_seconds() - started)
        self.results.put(Result(ticket, outcome))

    async def _outcome(self, ticket: Ticket) -> Outcome:
        """Tries until there is an outcome. An outage ends only when it ends; the deadline is for each attempt."""
        record, delay, attempt = ticket.record, self._settings.retry_initial_seconds, 0
        while True:
            attempt += 1
            deadline = asyncio.timeout(self._settings.deadline_seconds)
            try:
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
            except ContractError as error:
                return DeadLetter("undecodable", error, attempt)
            except Exception as error:  # The boundary of one input: it becomes a dead letter, the others go on.
                if deadline.expired():
                    return await self._handler.on_deadline(record, self._settings.deadline_seconds)
                self._log.exception("handling a record failed", record=str(record))
                return DeadLetter("handler_failed", error, attempt)
