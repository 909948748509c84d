"""Topics of a test on the run's broker, and workers as processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.buses import kafka_bus
from tests.fixtures.workers import Scene

REPOSITORY = Path(__file__).parents[3]
StartWorker = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def scene(broker: str, namespace: str) -> Scene:
    return Scene(kafka_bus(broker, namespace), namespace, partitions=4)


@pytest.fixture
def start_worker(broker: str, namespace: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker process under a name. What still runs at the end is killed, by pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> "subprocess.Popen[bytes]":
        log = tmp_path / f"{name}-{len(started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.flow.worker.echo_worker", broker, namespace, name],
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
