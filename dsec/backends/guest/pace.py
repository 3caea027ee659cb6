"""Commands begin a few at a time, first come, first served.

Where hundreds are asked for at once, as at the beginning of a burst, hundreds of processes would be ready to run, and the Edge, who
answers all the others, would be one among them: its loop came 0.1 s late beside 500, and comes 0.01 s late so. The last one of them ends
a little later for it, half of them a fifth earlier.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from weakref import WeakKeyDictionary

MOST = 16 * len(os.sched_getaffinity(0))  # that may be in their first moment
MOMENT = 0.05  # seconds: one that takes longer (its program is on its way into the layer, its sandbox hangs) holds up nobody


class Turn:
    """Ends with the block, or after a moment."""

    __slots__ = ("_pace", "_timer")

    def __init__(self, pace: Pace) -> None:
        self._pace: Pace | None = pace
        self._timer = asyncio.get_running_loop().call_later(pace.moment, self._end)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        pace, self._pace = self._pace, None
        if pace is not None:
            pace.free()


class Pace:
    """Of one event loop."""

    def __init__(self, most: int = MOST, moment: float = MOMENT) -> None:
        self.moment = moment
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> Turn:
        """Returns when it is this one's turn: ``with await pace.turn(): …``, and no await in between."""
        if self._left:
            self._left -= 1
            return Turn(self)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # its turn came in the same round
                self.free()
            raise
        return Turn(self)

    def free(self) -> None:
        """A turn is over: the next one's begins."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._left += 1


_paces: WeakKeyDictionary[asyncio.AbstractEventLoop, Pace] = WeakKeyDictionary()


def pace() -> Pace:
    """The running loop's."""
    loop = asyncio.get_running_loop()
    if (found := _paces.get(loop)) is None:
        found = _paces[loop] = Pace()
    return found
