"""Runs one worker as a process: operations port, signals, an exit code that tells a supervisor what to do."""

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from clawstream.bus.interface import Bus
from clawstream.clock import Clock
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.operations_server import OperationsServer
from clawstream.settings import ServiceSettings
from clawstream.stages import Stage
from clawstream.topics import SKIPS, full_name
from clawstream.worker.handler import Handler
from clawstream.worker.outcome_records import SkipRecords
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.worker import EosWorker

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def stop_on_signals() -> AsyncGenerator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets. The second one ends the process at once, as if there was none."""
    stop = threading.Event()
    loop = asyncio.get_running_loop()

    def first_signal() -> None:
        stop.set()
        for each in _SIGNALS:
            loop.remove_signal_handler(each)

    for each in _SIGNALS:
        loop.add_signal_handler(each, first_signal)
    try:
        yield stop
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)


def stage_worker(
    bus: Bus,
    handler: Handler,
    stage: Stage,
    settings: ServiceSettings,
    worker_settings: WorkerSettings,
    *,
    metrics: Metrics,
    clock: Clock,
    logger: Logger,
) -> EosWorker:
    """The worker of a stage in this process.

    Its group is the stage's; the process's name, which is stable over restarts, is its place in the group and the end
    of its transactional id.
    """
    namespace = settings.kafka.namespace
    group = full_name(namespace, stage.name)
    return EosWorker(
        bus,
        handler,
        input_topics=[full_name(namespace, stage.input_topic)],
        dead_letter_topic=full_name(namespace, stage.dead_letter_topic),
        group=group,
        instance=settings.name,
        transactional_id=f"{group}.{settings.name}",
        settings=worker_settings,
        metrics=metrics,
        clock=clock,
        logger=logger,
        skips=SkipRecords(full_name(namespace, SKIPS), stage.name, f"{stage.name}/{settings.name}"),
    )


async def run_worker(
    worker: EosWorker,
    settings: ServiceSettings,
    *,
    stop: threading.Event,
    metrics: Metrics,
    logger: Logger,
) -> None:
    """Runs `worker` until `stop` is set. Raises what ended it otherwise."""
    operations = OperationsServer(
        settings.operations_host,
        settings.operations_port,
        metrics=metrics,
        ready=worker.ready,
        status=worker.status,
    )
    logger.info("operations port", url=f"http://{settings.operations_host}:{operations.port}")
    stopping = asyncio.create_task(_stop_when_told(worker, stop))
    try:
        await worker.run()
    finally:
        stop.set()
        await stopping
        operations.close()


async def _stop_when_told(worker: EosWorker, stop: threading.Event) -> None:
    await asyncio.to_thread(stop.wait)
    worker.request_stop()
