"""A worker as a process: settings, metrics, operations port, signals, exit code."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from clawstream.bus.interface import Bus
from clawstream.bus.kafka import KafkaBus
from clawstream.clock import Clock, SystemClock
from clawstream.errors import ClawstreamError
from clawstream.log import Logger, configure_logging
from clawstream.metrics import Metrics
from clawstream.operations_server import OperationsServer
from clawstream.settings import ServiceSettings
from clawstream.topics import full_name
from clawstream.worker.handler import Handler
from clawstream.worker.settings import WorkerSettings
from clawstream.worker.worker import EosWorker

_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a handler may need of its process."""

    bus: Bus
    metrics: Metrics
    clock: Clock
    log: Logger
    source: str
    """For `ce_source`: service and process name."""


def run_worker(
    *,
    service: str,
    settings: ServiceSettings,
    worker: WorkerSettings,
    input_topics: Sequence[str],
    dead_letter_topic: str,
    make_handler: Callable[[WorkerContext], Awaitable[Handler]],
) -> int:
    """Runs until SIGTERM or SIGINT, or until it cannot go on. Returns the exit code: 0 after a graceful stop, else 1.

    Topics are names without namespace. `make_handler` runs in the event loop that will run the handler. The group is
    `<namespace>.<service>`; instance and transactional id follow from the process's name, which must be stable and, in
    one namespace, unique. A second signal ends the process at once.
    """
    log = configure_logging(settings.log, process=settings.name)
    try:
        asyncio.run(_run(service, settings, worker, input_topics, dead_letter_topic, make_handler, log))
    except ClawstreamError as error:  # The boundary of the process: said once, plainly; a supervisor starts it again.
        log.error("the worker cannot go on", error=str(error), kind=type(error).__name__)
        return _EXIT_FAILED
    return 0


async def _run(
    service: str,
    settings: ServiceSettings,
    worker_settings: WorkerSettings,
    input_topics: Sequence[str],
    dead_letter_topic: str,
    make_handler: Callable[[WorkerContext], Awaitable[Handler]],
    log: Logger,
) -> None:
    namespace = settings.kafka.namespace
    context = WorkerContext(
        bus=KafkaBus(settings.kafka, client_id=settings.name),
        metrics=Metrics(),
        clock=SystemClock(),
        log=log,
        source=f"{service}/{settings.name}",
    )
    worker = EosWorker(
        context.bus,
        await make_handler(context),
        input_topics=[full_name(namespace, topic) for topic in input_topics],
        dead_letter_topic=full_name(namespace, dead_letter_topic),
        group=f"{namespace}.{service}",
        instance=settings.name,
        transactional_id=f"{namespace}.{service}.{settings.name}",
        settings=worker_settings,
        metrics=context.metrics,
        clock=context.clock,
        logger=log,
    )
    _stop_on_signals(worker, log)
    operations = OperationsServer(
        settings.operations_host,
        settings.operations_port,
        metrics=context.metrics,
        ready=worker.ready,
        status=worker.status,
    )
    log.info("operations port", host=settings.operations_host, port=operations.port)
    try:
        await worker.run()
    finally:
        operations.close()


def _stop_on_signals(worker: EosWorker, log: Logger) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        log.info("asked to stop; once more ends the process at once")
        worker.request_stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            # Not through the loop: it may be what hangs.
            signal.signal(number, _exit_at_once)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(_EXIT_INTERRUPTED)
