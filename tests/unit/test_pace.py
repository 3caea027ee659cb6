"""Commands begin a few at a time."""

from __future__ import annotations

import asyncio

from dsec.backends.guest.pace import Pace, pace


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_next_begins_when_one_has_begun() -> None:
    """No more than the bound at one time, in the order in which they came."""
    order, gates = Pace(2, moment=60.0), [asyncio.Event() for _ in range(5)]
    begun: list[int] = []

    async def command(number: int) -> None:
        with await order.turn():
            begun.append(number)
            await gates[number].wait()

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(command(number))
        await rounds()
        assert begun == [0, 1]
        gates[1].set()
        await rounds()
        assert begun == [0, 1, 2]
        for gate in gates:
            gate.set()
    assert begun == [0, 1, 2, 3, 4]
    with await order.turn(), await order.turn():  # both are free again
        pass


async def test_one_that_takes_long_holds_up_nobody() -> None:
    """Its turn ends after a moment, and ends once."""
    order = Pace(1, moment=0.01)
    async with asyncio.timeout(20):
        with await order.turn():
            with await order.turn():
                pass
        with await order.turn():
            pass
    assert order._left == 1


async def test_one_that_is_given_up_leaves_its_place() -> None:
    """While it waits, and also in the round in which its turn has come; whoever is behind it comes."""
    order = Pace(1, moment=60.0)
    first = await order.turn()
    waiting = [asyncio.ensure_future(order.turn()) for _ in range(3)]
    await rounds()
    waiting[0].cancel()
    await rounds()
    with first:
        pass
    waiting[1].cancel()
    with await asyncio.wait_for(waiting[2], 20):
        pass
    assert [each.cancelled() for each in waiting] == [True, True, False]
    assert order._left == 1


async def test_all_of_one_loop_share_one() -> None:
    """However many sandboxes there are."""
    assert pace() is pace()
