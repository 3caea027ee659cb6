"""Full garbage collections at quiet moments only, and the rarer the longer they take.

A full collection walks every object that lives: with 10,000 sandboxes that stops the event loop for 0.1 to 0.2 s, and Python starts
one whenever enough was allocated, so in the middle of a burst. Young objects go on being collected as always, few at a time.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from dataclasses import dataclass

LOOK_S = 1.0  # between two looks
QUIET_SHARE = 0.05  # of one core, since the last look: a loop that uses less has nobody waiting
REST_S = 60.0  # at least so long between two
REST_SHARE = 3000  # and so many times what one takes
FORCED_S = 900.0  # an actor that is never quiet is stopped for one after so long
YOUNG = (5_000, 20)  # new objects, and young collections, after which a collection of the first and the second kind begins: 1 to 4 ms each
SECONDS_A_BYTE = 2e-9  # what a full one takes for each byte that the process has grown, before that has been measured
_NEVER = 1 << 30
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Schedule:
    """When a full collection is due (pure). Times in seconds of any one clock that does not step."""

    last: float
    worth: bool = False  # the middle generation was collected since: there may be garbage
    took: float = 0.0  # seconds of the last one
    resident: int = 0  # bytes of the process after it

    def due(self, now: float, busy: float, resident: int = 0) -> bool:
        """``busy``: the share of a core that this process has used since the last look; ``resident``: its bytes."""
        since = now - self.last
        takes = self.took + max(0, resident - self.resident) * SECONDS_A_BYTE
        return self.worth and (since >= FORCED_S or (since >= max(REST_S, REST_SHARE * takes) and busy < QUIET_SHARE))


def _middle() -> int:
    return int(gc.get_stats()[1]["collections"])


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _full(schedule: Schedule) -> None:
    began = time.monotonic()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    schedule.last, schedule.resident = time.monotonic(), _resident()
    schedule.took = schedule.last - began


async def keep() -> None:
    """Takes full collections over from Python, until cancelled."""
    usual = gc.get_threshold()
    schedule = Schedule(0.0)
    _full(schedule)
    gc.set_threshold(*YOUNG, _NEVER)
    seen = _middle()
    at, used = time.monotonic(), time.process_time()
    try:
        while True:
            await asyncio.sleep(LOOK_S)
            now, spent = time.monotonic(), time.process_time()
            schedule.worth = _middle() > seen
            if schedule.due(now, (spent - used) / (now - at), _resident()):
                _full(schedule)
                seen = _middle()
            at, used = now, spent
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
