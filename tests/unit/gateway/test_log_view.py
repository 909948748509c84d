"""The gate's view of the log: a record that cannot be applied is never passed over."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.bus.memory import MemoryBus
from clawstream.errors import BrokerUnavailable
from clawstream.log import get_logger
from services.gateway.gate.log_view import LogView
from tests.fixtures.buses import create_topic

TOPIC = "clawstream.weights.v1"


class Scene:
    """A topic, and what came of its records."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        create_topic(self.bus, TOPIC)
        self.applied: list[bytes] = []
        self.failures: list[Exception] = []
        self.failed = asyncio.Event()
        self.views: list[LogView] = []

    def view(self) -> LogView:
        def apply(record: Record) -> None:
            if record.value == b"bad":
                raise ZeroDivisionError("a bug")
            self.applied.append(record.value or b"")

        def on_fatal(error: Exception) -> None:
            self.failures.append(error)
            self.failed.set()

        view = LogView(self.bus, [TOPIC], apply=apply, on_fatal=on_fatal, logger=get_logger())
        self.views.append(view)
        view.start()
        return view

    def write(self, *values: bytes) -> None:
        producer = self.bus.producer()
        for value in values:
            producer.produce(OutgoingRecord(TOPIC, b"k", value, partition=0))
        producer.flush(5)
        producer.close()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    for view in made.views:
        await view.close()


async def test_a_record_that_cannot_be_applied_ends_the_process_and_nothing_after_it_counts(scene: Scene) -> None:
    scene.write(b"one", b"bad", b"two")
    view = scene.view()
    async with asyncio.timeout(30):
        await scene.failed.wait()
    await view.close()
    await asyncio.sleep(0)  # what the thread had still handed over
    assert scene.applied == [b"one"]
    assert [type(error) for error in scene.failures] == [ZeroDivisionError]
    assert not view.caught_up.is_set()


@pytest.mark.parametrize(
    ("error", "ends"), [(lambda: BrokerUnavailable("away"), False), (lambda: ZeroDivisionError("a bug"), True)]
)
async def test_an_outage_is_tried_again_and_anything_else_ends_the_process(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], ends: bool
) -> None:
    real = scene.bus.reader
    calls = 0

    def failing_once() -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error()
        return real()

    monkeypatch.setattr(scene.bus, "reader", failing_once)
    scene.write(b"one")
    view = scene.view()
    async with asyncio.timeout(30):
        await (scene.failed if ends else view.caught_up).wait()
    assert bool(scene.failures) == ends
