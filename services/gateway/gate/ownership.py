"""Which gateway commands the engines: the member of the group `weight-gate` that owns the partition of `weights`.

The group serves only as an election (classic protocol, static membership under the gateway's name, so that a quick
restart does not move the gate). Nothing is read through it: every gateway follows the topics by itself.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

from clawstream.bus.interface import Bus, RebalanceCallbacks, TopicPartition
from clawstream.errors import BrokerUnavailable, BusError, FatalBusError, Fenced
from clawstream.log import Logger

_POLL_SECONDS = 0.5
_RETRY_SECONDS = 1.0
_MAX_RECORDS = 500


class Ownership:
    """A member of the group, on a thread of its own."""

    def __init__(
        self,
        bus: Bus,
        *,
        weights_topic: str,
        group: str,
        gateway: str,
        acquired: Callable[[], None],
        released: Callable[[], Awaitable[None]],
        lost: Callable[[], None],
        failed: Callable[[Exception], None],
        release_seconds: float,
        logger: Logger,
    ) -> None:
        """The callbacks run in the event loop. `released` may take `release_seconds` to leave the engines in order;

        at `lost` another gateway may command them already; `failed` means that this process must exit.
        """
        self._bus = bus
        self._partition = TopicPartition(weights_topic, 0)
        self._group = group
        self._gateway = gateway
        self._acquired = acquired
        self._released = released
        self._lost = lost
        self._failed = failed
        self._release_seconds = release_seconds
        self._logger = logger
        self._loop = asyncio.get_running_loop()
        self._polled = asyncio.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-ownership", daemon=True)

    def start(self) -> None:
        """Joins the group."""
        self._thread.start()

    async def confirmed(self) -> None:
        """Returns after the broker has had the chance to say that the partition is ours no longer."""
        for _ in range(2):  # the first poll may have begun before this call
            await self._polled.wait()

    async def close(self) -> None:
        """Leaves the group, after `released` if this gateway was the owner."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._take_part()
            except (Fenced, FatalBusError) as error:
                self._loop.call_soon_threadsafe(self._lost)
                self._loop.call_soon_threadsafe(self._failed, error)
                return
            except BusError as error:
                self._logger.warning("the weight gate's group cannot be joined; trying again", error=str(error))
                self._stop.wait(_RETRY_SECONDS)

    def _take_part(self) -> None:
        callbacks = RebalanceCallbacks(self._on_assigned, self._on_revoked, self._on_lost)
        consumer = self._bus.group_consumer(
            [self._partition.topic], group=self._group, instance=self._gateway, callbacks=callbacks
        )
        try:
            while not self._stop.is_set():
                try:
                    consumer.consume(_MAX_RECORDS, _POLL_SECONDS)
                    self._loop.call_soon_threadsafe(self._poll_ended)
                except BrokerUnavailable as error:
                    # The engines stay in our care: nobody else can become the owner without a broker either, and
                    # commands need the log (see `GateOwner`), so that a cut-off owner does no harm.
                    self._logger.warning("no broker for the weight gate; trying again", error=str(error))
                    self._stop.wait(_RETRY_SECONDS)
            if self._partition in consumer.assignment():
                self._on_revoked([self._partition])
        finally:
            consumer.close()

    def _poll_ended(self) -> None:
        self._polled.set()
        self._polled = asyncio.Event()

    def _on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if self._partition in partitions:
            self._loop.call_soon_threadsafe(self._acquired)

    def _on_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        if self._partition not in partitions or self._loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._wait_for_release(), self._loop).result(self._release_seconds)
        except TimeoutError:
            self._logger.error("the weight gate was given up before all engines were left in order")

    async def _wait_for_release(self) -> None:
        await self._released()

    def _on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        if self._partition in partitions:
            self._loop.call_soon_threadsafe(self._lost)
