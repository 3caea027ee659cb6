"""A request to an Edge ends when another incarnation of that Edge is heard of."""

from __future__ import annotations

import asyncio

import pytest

from dsec.bus.incarnations import Incarnations
from dsec.errors import DeadlineExceeded, Unavailable


async def test_what_was_asked_of_one_that_died_is_lost() -> None:
    """At the next incarnation's first word; requests to others go on, and so does one that has been answered."""
    known = Incarnations()
    known.hear("a", "u.1")
    lost = asyncio.ensure_future(known.ask(("a",), asyncio.sleep(3600)))
    other = asyncio.ensure_future(known.ask(("b",), asyncio.sleep(0.05, "answer")))
    await asyncio.sleep(0)
    known.hear("a", "u.1")
    await asyncio.sleep(0)
    assert not lost.done()
    known.hear("a", "u.2")
    with pytest.raises(Unavailable) as caught:
        await lost
    assert caught.value.reason == "restarted"
    assert await other == "answer"
    assert not known._asking


async def test_the_first_incarnation_that_is_heard_of_is_the_one_that_was_asked() -> None:
    """Who had heard nothing of the Edge before takes the first news for it, and the second for a restart."""
    known = Incarnations()
    lost = asyncio.ensure_future(known.ask(("a",), asyncio.sleep(3600)))
    await asyncio.sleep(0)
    known.hear("a", "u.4")
    await asyncio.sleep(0)
    assert not lost.done()
    known.hear("a", "v.1")  # another state directory
    with pytest.raises(Unavailable):
        await lost


async def test_late_news_are_none() -> None:
    """A heartbeat of the one before that comes after the next one's ends nothing."""
    known = Incarnations()
    known.hear("a", "u.10")
    asked = asyncio.ensure_future(known.ask(("a",), asyncio.sleep(0.05, "answer")))
    await asyncio.sleep(0)
    known.hear("a", "u.9")
    assert await asked == "answer"


async def test_a_time_out_of_its_own_stays_what_it_is() -> None:
    """`DeadlineExceeded` is a TimeoutError as well."""

    async def late() -> None:
        raise DeadlineExceeded("no answer")

    with pytest.raises(DeadlineExceeded):
        await Incarnations().ask(("a",), late())
