"""Puts the teacher's model to work: engines, renderer, and the question whether they fit each other."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from clawstream.engine.interface import EngineClient
from clawstream.engine.pool import EnginePool
from clawstream.errors import ContractError, EngineTimeout, EngineUnavailable, SettingsError
from clawstream.log import Logger
from clawstream.rendering.interface import ChatRenderer
from services.teacher.probe import probe_teacher, same_vocabulary
from services.teacher.settings import Mode, TeacherSettings
from services.teacher.signals import EngineSignals, HintedPrompts, SignalMaker, TrainerSignals

_PROBE_PAUSE_SECONDS: Final = 1.0


async def start_signals(
    settings: TeacherSettings,
    *,
    make_engine: Callable[[str, str, int], EngineClient],
    load_renderer: Callable[[Path, str], ChatRenderer],
    stop: threading.Event,
    logger: Logger,
) -> SignalMaker | None:
    """The settings' teacher; None in binary mode. Waits for its engines, until `stop`.

    `make_engine` takes a name, a base URL and the size of the vocabulary; `load_renderer` a model's folder and the
    name of a renderer. Raises SettingsError for a selection that does not exist or a folder without a usable tokenizer,
    and TeacherUnfit for a teacher that cannot teach this policy.
    """
    if settings.mode is Mode.BINARY:
        return None
    if settings.model_path is None:
        raise SettingsError("teacher.model_path is missing")
    model = settings.model
    renderer = await _renderer(load_renderer, "model_path", settings.model_path, settings.renderer)
    prompts = HintedPrompts(renderer, settings.hint, context_tokens=model.context_tokens)
    if model.computed_by == "trainer":
        return TrainerSignals(prompts, settings.hint)
    if model.directory is not None:
        same_vocabulary(renderer, await _renderer(load_renderer, "model.directory", model.directory, "auto"))
    size = renderer.vocabulary_size
    teacher = EnginePool([make_engine(f"teacher-{number}", url, size) for number, url in enumerate(model.urls)])
    students = [make_engine(f"student-{number}", url, size) for number, url in enumerate(model.student_urls)]
    student = EnginePool(students) if students else None
    signals = EngineSignals(prompts, teacher, student, hint=settings.hint, model=model, logger=logger)
    try:
        for engine in [*teacher.engines, *students]:
            await _probe(engine, renderer, model.context_tokens, stop, logger)
    except BaseException:
        await signals.close()
        raise
    return signals


async def _renderer(load: Callable[[Path, str], ChatRenderer], field: str, directory: Path, name: str) -> ChatRenderer:
    try:
        return await asyncio.to_thread(load, directory, name)
    except ContractError as error:
        raise SettingsError(f"teacher.{field}: {error}") from error


async def _probe(
    engine: EngineClient, renderer: ChatRenderer, context_tokens: int, stop: threading.Event, logger: Logger
) -> None:
    while not stop.is_set():
        try:
            await probe_teacher(engine, renderer, context_tokens=context_tokens)
        except (EngineUnavailable, EngineTimeout) as error:
            logger.warning("waiting for the teacher", engine=engine.name, error=str(error))
            await asyncio.sleep(_PROBE_PAUSE_SECONDS)
        else:
            return
