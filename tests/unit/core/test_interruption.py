"""A polite kill lets a command clean up."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from clawstream.interruption import terminated_like_interrupted


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """As a shell starts its background jobs."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
def test_what_runs_is_left_before_the_interrupt_is_raised() -> None:
    left: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            left.append("work")

    async def command() -> None:
        try:
            await asyncio.create_task(work())
        finally:
            left.append("command")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        asyncio.run(command())
    assert sorted(left) == ["command", "work"]
    assert signal.getsignal(signal.SIGTERM) is before
