"""How long one attempt to handle an input may work. Waiting for a turn that other inputs hold does not count.

Else a backlog would make deadlines pass for inputs that nobody has begun with, and a slow model would turn every input
into a failure.
One timer looks after all deadlines of a worker, a few times in the time that each has. One of its own for each input,
stopped and set again around every wait, was several hundredths of a judge's time.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from types import TracebackType
from typing import Final, Self

from clawstream.wait_limit import OwnCancellation

_CURRENT: Final[ContextVar["Deadline | None"]] = ContextVar("deadline", default=None)
"""Of the input that is being handled. Tasks that a handler starts inherit it, as they inherit its trace."""
_LOOKS: Final = 20
"""In the time that an attempt has: it ends at most a twentieth late."""
_LONGEST_PAUSE_SECONDS: Final = 1.0
"""Between two looks."""


class Deadlines:
    """Those of one event loop that leave the same time. Made and used on that loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """Of work."""
        self.loop: Final = asyncio.get_running_loop()
        """Kept, for asking asyncio for it is a system call each time."""
        self._pause_seconds = min(seconds / _LOOKS, _LONGEST_PAUSE_SECONDS)
        self._open: set[Deadline] = set()
        self._is_looking = False

    def begin(self) -> "Deadline":
        """One for one use."""
        return Deadline(self)

    def _look_after(self, deadline: "Deadline") -> None:
        self._open.add(deadline)
        if not self._is_looking:
            self._is_looking = True
            self.loop.call_later(self._pause_seconds, self._look)

    def _leave(self, deadline: "Deadline") -> None:
        self._open.discard(deadline)

    def _look(self) -> None:
        now = self.loop.time()
        for deadline in self._open:
            deadline.end_if_over(now)
        self._is_looking = bool(self._open)
        if self._is_looking:
            self.loop.call_later(self._pause_seconds, self._look)


class Deadline:
    """Cancels its block after some seconds of work, which then raises TimeoutError. For one use, in a task."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._cancellation: OwnCancellation | None = None
        self._is_expired = False
        self._waiting = 0
        self._ends_at = inf
        """On the loop's clock; infinite while it stands still, and when it is over."""
        self._left_seconds = deadlines.seconds
        self._stands_still = False

    async def __aenter__(self) -> Self:
        self._token = _CURRENT.set(self)
        task = asyncio.current_task(self._deadlines.loop)
        assert task is not None  # A coroutine runs in a task.
        self._cancellation = OwnCancellation(task)
        self._ends_at = self._deadlines.loop.time() + self._left_seconds
        self._deadlines._look_after(self)  # pyright: ignore[reportPrivateUsage] - the two are one thing
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._deadlines._leave(self)  # pyright: ignore[reportPrivateUsage] - the two are one thing
        self._ends_at, self._stands_still = inf, False
        _CURRENT.reset(self._token)
        cancellation, self._cancellation = self._cancellation, None
        is_ours = cancellation is not None and cancellation.take_back()
        if is_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def end_if_over(self, now_seconds: float) -> None:
        """Cancels the block when its time is over."""
        if now_seconds >= self._ends_at and self._cancellation is not None:
            self._ends_at = inf
            self._is_expired = True
            self._cancellation.ask()

    def expired(self) -> bool:
        """Whether the block was cancelled by the deadline."""
        return self._is_expired

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stands still for the block. May be entered several times at once: it goes on when all have left."""
        if self._waiting == 0 and self._ends_at != inf:
            self._left_seconds = self._ends_at - self._deadlines.loop.time()
            self._ends_at, self._stands_still = inf, True
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._stands_still:
                self._stands_still = False
                self._ends_at = self._deadlines.loop.time() + self._left_seconds


@contextmanager
def waiting_for_a_turn() -> Generator[None]:
    """Time in the block does not count against the deadline of the input that is being handled, if there is one."""
    deadline = _CURRENT.get()
    if deadline is None:
        yield
    else:
        with deadline.paused():
            yield
