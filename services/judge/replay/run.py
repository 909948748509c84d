"""Puts a replay together and runs it: the same worker, handler, votes and retries as the judge itself."""

import asyncio
import threading
from collections.abc import Callable

from clawstream.bus.interface import Bus
from clawstream.clock import Clock
from clawstream.forgetting.forget import read_forgotten
from clawstream.log import Logger
from clawstream.metrics import Metrics
from clawstream.topics import JUDGE_DLQ, NEXT_STATES, full_name
from clawstream.worker.worker import EosWorker
from schemas.judge_spec import JudgeSpec
from services.judge.active import ActiveJudges
from services.judge.backends.interface import Backend
from services.judge.judging import Judging
from services.judge.ledger_writer import LedgerWriter
from services.judge.replay.bounded_run import begin_group, run_to_end
from services.judge.replay.call_store import CallStore
from services.judge.replay.handler import ReplayHandler
from services.judge.replay.ledger import ReplayLedger
from services.judge.replay.plan import ReplayPlan
from services.judge.settings import JudgeSettings
from services.judge.wiring import model_caller

ReplayProgress = Callable[[int, int, ReplayHandler, ReplayLedger], None]
"""Told how many of how many offsets are committed, and what this process did for it."""


async def run_replay(
    plan: ReplayPlan,
    bus: Bus,
    store: CallStore,
    settings: JudgeSettings,
    make_backend: Callable[[JudgeSpec], Backend],
    *,
    worker_name: str,
    stop: threading.Event,
    clock: Clock,
    metrics: Metrics,
    logger: Logger,
    progress: ReplayProgress,
) -> bool:
    """True when every input of the plan is settled; False when `stop` came first: run it again then.

    Several processes with different `worker_name`s share a replay. Raises ClawstreamError for what a repetition may
    mend.
    """
    source = f"replay/{plan.name}"
    judges = ActiveJudges(plan.spec, make_backend, logger=logger)
    await asyncio.to_thread(begin_group, bus, plan.group, plan.ranges)
    writer = LedgerWriter(
        bus.producer, flush_timeout_seconds=settings.ledger_flush_timeout_seconds, on_failure=stop.set
    )
    ledger = ReplayLedger(
        bus, writer, store, judges.current.spec, namespace=plan.namespace, source=source, logger=logger
    )
    handler = ReplayHandler(
        plan,
        judges,
        Judging(ledger, model_caller(settings, clock=clock, metrics=metrics), clock=clock, metrics=metrics),
        ledger,
        max_timeouts=settings.model.max_timeouts,
        logger=logger,
        forgotten=await asyncio.to_thread(read_forgotten, bus, plan.namespace),
    )
    worker = EosWorker(
        bus,
        handler,
        input_topics=[full_name(plan.namespace, NEXT_STATES)],
        dead_letter_topic=full_name(plan.namespace, JUDGE_DLQ),
        group=plan.group,
        instance=worker_name,
        transactional_id=f"{plan.group}.{worker_name}",
        settings=settings.worker,
        metrics=metrics,
        clock=clock,
        logger=logger,
    )
    try:
        is_complete = await run_to_end(
            bus,
            worker,
            plan.group,
            plan.ranges,
            stop=stop,
            progress=lambda done, total: progress(done, total, handler, ledger),
        )
    finally:
        await asyncio.to_thread(writer.close)
    if writer.failure is not None:
        raise writer.failure
    return is_complete
