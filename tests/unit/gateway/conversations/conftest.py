"""What conversations are written to."""

import pytest

from clawstream.bus.memory import MemoryBus
from tests.fixtures.conversations import create_topics


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    create_topics(bus)
    return bus
