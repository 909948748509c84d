"""How long one attempt to handle an input may work. Waiting for a turn that other inputs hold does not count.

Else a backlog would make deadlines pass for inputs that nobody has begun with, and a slow model would turn every input
into a failure.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self

_CURRENT: Final[ContextVar["Deadline | None"]] = ContextVar("deadline", default=None)
"""Of the input that is being handled. Tasks that a handler starts inherit it, as they inherit its trace."""


class Deadline:
    """Cancels its block after `seconds` of work, which then raises TimeoutError. For one use, in a task."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._waiting = 0
        self._left_seconds = seconds
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._token = _CURRENT.set(self)
        await self._timeout.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._is_open = False
        _CURRENT.reset(self._token)
        return await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        """Whether the block was cancelled by the deadline."""
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stands still for the block. May be entered several times at once: it goes on when all have left."""
        if self._waiting == 0:
            self._pause()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._go_on()

    def _pause(self) -> None:
        at = self._timeout.when()
        if at is not None and self._may_move():
            self._left_seconds = at - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def _go_on(self) -> None:
        if self._may_move():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_seconds)

    def _may_move(self) -> bool:
        return self._is_open and not self._timeout.expired()


@contextmanager
def waiting_for_a_turn() -> Generator[None]:
    """Time in the block does not count against the deadline of the input that is being handled, if there is one."""
    deadline = _CURRENT.get()
    if deadline is None:
        yield
    else:
        with deadline.paused():
            yield
