"""A bounded number of places, of which one may need several at once. First come, first served."""

import asyncio
from collections import deque


class Slots:
    """Used on one event loop. Whoever needs many is not overtaken by those who need few."""

    def __init__(self, count: int) -> None:
        """`count`: at least 1."""
        self.count = count
        """How many there are."""
        self._free = count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take_at_once(self, wanted: int) -> bool:
        """Whether `wanted` (at most `count`) could be had without waiting; then they are taken."""
        if self._waiting or self._free < wanted:
            return False
        self._free -= wanted
        return True

    async def take(self, wanted: int) -> None:
        """Returns when `wanted` (at most `count`) are taken."""
        if self.take_at_once(wanted):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._serve()  # It may have been first in line, and wanted more than the next.
            else:
                self.give_back(wanted)  # They had just been given.
            raise

    def give_back(self, taken: int) -> None:
        """They are free again."""
        self._free += taken
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.done():
                if wanted > self._free:
                    return
                self._free -= wanted
                turn.set_result(None)
            self._waiting.popleft()
