"""Wiring: `python -m services.judge --config clawstream.toml [--process NAME]`."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from clawstream.bus.topic_follower import TopicFollower
from clawstream.clock import SystemClock
from clawstream.crash_points import crash_point, with_bus_crash, with_handler_crash
from clawstream.encryption.bus import open_bus
from clawstream.errors import ClawstreamError, SettingsError
from clawstream.forgetting.forgotten import Forgotten
from clawstream.log import configure_logging
from clawstream.metrics import Metrics
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, load_settings
from clawstream.settling import settle
from clawstream.stages import JUDGE
from clawstream.topics import CONFIG, FORGOTTEN, JUDGE_DLQ, LLM_CALLS, NEXT_STATES, SCORES, full_name
from clawstream.worker.waiting import wait_for_topics
from clawstream.worker_process import run_worker, stage_worker, stop_on_signals
from services.judge.active import ActiveJudges
from services.judge.handler import JudgeHandler
from services.judge.judging import Judging
from services.judge.ledger import Ledger
from services.judge.ledger_writer import LedgerWriter
from services.judge.settings import JudgeSettings
from services.judge.wiring import backend_factory, model_caller


def main(
    config: Annotated[Path | None, typer.Option(help="The TOML file.")] = None,
    process: Annotated[str | None, typer.Option(help="Its name among the file's processes.")] = None,
) -> None:
    """Judge what follows answers."""
    try:
        settings = load_settings(JudgeSettings, section="judge", file=config, process=process, environment=os.environ)
        uvloop.run(run(settings, os.environ))
    except SettingsError as error:
        sys.stderr.write(f"judge: {error}\n")
        sys.exit(EXIT_CODE_WRONG_SETTINGS)
    except ClawstreamError as error:
        sys.exit(f"judge: {error}")


async def run(settings: JudgeSettings, environment: Mapping[str, str]) -> None:
    """Judges until SIGTERM or SIGINT. Raises ClawstreamError when it cannot go on."""
    logger = configure_logging(settings.log, process=settings.name)
    namespace, source = settings.kafka.namespace, f"judge/{settings.name}"
    clock, metrics = SystemClock(), Metrics()
    factory = backend_factory(settings, environment)
    judges = ActiveJudges(settings.spec, factory.make, logger=logger)
    crash = crash_point(environment)
    bus = with_bus_crash(open_bus(settings.kafka, client_id=settings.name), crash)
    topics = [full_name(namespace, topic) for topic in (CONFIG, FORGOTTEN, LLM_CALLS, NEXT_STATES, SCORES, JUDGE_DLQ)]
    async with stop_on_signals() as stop:
        if not await asyncio.to_thread(wait_for_topics, bus, topics, stop=stop, logger=logger):
            return
        follower = await asyncio.to_thread(
            lambda: TopicFollower(
                bus, full_name(namespace, CONFIG), judges.apply, on_failure=stop.set, stopped=stop.is_set
            )
        )
        forgotten = Forgotten()
        forgotten_follower = await asyncio.to_thread(
            lambda: TopicFollower(
                bus, full_name(namespace, FORGOTTEN), forgotten.apply, on_failure=stop.set, stopped=stop.is_set
            )
        )
        writer = LedgerWriter(
            bus.producer, flush_timeout_seconds=settings.ledger_flush_timeout_seconds, on_failure=stop.set
        )
        ledger = Ledger(bus, writer, namespace=namespace, source=source, logger=logger)
        caller = model_caller(settings, clock=clock, metrics=metrics)
        handler = JudgeHandler(
            judges,
            Judging(ledger, caller, clock=clock, metrics=metrics),
            ledger,
            namespace=namespace,
            source=source,
            max_timeouts=settings.model.max_timeouts,
            logger=logger,
            forgotten=forgotten,
        )
        worker = stage_worker(
            bus,
            with_handler_crash(handler, crash),
            JUDGE,
            settings,
            settings.worker,
            metrics=metrics,
            clock=clock,
            logger=logger,
        )
        judge = judges.current
        logger.info(
            "judging", backend=judge.spec.backend, spec_hash=judge.spec.spec_hash, promotion_epoch=judge.promotion_epoch
        )
        try:
            settle()
            await run_worker(worker, settings, stop=stop, metrics=metrics, logger=logger)
        finally:
            await asyncio.to_thread(follower.close)
            await asyncio.to_thread(forgotten_follower.close)
            await asyncio.to_thread(writer.close)
        for failure in (follower.failure, forgotten_follower.failure, writer.failure):
            if failure is not None:
                raise failure


if __name__ == "__main__":
    typer.run(main)
