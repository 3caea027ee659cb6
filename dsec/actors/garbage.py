"""Full garbage collections at quiet moments only.

A full collection walks every object that lives: with 10,000 sandboxes that stops the event loop for 0.1 to 0.2 s, and Python starts
one whenever enough was allocated, so in the middle of a burst. Young objects go on being collected as always.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass

LOOK_S = 1.0  # between two looks
QUIET_SHARE = 0.05  # of one core, since the last look: a loop that uses less has nobody waiting
REST_S = 60.0  # at least so long between two
FORCED_S = 900.0  # an actor that is never quiet is stopped for one after so long
_NEVER = 1 << 30


@dataclass(slots=True)
class Schedule:
    """When a full collection is due (pure). Times in seconds of any one clock that does not step."""

    last: float
    worth: bool = False  # the middle generation was collected since: there may be garbage

    def due(self, now: float, busy: float) -> bool:
        """``busy``: the share of a core that this process has used since the last look."""
        since = now - self.last
        return self.worth and (since >= FORCED_S or (since >= REST_S and busy < QUIET_SHARE))


def _middle() -> int:
    return int(gc.get_stats()[1]["collections"])


def _full() -> None:
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def keep() -> None:
    """Takes full collections over from Python, until cancelled."""
    usual = gc.get_threshold()
    _full()
    gc.set_threshold(20_000, 20, _NEVER)
    schedule, seen = Schedule(time.monotonic()), _middle()
    at, used = time.monotonic(), time.process_time()
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            now, spent = time.monotonic(), time.process_time()
            schedule.worth = _middle() > seen
            if schedule.due(now, (spent - used) / (now - at)):
                _full()
                schedule.last, seen = time.monotonic(), _middle()
            at, used = now, spent
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
