"""SIGTERM as Ctrl-C, for commands that have something to clean up: `timeout`, a job's time limit and `kill` send it."""

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def terminated_like_interrupted() -> Generator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt: blocks are left, and what they started is ended. Main thread only.

    Not by way of SIGINT, which a shell has its background jobs ignore. `asyncio.run` cancels its tasks first.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
