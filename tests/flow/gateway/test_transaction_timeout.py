"""A real broker ends transactions that are open for too long: the gateway goes on, unless another took its name."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clawstream.bus.forwarding import ForwardingTransactionalProducer
from clawstream.bus.interface import TransactionalProducer
from clawstream.bus.kafka import KafkaBus
from clawstream.codec import decode_as
from clawstream.errors import Fenced, TransactionTimedOut
from clawstream.settings import KafkaSettings
from clawstream.topics import NEXT_STATES, TURNS
from schemas.events import NextStateEvent, TurnEvent
from tests.fixtures.conversations import (
    GatewayUnderTest,
    assistant,
    create_topics,
    records_of,
    running_gateway,
    until,
    user,
)

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

TRANSACTION_TIMEOUT_SECONDS = 10.0
"""librdkafka wants it to be no shorter than a request may take."""
GIVE_UP_SECONDS = 120.0


class StallingProducer(ForwardingTransactionalProducer):
    """A transactional producer whose next commit waits until the test lets it go on."""

    def __init__(self, inner: TransactionalProducer, stall: Callable[[], None]) -> None:
        super().__init__(inner)
        self._stall = stall

    def commit(self) -> None:
        self._stall()
        super().commit()


class StallingBus(KafkaBus):
    """`stall_next_commit`, then the transaction is held open until the broker has ended it."""

    def __init__(self, bootstrap_servers: str, namespace: str) -> None:
        super().__init__(
            KafkaSettings(bootstrap_servers=bootstrap_servers, namespace=namespace),
            client_id="stalling",
            transaction_timeout_seconds=TRANSACTION_TIMEOUT_SECONDS,
        )
        self._every_transaction_writes = f"{namespace}.outbox.v1"
        self._stalls_next = False
        self._then: Callable[[], None] = lambda: None
        self.stalls = 0

    def stall_next_commit(self, then: Callable[[], None] = lambda: None) -> None:
        """`then` is called when the broker has ended the transaction."""
        self._stalls_next = True
        self._then = then

    def transactional_producer(self, transactional_id: str) -> TransactionalProducer:
        return StallingProducer(super().transactional_producer(transactional_id), self._stall)

    def _stall(self) -> None:
        if not self._stalls_next:
            return
        self._stalls_next = False
        ends = self._ends()
        while self._ends() == ends:  # Moves when the broker writes its abort marker.
            time.sleep(0.1)
        self.stalls += 1
        self._then()

    def _ends(self) -> list[int]:
        admin, reader = self.admin(), self.reader()
        try:
            return [reader.watermarks(partition)[1] for partition in admin.partitions(self._every_transaction_writes)]
        finally:
            admin.close()
            reader.close()


@asynccontextmanager
async def stalling_gateway(bus: StallingBus, namespace: str, directory: Path) -> AsyncIterator[GatewayUnderTest]:
    create_topics(bus, namespace)
    async with running_gateway(bus, directory, namespace=namespace, close_drain_seconds=1) as gateway:
        yield gateway


async def drained(gateway: GatewayUnderTest) -> bool:
    return await asyncio.to_thread(gateway.conversations.drain.wait_until_drained, GIVE_UP_SECONDS)


async def test_a_gateway_that_held_its_transaction_too_long_sends_it_again(
    broker: str, namespace: str, tmp_path: Path
) -> None:
    bus = StallingBus(broker, namespace)
    async with stalling_gateway(bus, namespace, tmp_path) as gateway:
        first = await gateway.answer([user("a")], "the first answer")
        assert await drained(gateway)
        bus.stall_next_commit()
        history = [user("a"), assistant("the first answer"), user("b")]
        second = await gateway.answer(history, "the second answer")
        assert await drained(gateway)
        third = await gateway.answer([*history, assistant("the second answer"), user("c")], "the third answer")
        assert await drained(gateway)
        assert gateway.conversations.failure is None
    assert bus.stalls == 1
    turns = [(record, decode_as(record, TurnEvent)) for record in records_of(bus, TURNS, namespace)]
    assert [turn.turn_id for _, turn in turns] == [first.turn_id, second.turn_id, third.turn_id]
    places = {turn.turn_id: (record.partition, record.offset) for record, turn in turns}
    states = [decode_as(record, NextStateEvent) for record in records_of(bus, NEXT_STATES, namespace)]
    assert [state.turn_id for state in states] == [first.turn_id, second.turn_id]
    assert all((state.turn_ref.partition, state.turn_ref.offset) == places[state.turn_id] for state in states)


async def test_a_gateway_whose_name_was_taken_meanwhile_ends(broker: str, namespace: str, tmp_path: Path) -> None:
    bus, other_bus = StallingBus(broker, namespace), StallingBus(broker, namespace)
    async with stalling_gateway(bus, namespace, tmp_path / "one") as gateway:
        await gateway.answer([user("a")], "the first answer")
        assert await drained(gateway)
        taken = asyncio.Event()
        loop = asyncio.get_running_loop()

        def take_over() -> None:
            asyncio.run_coroutine_threadsafe(start_the_other(), loop).result(GIVE_UP_SECONDS)

        async def start_the_other() -> None:
            async with running_gateway(other_bus, tmp_path / "two", namespace=namespace) as other:
                await other.answer([user("x")], "an answer of the other")
                assert await drained(other)
            taken.set()

        bus.stall_next_commit(then=take_over)
        await gateway.answer([user("c")], "never on the log")
        await until(lambda: gateway.conversations.failure is not None)
        assert taken.is_set()
        assert isinstance(gateway.conversations.failure, Fenced)
        assert not isinstance(gateway.conversations.failure, TransactionTimedOut)
    turns = [decode_as(record, TurnEvent) for record in records_of(bus, TURNS, namespace)]
    assert sorted(str((turn.response_message or {}).get("content")) for turn in turns) == [
        "an answer of the other",
        "the first answer",
    ]
