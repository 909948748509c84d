"""A worker as a process, for tests that kill it: `python -m tests.flow.worker.echo_worker BOOTSTRAP NAMESPACE NAME`.

An input becomes an output with the same value after a moment; `poison` cannot be decoded; `hang` never ends.
"""

import asyncio
import sys

from clawstream.bus.interface import OutgoingRecord, Record
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import SystemClock
from clawstream.errors import DecodeError
from clawstream.log import configure_logging
from clawstream.metrics import Metrics
from clawstream.settings import KafkaSettings, ServiceSettings
from clawstream.worker.handler import Handler
from clawstream.worker.outcomes import Outcome, Output
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.worker import EosWorker
from clawstream.worker_process import run_worker, stop_on_signals


class Echo(Handler):
    """Takes longer for some inputs than for others, so that they finish out of order."""

    def __init__(self, outputs: str) -> None:
        self._outputs = outputs

    async def handle(self, record: Record) -> Outcome:
        value = record.value or b""
        if value == b"hang":
            await asyncio.Event().wait()
        await asyncio.sleep(0.005 * (1 + record.offset % 7))
        if value.startswith(b"poison"):
            raise DecodeError(f"{record}: poison")
        return Output((OutgoingRecord(self._outputs, record.key, value, partition=record.partition),))


async def main(bootstrap_servers: str, namespace: str, name: str) -> None:
    """Runs until a signal."""
    settings = ServiceSettings(name=name, kafka=KafkaSettings(bootstrap_servers=bootstrap_servers, namespace=namespace))
    metrics, logger = Metrics(), configure_logging(settings.log, process=name)
    worker = EosWorker(
        KafkaBus(settings.kafka, client_id=name),
        Echo(f"{namespace}.outputs.v1"),
        input_topics=[f"{namespace}.inputs.v1"],
        dead_letter_topic=f"{namespace}.dlq.v1",
        group=f"{namespace}.worker",
        instance=name,
        transactional_id=f"{namespace}.worker.{name}",
        settings=WorkerSettings(shutdown_grace_seconds=120.0),
        metrics=metrics,
        clock=SystemClock(),
        logger=logger,
    )
    async with stop_on_signals() as stop:
        await run_worker(worker, settings, stop=stop, metrics=metrics, logger=logger)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
