"""A key topic in memory, and processes that read it."""

import os
from collections.abc import Callable

import pytest

from clawstream import topics
from clawstream.bus.interface import TopicSpecification
from clawstream.bus.memory import MemoryBus
from clawstream.clock import ManualClock
from clawstream.encryption.master_key import MasterKey, MasterKeys
from clawstream.encryption.session_keys import SessionKeys

NAMESPACE = "test"
Process = Callable[..., SessionKeys]


@pytest.fixture
def bus() -> MemoryBus:
    made = MemoryBus()
    made.admin().create_topics([TopicSpecification(f"{NAMESPACE}.{topics.SESSION_KEYS}", 1)])
    return made


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def process(bus: MemoryBus, clock: ManualClock) -> Process:
    """Another process's view of the keys, with these master keys."""

    def start(*held: MasterKey | None, renews: bool = True) -> SessionKeys:
        masters = MasterKeys(lambda: [master for master in held if master is not None])
        return SessionKeys(bus, NAMESPACE, masters, source="tests", renews=renews, clock=clock, random_bytes=os.urandom)

    return start
