"""Next states that keep coming while a test does things to those who handle them."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from clawstream.bus.interface import Delivery
from tests.fixtures.judged_log import JudgedLog, next_state_of, turn_event

CHUNK = 40
SESSIONS = 48
"""Over all twelve partitions."""
PAUSE_SECONDS = 0.2


def write_replies(log: JudgedLog, numbers: Sequence[int]) -> list[Delivery]:
    """Turns of many sessions and a reply to each, which a rules judge scores."""
    turns = [turn_event(number, session_id=f"session-{number % SESSIONS}") for number in numbers]
    next_states = [
        next_state_of(turn, place, "thanks" if number % 2 else "no, too long")
        for number, turn, place in zip(numbers, turns, log.write_turns(turns), strict=True)
    ]
    return log.write_next_states(next_states)


class Load:
    """Writes replies from a thread of its own until the block ends."""

    def __init__(self, log: JudgedLog) -> None:
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="load")
        self._failure: BaseException | None = None
        self.written: list[Delivery] = []
        """Next states, in the order of writing."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure

    def _write(self) -> None:
        try:
            while not self._stop.wait(PAUSE_SECONDS):
                first = len(self.written)
                self.written += write_replies(self._log, range(first, first + CHUNK))
        except BaseException as error:
            self._failure = error
