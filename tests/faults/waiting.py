"""How the fault tests wait for what other processes do."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from clawstream.audit.kafka_log import KafkaLog
from clawstream.bus.interface import Delivery
from tests.fixtures.service_process import ServiceProcess

PATIENCE_SECONDS = 400.0
"""A machine that does much else takes minutes to import torch."""
_TEXT_CHARACTERS = 4000


def wait_until(condition: Callable[[], Any], what: str, *processes: ServiceProcess) -> None:
    """Fails at once when one of the processes ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        for each in processes:
            assert each.process.poll() is None, f"{what}: a process ended:\n{each.text()[-_TEXT_CHARACTERS:]}"
        texts = "\n".join(each.text()[-_TEXT_CHARACTERS:] for each in processes)
        assert time.monotonic() < deadline, f"in vain: {what}\n{texts}"
        time.sleep(0.1)


def positions(deliveries: Iterable[Delivery]) -> dict[int, int]:
    """Partition to the offset behind the last of them."""
    found: dict[int, int] = {}
    for each in deliveries:
        found[each.partition] = max(found.get(each.partition, 0), each.offset + 1)
    return found


def committed(second_opinion: KafkaLog, stage: str) -> dict[int, int]:
    """What a stage's group has handled, by partition."""
    return dict(second_opinion.committed()[stage])


def is_ready(url: str) -> bool:
    """Whether a gateway serves."""
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples on a `/metrics` page; 0 while there is none."""
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in found)
