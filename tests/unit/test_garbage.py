"""When an actor takes the time for a full garbage collection."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from dsec.actors import garbage
from dsec.actors.garbage import FORCED_S, REST_S, REST_SHARE, Schedule


def test_only_when_quiet_and_worth_it() -> None:
    """Neither while somebody waits, nor twice in a minute, nor for nothing; but never later than a quarter of an hour."""
    schedule = Schedule(last=100.0, worth=True)
    assert schedule.due(100.0 + REST_S, busy=0.01)
    assert not schedule.due(100.0 + REST_S - 1, busy=0.01)
    assert not schedule.due(100.0 + REST_S, busy=0.5)
    assert schedule.due(100.0 + FORCED_S, busy=0.5)
    assert not Schedule(last=100.0).due(100.0 + FORCED_S, busy=0.0)


def test_the_longer_one_takes_the_rarer_it_is() -> None:
    """What it took, or is to take in a grown process, is a three-thousandth of the time at most."""
    slow = Schedule(last=100.0, worth=True, took=0.1, resident=100 << 20)
    assert not slow.due(100.0 + REST_S, busy=0.0, resident=100 << 20)
    assert slow.due(100.0 + REST_SHARE * 0.1, busy=0.0, resident=100 << 20)
    grown = Schedule(last=100.0, worth=True, took=0.001, resident=50 << 20)
    assert grown.due(100.0 + REST_S, busy=0.0, resident=55 << 20)
    assert not grown.due(100.0 + REST_S, busy=0.0, resident=150 << 20)
    assert grown.due(100.0 + FORCED_S, busy=1.0, resident=1 << 40)


class Knot:
    def __init__(self) -> None:
        self.me = self


async def test_old_garbage_goes_at_the_next_quiet_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that has grown old is not collected by allocation, and is by the schedule; Python's own way is back afterwards."""
    monkeypatch.setattr(garbage, "LOOK_S", 0.01)
    monkeypatch.setattr(garbage, "REST_S", 0.2)
    monkeypatch.setattr(garbage, "REST_SHARE", 0)
    monkeypatch.setattr(garbage, "QUIET_SHARE", 1e9)
    before = gc.get_threshold()
    knot = Knot()
    gone = weakref.ref(knot)
    task = asyncio.ensure_future(garbage.keep())
    await asyncio.sleep(0)
    gc.collect(1)  # it is old now
    del knot
    assert gone() is not None
    for _ in range(1000):
        if gone() is None:
            break
        await asyncio.sleep(0.01)
    assert gone() is None
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gc.get_threshold() == before
