"""The worker itself: reads, hands over, commits, and stops in good order."""

import asyncio
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from clawstream.bus.interface import Bus, Consumer, OutgoingRecord, RebalanceCallbacks, TopicPartition
from clawstream.clock import Clock
from clawstream.errors import (
    BrokerUnavailable,
    RecordRejected,
    TransactionAbortable,
    TransactionOutcomeUnknown,
)
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.worker.backpressure import Backpressure
from clawstream.worker.committer import Committer
from clawstream.worker.dead_letters import DeadLetterLimit
from clawstream.worker.flush_policy import FlushPolicy
from clawstream.worker.handler import Handler
from clawstream.worker.handling import Failure, HandlerPool
from clawstream.worker.outcome_records import OutcomeCounter, OutcomeRecords, SkipRecords
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.tracker import Ticket, Tracker
from clawstream.worker.waiting import wait_for_topics

_IDLE_SECONDS = 0.1
"""Nothing is under way: a new record ends the wait."""
_BUSY_SECONDS = 0.005
"""Results may come at any moment, and only a poll that ends looks for them."""
_MEMBERSHIP_SECONDS = 0.5
"""Without room for records the consumer is still asked this often: rebalances must not wait for us."""
_MAX_RECORDS = 100
_STATUS_SECONDS = 1.0
_FAILED_FLUSH_PAUSE_SECONDS = 0.2
_FAILED_FLUSH_MAX_SECONDS = 5.0
_LAST_FLUSHES_SECONDS = 5.0
"""At least so long the transactions of what is done may take before a partition goes or the worker ends."""


