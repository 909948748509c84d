"""Places that are taken several at once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.judge.slots import Slots


async def settle() -> None:
    """Lets every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_needs_many_is_not_overtaken_by_who_needs_few() -> None:
    slots, order = Slots(4), list[str]()

    async def take(name: str, wanted: int) -> None:
        await slots.take(wanted)
        order.append(name)

    assert slots.take_at_once(2)
    tasks = [asyncio.create_task(take(*each)) for each in (("three", 3), ("one", 1))]
    await settle()
    assert order == []
    assert not slots.take_at_once(1), "those who wait come first"
    slots.give_back(2)
    await settle()
    assert order == ["three", "one"]
    await asyncio.gather(*tasks)


async def test_who_gives_up_makes_room_for_those_behind() -> None:
    slots = Slots(2)
    assert slots.take_at_once(1)
    first, second = asyncio.create_task(slots.take(2)), asyncio.create_task(slots.take(1))
    await settle()
    assert not second.done()
    first.cancel()
    await settle()
    assert second.done()


async def test_who_gives_up_while_being_served_gives_back() -> None:
    slots = Slots(1)
    assert slots.take_at_once(1)
    waiting = asyncio.create_task(slots.take(1))
    await settle()
    slots.give_back(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert slots.take_at_once(1)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30))
def test_never_more_are_taken_than_there_are_and_all_come_back(wishes: list[tuple[int, bool]]) -> None:
    async def check() -> None:
        slots, taken, most = Slots(5), 0, 0

        async def work(wanted: int) -> None:
            nonlocal taken, most
            await slots.take(wanted)
            taken += wanted
            most = max(most, taken)
            try:
                await asyncio.sleep(0)
            finally:
                taken -= wanted
                slots.give_back(wanted)

        tasks = [asyncio.create_task(work(wanted)) for wanted, _ in wishes]
        await asyncio.sleep(0)
        for task, (_, gives_up) in zip(tasks, wishes, strict=True):
            if gives_up:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= 5
        assert slots.take_at_once(5)

    asyncio.run(check())
