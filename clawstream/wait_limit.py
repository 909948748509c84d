"""Limits of time for what a task awaits, cheaper than `asyncio.timeout` where one wait follows another quickly.

`asyncio.timeout` makes an object and sets a timer for each wait, and takes the timer back: with a piece of a stream
every few milliseconds that was a tenth of a gateway's time. How a cancellation of one's own is told from another's is
as in `asyncio.timeout`; see `Task.uncancel` in Python's documentation.
"""

import asyncio
from collections.abc import Awaitable
from math import inf
from typing import Any, Final, TypeVar

Awaited = TypeVar("Awaited")


class OwnCancellation:
    """A cancellation of a task that may be asked for, and that its asker can tell from everybody else's."""

    __slots__ = ("_before", "_is_pending", "_task")

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        """When the block begins that may be cancelled, in `task`."""
        self._task = task
        self._before = task.cancelling()
        self._is_pending = False

    def ask(self) -> None:
        """Cancels what the task awaits. Once."""
        self._is_pending = True
        self._task.cancel()

    def take_back(self) -> bool:
        """To be called when the block has ended. Whether nobody else has cancelled the task meanwhile: a CancelledError
        that ended the block is then ours. False when it was not asked for, or was taken back."""
        if not self._is_pending:
            return False
        self._is_pending = False
        return self._task.uncancel() <= self._before


class WaitLimit:
    """For waits one after the other. One timer stands for all of them, and is set again only when it goes off."""

    __slots__ = ("_cancellation", "_ends_at", "_looks_at", "_loop", "_timer")

    def __init__(self) -> None:
        """On the event loop on which it is used."""
        self._loop: Final = asyncio.get_running_loop()
        self._ends_at = inf
        """Of the present wait, on the loop's clock."""
        self._looks_at = inf
        self._timer: asyncio.TimerHandle | None = None
        self._cancellation: OwnCancellation | None = None

    async def wait(self, awaited: Awaitable[Awaited], seconds: float) -> Awaited:
        """What is awaited. Raises TimeoutError, and cancels it, when it takes longer."""
        task = asyncio.current_task(self._loop)
        assert task is not None  # A coroutine runs in a task.
        self._cancellation = cancellation = OwnCancellation(task)
        self._ends_at = self._loop.time() + seconds
        if self._ends_at < self._looks_at:
            self._look_at(self._ends_at)
        try:
            return await awaited
        except asyncio.CancelledError as error:
            if cancellation.take_back():
                raise TimeoutError from error
            raise
        finally:
            cancellation.take_back()
            self._ends_at = inf

    def close(self) -> None:
        """No wait follows. Harmless when it was called before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._looks_at = None, inf

    def _look_at(self, when: float) -> None:
        self.close()
        self._timer, self._looks_at = self._loop.call_at(when, self._look), when

    def _look(self) -> None:
        self._timer, self._looks_at = None, inf
        if self._loop.time() < self._ends_at:
            if self._ends_at != inf:
                self._look_at(self._ends_at)
        elif self._cancellation is not None:
            self._ends_at = inf
            self._cancellation.ask()
