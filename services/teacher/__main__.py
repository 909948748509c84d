"""Wiring: `python -m services.teacher --config clawstream.toml [--process NAME]`."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from clawstream.bus.record_fetcher import RecordFetcher
from clawstream.bus.topic_follower import TopicFollower
from clawstream.clock import SystemClock
from clawstream.crash_points import crash_point, with_bus_crash, with_handler_crash
from clawstream.encryption.bus import open_bus
from clawstream.engine.client import EngineTimeouts, HttpEngineClient
from clawstream.errors import ClawstreamError, SettingsError, TeacherUnfit
from clawstream.forgetting.forgotten import Forgotten
from clawstream.log import configure_logging
from clawstream.metrics import Metrics
from clawstream.rendering.renderer import load_renderer
from clawstream.settings import EXIT_CODE_WRONG_SETTINGS, load_settings
from clawstream.settling import settle
from clawstream.stages import TEACHER
from clawstream.topics import FORGOTTEN, SAMPLES, SCORES, TEACHER_DLQ, TURNS, full_name
from clawstream.worker.waiting import wait_for_topics
from clawstream.worker_process import run_worker, stage_worker, stop_on_signals
from services.teacher.handler import TeacherHandler
from services.teacher.settings import TeacherSettings
from services.teacher.start import start_signals


def main(
    config: Annotated[Path | None, typer.Option(help="The TOML file.")] = None,
    process: Annotated[str | None, typer.Option(help="Its name among the file's processes.")] = None,
) -> None:
    """Turn scores into samples."""
    try:
        settings = load_settings(
            TeacherSettings, section="teacher", file=config, process=process, environment=os.environ
        )
        asyncio.run(run(settings, os.environ))
    except (SettingsError, TeacherUnfit) as error:
        sys.stderr.write(f"teacher: {error}\n")
        sys.exit(EXIT_CODE_WRONG_SETTINGS)
    except ClawstreamError as error:
        sys.exit(f"teacher: {error}")


async def run(settings: TeacherSettings, environment: Mapping[str, str]) -> None:
    """Teaches until SIGTERM or SIGINT. Raises ClawstreamError when it cannot go on."""
    logger = configure_logging(settings.log, process=settings.name)
    namespace = settings.kafka.namespace
    clock, metrics = SystemClock(), Metrics()
    crash = crash_point(environment)
    bus = with_bus_crash(open_bus(settings.kafka, client_id=settings.name), crash)
    topics = [full_name(namespace, topic) for topic in (TURNS, SCORES, SAMPLES, FORGOTTEN, TEACHER_DLQ)]
    async with stop_on_signals() as stop:
        if not await asyncio.to_thread(wait_for_topics, bus, topics, stop=stop, logger=logger):
            return
        signals = await start_signals(
            settings,
            make_engine=lambda name, url, vocabulary_size: HttpEngineClient(
                name,
                url,
                timeouts=EngineTimeouts(call_seconds=settings.model.call_timeout_seconds),
                vocabulary_size=vocabulary_size,
            ),
            load_renderer=load_renderer,
            stop=stop,
            logger=logger,
        )
        logger.info("teaching", mode=settings.mode.value, teacher=settings.model.name)
        turns = RecordFetcher(bus, cache_bytes=settings.turn_cache_bytes, timeout_seconds=settings.turn_timeout_seconds)
        forgotten = Forgotten()
        follower = await asyncio.to_thread(
            lambda: TopicFollower(
                bus, full_name(namespace, FORGOTTEN), forgotten.apply, on_failure=stop.set, stopped=stop.is_set
            )
        )
        handler = TeacherHandler(
            turns,
            settings,
            signals,
            source=f"teacher/{settings.name}",
            clock=clock,
            metrics=metrics,
            forgotten=forgotten,
        )
        worker = stage_worker(
            bus,
            with_handler_crash(handler, crash),
            TEACHER,
            settings,
            settings.worker,
            metrics=metrics,
            clock=clock,
            logger=logger,
        )
        try:
            settle()
            await run_worker(worker, settings, stop=stop, metrics=metrics, logger=logger)
        finally:
            await asyncio.to_thread(follower.close)
        if follower.failure is not None:
            raise follower.failure


if __name__ == "__main__":
    typer.run(main)
