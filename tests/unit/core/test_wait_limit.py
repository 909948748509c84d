"""A limit ends the wait that is too long, and no other; whoever else cancels is not taken for it."""

import asyncio
from contextlib import closing, suppress

import pytest

from clawstream.wait_limit import WaitLimit


async def _at_once(value: int) -> int:
    return value


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_wait_that_is_too_long_ends_and_the_task_goes_on() -> None:
    task = asyncio.current_task()
    assert task is not None
    with closing(WaitLimit()) as limit:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await limit.wait(_for_ever(), 0.02)
            assert task.cancelling() == 0
            assert await limit.wait(_at_once(1), 60.0) == 1


async def test_every_wait_has_all_of_its_time_though_one_timer_stands_for_all() -> None:
    """The first wait's timer goes off in the middle of a later one."""
    with closing(WaitLimit()) as limit:
        for _ in range(8):
            await limit.wait(asyncio.sleep(0.03), 0.08)
        with pytest.raises(TimeoutError):
            await limit.wait(_for_ever(), 0.05)


async def test_a_shorter_wait_ends_before_the_timer_of_a_longer_one() -> None:
    with closing(WaitLimit()) as limit:
        assert await limit.wait(_at_once(1), 3600.0) == 1
        shorter = asyncio.create_task(limit.wait(_for_ever(), 0.02))
        ended, _ = await asyncio.wait([shorter], timeout=30.0)
        assert ended, "the shorter wait waited for the longer one's timer"
        with pytest.raises(TimeoutError):
            await shorter


async def test_no_time_counts_between_two_waits() -> None:
    with closing(WaitLimit()) as limit:
        await limit.wait(_at_once(1), 0.02)
        await asyncio.sleep(0.06)  # The timer has gone off, and found no wait.
        assert await limit.wait(_at_once(2), 60.0) == 2
        with pytest.raises(TimeoutError):
            await limit.wait(_for_ever(), 0.02)


async def test_a_cancellation_by_somebody_else_stays_one() -> None:
    began = asyncio.Event()

    async def waits() -> None:
        began.set()
        await _for_ever()

    with closing(WaitLimit()) as limit:
        task = asyncio.create_task(limit.wait(waits(), 60.0))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_both_at_once_is_a_cancellation() -> None:
    async def somebody_else_cancels_too() -> None:
        try:
            await _for_ever()
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.sleep(0)

    with closing(WaitLimit()) as limit:
        task = asyncio.create_task(limit.wait(somebody_else_cancels_too(), 0.02))
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_what_comes_though_it_was_cancelled_is_given() -> None:
    async def comes_all_the_same() -> int:
        with suppress(asyncio.CancelledError):
            await _for_ever()
        return 5

    task = asyncio.current_task()
    assert task is not None
    with closing(WaitLimit()) as limit:
        assert await limit.wait(comes_all_the_same(), 0.02) == 5
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # Nothing is left that would be raised here.


async def test_an_error_of_what_is_awaited_is_its_own() -> None:
    async def fails() -> None:
        raise ValueError("broken")

    with closing(WaitLimit()) as limit, pytest.raises(ValueError, match="broken"):
        await limit.wait(fails(), 60.0)


async def test_a_closed_limit_leaves_no_timer_behind() -> None:
    limit = WaitLimit()
    await limit.wait(_at_once(1), 3600.0)
    timer = limit._timer  # pyright: ignore[reportPrivateUsage] - nothing else shows it
    limit.close()
    limit.close()
    assert timer is not None
    assert timer.cancelled()
