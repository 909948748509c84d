"""A judge of your own: a function named by its import path, `package.module:name`.

    def judge(next_state: NextStateEvent) -> int | None: ...

It returns 1, 0 or -1, or None to abstain, and may be `async`. A synchronous one runs on a thread.
"""

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import cast

from clawstream.errors import SettingsError
from schemas.events import NextStateEvent
from services.judge.backends.interface import Abstention, Opinion

JudgeFunction = Callable[[NextStateEvent], int | None] | Callable[[NextStateEvent], Awaitable[int | None]]


class ImportedBackend:
    """Calls the function."""

    def __init__(self, function: JudgeFunction) -> None:
        self._function = function

    async def judge(self, next_state: NextStateEvent) -> Opinion:
        """Raises ValueError when the function returns anything but a verdict or None."""
        if inspect.iscoroutinefunction(self._function):
            verdict = await self._function(next_state)
        else:
            verdict = await asyncio.to_thread(
                cast("Callable[[NextStateEvent], int | None]", self._function), next_state
            )
        if verdict is None:
            return Opinion(abstention=Abstention.NO_RULE)
        if type(verdict) is not int or verdict not in (-1, 0, 1):
            raise ValueError(f"{self._function!r} returned {verdict!r}; a judge returns 1, 0, -1 or None")
        return Opinion(verdict=verdict)

    async def close(self) -> None:
        """Nothing to release."""


def import_judge(path: str) -> ImportedBackend:
    """The judge at `package.module:name`. Raises SettingsError when there is nothing to call."""
    module_name, _, name = path.partition(":")
    try:
        function: object = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"judge backend {path!r}: {error}") from error
    if not callable(function):
        raise SettingsError(f"judge backend {path!r}: not a function")
    return ImportedBackend(cast("JudgeFunction", function))
