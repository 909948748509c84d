"""Topics of a test on the run's broker, and workers as processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.buses import kafka_bus
from tests.fixtures.workers import Scene

REPOSITORY = Path(__file__).parents[3]
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class WorkerProcess:
    """A process that a test started and may kill."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_until_reading(self) -> None:
        """Before that, a signal finds no handler."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "the worker reads" not in self.log.read_text(errors="replace"):
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_seconds: float) -> int:
        return self.process.wait(timeout_seconds)


StartWorker = Callable[[str], WorkerProcess]


@pytest.fixture
def scene(broker: str, namespace: str) -> Scene:
    return Scene(kafka_bus(broker, namespace), namespace, partitions=4)


@pytest.fixture
def start_worker(broker: str, namespace: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts a worker process under a name. What still runs at the end is killed, by pid."""
    started: list[WorkerProcess] = []

    def start(name: str) -> WorkerProcess:
        log = tmp_path / f"{name}-{len(started)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.flow.worker.echo_worker", broker, namespace, name],
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        started.append(WorkerProcess(process, log))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.signal(signal.SIGKILL)
            worker.wait(120)
