"""The suite's two buses."""

import pytest

from clawstream.bus.interface import Bus
from clawstream.bus.memory import MemoryBus
from tests.fixtures.buses import create_topic, kafka_bus


@pytest.fixture(
    params=[
        pytest.param("memory", marks=pytest.mark.memory),
        pytest.param("kafka", marks=pytest.mark.kafka),
    ]
)
def bus(request: pytest.FixtureRequest, namespace: str) -> Bus:
    if request.param == "memory":
        return MemoryBus()
    # Transactions stay open while these tests look at them, on a busy machine for longer than a service may.
    return kafka_bus(request.getfixturevalue("broker"), namespace, transaction_timeout_seconds=300.0)


@pytest.fixture
def topic(bus: Bus, namespace: str) -> str:
    """A topic of one partition."""
    return create_topic(bus, f"{namespace}.one.v1")


@pytest.fixture
def wide_topic(bus: Bus, namespace: str) -> str:
    """A topic of twelve partitions."""
    return create_topic(bus, f"{namespace}.wide.v1", 12)
