"""A judge of your own: a function named by its import path, `package.module:name`.

    def judge(next_state: NextStateEvent) -> int | Judgement | None: ...

It returns 1, 0 or -1, None to abstain, or a `Judgement`, which may bring hints. It may be `async`; a synchronous one
runs on a thread. `examples/own_parts/judge.py` is one.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import cast

from clawstream.import_path import import_callable
from schemas.events import NextStateEvent
from services.judge.backends.interface import Abstention, Judgement, Opinion

Answer = int | Judgement | None
JudgeFunction = Callable[[NextStateEvent], Answer] | Callable[[NextStateEvent], Awaitable[Answer]]


class ImportedBackend:
    """Calls the function."""

    def __init__(self, function: JudgeFunction) -> None:
        self._function = function
        self._is_asynchronous = inspect.iscoroutinefunction(function)

    async def judge(self, next_state: NextStateEvent) -> Opinion:
        """Raises ValueError when the function returns anything but a verdict, a judgement or None."""
        if self._is_asynchronous:
            answer = await cast("Callable[[NextStateEvent], Awaitable[Answer]]", self._function)(next_state)
        else:
            answer = await asyncio.to_thread(cast("Callable[[NextStateEvent], Answer]", self._function), next_state)
        verdict, hints = (answer.verdict, answer.hints) if isinstance(answer, Judgement) else (answer, ())
        if verdict is None:
            return Opinion(abstention=Abstention.NO_RULE, hints=hints)
        if type(verdict) is not int or verdict not in (-1, 0, 1):
            raise ValueError(f"{self._function!r} returned {verdict!r}; a judge returns 1, 0, -1, None or a Judgement")
        return Opinion(verdict=verdict, hints=hints)

    async def close(self) -> None:
        """Nothing to release."""


def import_judge(path: str) -> ImportedBackend:
    """The judge at `package.module:name`. Raises SettingsError when there is nothing to call."""
    return ImportedBackend(cast("JudgeFunction", import_callable(path, "judge backend")))