class EosWorker:
    """One member of a consumer group that turns inputs into outputs, exactly once within Kafka."""

    def __init__(
        self,
        bus: Bus,
        handler: Handler,
        *,
        input_topics: Sequence[str],
        dead_letter_topic: str,
        group: str,
        instance: str,
        transactional_id: str,
        settings: WorkerSettings,
        metrics: Metrics,
        clock: Clock,
        logger: Logger,
        skips: SkipRecords | None = None,
    ) -> None:
        """Topics are full names. `instance` and `transactional_id` must be stable over restarts of this process.

        With `skips`, a record says which inputs were skipped.
        """
        self._bus = bus
        self._handler = handler
        self._input_topics = tuple(input_topics)
        self._output_topics = (dead_letter_topic, *((skips.topic,) if skips is not None else ()))
        self._group = group
        self._instance = instance
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._log = logger
        self._committer = Committer(bus, transactional_id, metrics=metrics, clock=clock, logger=logger)
        self._tracker = Tracker(
            window_per_partition=settings.window_per_partition,
            # A partition whose inputs all hang leaves handlers to the others.
            max_in_flight_per_partition=settings.max_in_flight - settings.max_in_flight // 4,
        )
        # As many may wait as are under way: then a handler that is done finds work at once.
        self._backpressure = Backpressure(settings.window_per_partition, capacity=2 * settings.max_in_flight)
        self._flush_policy = FlushPolicy(settings.flush_ceiling_seconds, settings.flush_results)
        self._records = OutcomeRecords(dead_letter_topic=dead_letter_topic, skips=skips, group=group, clock=clock)
        limit = DeadLetterLimit(max_share=settings.max_dead_letter_share, window=settings.dead_letter_window)
        self._counter = OutcomeCounter(metrics=metrics, logger=logger, limit=limit)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._status: dict[str, Any] = {"state": "starting"}
        self._status_due = 0.0
        self._poll_due = 0.0
        self._failed_flushes = 0
        self._next_flush_at = 0.0

    async def run(self) -> None:
        """Runs until `request_stop`; returns once what was done is committed and the group knows.

        Raises what made going on impossible: Fenced, FatalBusError, OffsetNotRetained, TooManyDeadLetters, and what
        `on_assigned` raised. Then the process must end with an exit code other than 0.
        """
        self._pool = HandlerPool(
            self._handler, settings=self._settings, metrics=self._metrics, clock=self._clock, logger=self._log
        )
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # Cancelling `run` does not cancel the thread: it stops in good order.
        thread = threading.Thread(target=self._run_into, args=(ended,), name="worker-kafka", daemon=True)
        thread.start()
        try:
            await asyncio.wrap_future(ended)
        finally:
            self.request_stop()
            await asyncio.to_thread(thread.join)
            await self._pool.cancel()
            await self._handler.close()

    def request_stop(self) -> None:
        """Takes nothing new, lets what is under way finish for the grace time, commits, leaves. Thread-safe."""
        self._stop.set()

    def ready(self) -> bool:
        """Whether the worker is reading. Thread-safe."""
        return self._ready.is_set()

    def status(self) -> Mapping[str, Any]:
        """What it is doing, about once a second. Thread-safe."""
        return self._status

    # Everything below runs on the Kafka thread.

    def _run_into(self, ended: "Future[None]") -> None:
        try:
            self._read_and_commit()
        except BaseException as error:  # The thread's boundary: `run` raises it.
            self._status = {"state": "failed", "error": str(error)}
            self._ready.clear()
            ended.set_exception(error)
        else:
            self._status = {"state": "stopped"}
            self._ready.clear()
            ended.set_result(None)

    def _read_and_commit(self) -> None:
        topics = [*self._input_topics, *self._output_topics]
        if not wait_for_topics(self._bus, topics, stop=self._stop, logger=self._log):
            return
        if not self._first_producer():
            return
        callbacks = RebalanceCallbacks(self._on_assigned, self._on_revoked, self._on_lost)
        self._consumer: Consumer = self._bus.group_consumer(
            self._input_topics, group=self._group, instance=self._instance, callbacks=callbacks
        )
        try:
            self._ready.set()
            self._log.info("the worker reads", topics=self._input_topics, group=self._group)
            while not self._stop.is_set():
                self._step()
            self._drain()
            self._consumer.close()
        finally:
            # After an error nothing is committed any more: a restart reads it again.
            self._tracker.release(list(self._tracker.partitions()))
            self._consumer.close()
            self._committer.close()

    def _first_producer(self) -> bool:
        while not self._stop.is_set():
            try:
                self._committer.ensure_producer()
            except BrokerUnavailable as error:
                self._log.warning("waiting for the transaction coordinator", error=str(error))
                self._stop.wait(_FAILED_FLUSH_PAUSE_SECONDS)
            else:
                return True
        return False

    def _step(self) -> None:
        self._collect()
        self._dispatch()  # Before a transaction: handlers have work while it lasts.
        self._flush_if_due()
        in_hand = self._tracker.occupying()
        change = self._backpressure.update(in_hand, self._tracker.heads(), self._clock.monotonic_seconds())
        if change.pause:
            self._consumer.pause(change.pause)
        if change.resume:
            self._consumer.resume(change.resume)
        room = min(_MAX_RECORDS, self._backpressure.room(in_hand))
        now = self._clock.monotonic_seconds()
        if room > 0 or now >= self._poll_due:
            self._poll_due = now + _MEMBERSHIP_SECONDS
            wait = 0.0 if room == 0 else _BUSY_SECONDS if any(in_hand.values()) else _IDLE_SECONDS
            for record in self._consumer.consume(max(room, 1), wait):
                self._tracker.start(record)
            self._dispatch()
        else:
            self._collect(_BUSY_SECONDS)
        self._report()

    def _collect(self, wait_seconds: float = 0.0) -> None:
        """Takes in what handlers have finished, waiting at most so long for the first."""
        try:
            result = self._pool.results.get(block=wait_seconds > 0, timeout=wait_seconds)
            while True:
                if isinstance(result, Failure):
                    raise result.error
                if not self._tracker.resolve(result.ticket, result.outcome):
                    self._metrics.increment("worker_late_results_total")
                result = self._pool.results.get_nowait()
        except queue.Empty:
            return

    def _dispatch(self) -> None:
        free = self._settings.max_in_flight - self._tracker.in_flight
        tickets = self._tracker.dispatch(free) if free > 0 else []
        if tickets:
            self._pool.submit(tickets)

    def _flush_if_due(self) -> None:
        now = self._clock.monotonic_seconds()
        if now < self._next_flush_at:
            return
        if self._flush_policy.due(self._tracker.completed_count, self._tracker.in_flight, now):
            self._flush()

    def _flush(self) -> bool:
        """One transaction. False when it failed; what it was to write is kept for the next one."""
        records: list[tuple[OutgoingRecord, Ticket]] = []
        started = self._clock.monotonic_seconds()
        try:
            self._note_committed(self._committer.settle(self._consumer.committed))
            prefixes = self._tracker.completed(self._settings.max_results_per_transaction)
            if not prefixes:
                return True
            records = self._records.of(prefixes)
            offsets = {prefix.partition: prefix.next_offset for prefix in prefixes}
            self._committer.commit([record for record, _ in records], offsets, self._consumer.group_metadata())
        except RecordRejected as error:
            ticket, outcome = self._records.instead_of_refused(error, records)
            self._log.error("a record was refused", record=str(ticket.record), error=str(error))
            self._tracker.replace_outcome(ticket, outcome)
            return False
        except (TransactionAbortable, TransactionOutcomeUnknown, BrokerUnavailable) as error:
            pause = min(_FAILED_FLUSH_PAUSE_SECONDS * 2**self._failed_flushes, _FAILED_FLUSH_MAX_SECONDS)
            self._failed_flushes += 1
            self._next_flush_at = self._clock.monotonic_seconds() + pause
            self._log.warning("a transaction failed; its results are kept", error=str(error), again_in_seconds=pause)
            return False
        self._failed_flushes = 0
        self._next_flush_at = 0.0
        self._flush_policy.flushed(self._clock.monotonic_seconds() - started)
        self._note_committed(offsets)
        return True

    def _note_committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._counter.count(
            [each for partition, offset in offsets.items() for each in self._tracker.advance(partition, offset)]
        )

    def _drain(self) -> None:
        """What is under way may finish; what is not done in time, or was not begun, is given back unread."""
        self._status = {"state": "stopping"}
        self._log.info(
            "stopping", in_flight=self._tracker.in_flight, grace_seconds=self._settings.shutdown_grace_seconds
        )
        deadline = self._clock.monotonic_seconds() + self._settings.shutdown_grace_seconds
        self._consumer.pause(self._consumer.assignment())
        while self._tracker.in_flight > 0 and self._clock.monotonic_seconds() < deadline:
            self._collect()
            self._flush_if_due()
            self._consumer.consume(1, _BUSY_SECONDS)  # Keeps the membership. What it may give is not taken in.
        self._collect()
        # What is done is committed, also when the grace time went by waiting for what is not.
        deadline = max(deadline, self._clock.monotonic_seconds() + _LAST_FLUSHES_SECONDS)
        while self._tracker.completed_count > 0 and self._clock.monotonic_seconds() < deadline:
            if not self._flush():
                self._consumer.consume(1, _FAILED_FLUSH_PAUSE_SECONDS)
        self._log.info("stopped", given_back=sum(self._tracker.unfinished().values()))

    def _report(self) -> None:
        now = self._clock.monotonic_seconds()
        if now < self._status_due:
            return
        self._status_due = now + _STATUS_SECONDS
        oldest = self._tracker.oldest_unresolved_milliseconds()
        age_seconds = max(self._clock.now().timestamp() - oldest / 1000, 0.0) if oldest is not None else 0.0
        self._metrics.set("worker_in_flight", self._tracker.in_flight)
        self._metrics.set("worker_oldest_unresolved_seconds", age_seconds)
        self._status = {
            "state": "reading",
            "partitions": [str(partition) for partition in sorted(self._tracker.partitions())],
            "in_flight": self._tracker.in_flight,
            "unfinished": sum(self._tracker.unfinished().values()),
            "oldest_unresolved_seconds": round(age_seconds, 3),
            "failed_transactions_in_a_row": self._failed_flushes,
        }

    # Inside `consume` or `close`:

    def _on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._log.info("partitions assigned", partitions=[str(each) for each in partitions])
        try:
            committed: Mapping[TopicPartition, int | None] = self._consumer.committed(partitions)
        except BrokerUnavailable:
            committed = dict.fromkeys(partitions)  # Unknown: a handler then prepares as for a new group.
        self._tracker.assign(partitions)
        self._backpressure.forget(partitions)
        self._pool.assign(committed)

    def _on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """First commit what is done, then drop the rest: in the other order it would be handled twice."""
        try:
            self._collect()
            deadline = self._clock.monotonic_seconds() + _LAST_FLUSHES_SECONDS
            while self._tracker.has_completed(partitions) and self._clock.monotonic_seconds() < deadline:
                if not self._flush():
                    time.sleep(_FAILED_FLUSH_PAUSE_SECONDS)
        finally:
            self._give_up("partitions revoked", partitions)

    def _on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._give_up("partitions lost", partitions)

    def _give_up(self, event: str, partitions: Sequence[TopicPartition]) -> None:
        unfinished = self._tracker.unfinished()
        self._tracker.release(partitions)
        self._log.info(
            event,
            partitions=[str(each) for each in partitions],
            unfinished=sum(unfinished.get(each, 0) for each in partitions),
        )
        self._pool.release(partitions)
