"""Waiting for space on a disk that is full: a restart would find it as full, and forget what is in memory."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from clawstream.disk_space import FREE_SOME_SPACE, is_out_of_space
from clawstream.errors import ClawstreamError
from clawstream.log import Logger

_RETRY_SECONDS: Final = 3.0

Result = TypeVar("Result")


class DiskPatience:
    """Tries again until there is space, or the process is to end. Blocks: use a thread inside an event loop."""

    def __init__(self, stop: threading.Event, logger: Logger, *, waits: str) -> None:
        """`waits` says what stands still meanwhile, for the log."""
        self._stop = stop
        self._logger = logger
        self._waits = waits

    def write(self, what: str, write: Callable[[], Result]) -> Result:
        """What `write` returns. Raises what it raised for another reason than space, or at the end of the process.

        A `write` that was refused must leave nothing that keeps it from succeeding later.
        """
        while True:
            try:
                return write()
            except (ClawstreamError, OSError) as error:
                if self._stop.is_set() or not is_out_of_space(error):
                    raise
                self._logger.error(
                    f"the disk is full, or its quota: {self._waits}; {FREE_SOME_SPACE}",
                    what=what,
                    error=str(error),
                    again_in_seconds=_RETRY_SECONDS,
                )
            self._stop.wait(_RETRY_SECONDS)
