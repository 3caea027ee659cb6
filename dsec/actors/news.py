"""News of bursts to their callers' inboxes: gathered for a few milliseconds, never delayed when there is nothing to gather.

The first news of a burst that somebody waits for leaves at the end of the loop's current round; what follows within the window leaves
together at its end, or at once when nothing more of this burst is expected here: a single create never waits. Nobody waits for being
accepted: that goes along with what comes next, or alone when nothing has come for a while. An Edge in doubt (dsec/actors/standing.py) tells
nothing: its news wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dsec.bus.bus import Bus
from dsec.bus.messages import BurstNews, Failed, Placed, ReadyItem
from dsec.errors import DsecError

log = structlog.get_logger("dsec.edge")
ALONE = 0.02  # seconds after which an acceptance goes by itself
MOST = 500  # items in one message: a ready one with many layers takes a kilobyte


class _Open:
    __slots__ = ("accepted", "due", "expected", "failed", "quiet_until", "ready", "timer")

    def __init__(self) -> None:
        self.accepted: list[Placed] = []
        self.ready: list[ReadyItem] = []
        self.failed: list[Failed] = []
        self.expected = 0  # accepted, and neither ready nor failed yet
        self.quiet_until = 0.0  # loop time until which news are gathered
        self.due = 0.0  # loop time at which the timer goes
        self.timer: asyncio.TimerHandle | asyncio.Handle | None = None


class Reporter:
    """Posts `BurstNews`; ``window`` in seconds."""

    def __init__(self, bus: Bus, edge: str, window: float) -> None:
        self._bus = bus
        self._edge = edge
        self._window = window
        self._open: dict[tuple[str, str], _Open] = {}
        self.in_doubt: Callable[[], bool] = lambda: False

    def accepted(self, burst: str, inbox: str, placed: list[Placed], expected: int) -> None:
        """``expected``: how many more of them will be ready or failed, and are not counted for this inbox yet."""
        entry = self._of(burst, inbox)
        entry.accepted += placed
        entry.expected += expected
        self._schedule((burst, inbox), entry, ALONE)

    def ready(self, burst: str, inbox: str, item: ReadyItem) -> None:
        entry = self._of(burst, inbox)
        entry.ready.append(item)
        entry.expected -= 1
        self._schedule((burst, inbox), entry)

    def failed(self, burst: str, inbox: str, item: Failed) -> None:
        entry = self._of(burst, inbox)
        entry.failed.append(item)
        entry.expected -= 1
        self._schedule((burst, inbox), entry)

    def moved(self, burst: str, inbox: str) -> None:
        """One that was expected here will be told to another inbox."""
        if (entry := self._open.get((burst, inbox))) is not None:
            entry.expected -= 1
            self._schedule((burst, inbox), entry)

    def _of(self, burst: str, inbox: str) -> _Open:
        key = (burst, inbox)
        entry = self._open.get(key)
        if entry is None:
            entry = self._open[key] = _Open()
        return entry

    def _schedule(self, key: tuple[str, str], entry: _Open, patience: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        when = 0.0 if entry.expected <= 0 else max(entry.quiet_until, loop.time() + patience)
        at_once = when <= loop.time()
        if entry.timer is not None:
            if not at_once and entry.due <= when:
                return
            entry.timer.cancel()
        entry.due = when
        entry.timer = loop.call_soon(self._send, key) if at_once else loop.call_at(when, self._send, key)

    def _send(self, key: tuple[str, str]) -> None:
        entry = self._open[key]
        entry.timer = None
        if self.in_doubt():
            return
        entry.quiet_until = asyncio.get_running_loop().time() + self._window
        if entry.expected <= 0:
            del self._open[key]
        accepted, ready, failed = entry.accepted, entry.ready, entry.failed
        entry.accepted, entry.ready, entry.failed = [], [], []
        burst, inbox = key
        try:
            for at in range(0, max(len(accepted), len(ready), len(failed)), MOST):
                part = slice(at, at + MOST)
                news = BurstNews(
                    burst=burst, edge=self._edge, accepted=tuple(accepted[part]), ready=tuple(ready[part]), failed=tuple(failed[part])
                )
                self._bus.post(inbox, news)
        except DsecError as error:  # a long outage: the caller asks when it hears nothing
            log.warning("edge.news_lost", burst=burst, error=str(error))

    def flush(self) -> None:
        """Send what is gathered, now."""
        for key, entry in list(self._open.items()):
            if entry.timer is not None:
                entry.timer.cancel()
            self._send(key)
        self._open.clear()

    def go_on(self) -> None:
        """There is no doubt any more: send what has waited."""
        for key, entry in list(self._open.items()):
            if entry.timer is None and (entry.accepted or entry.ready or entry.failed):
                self._send(key)

    def forget(self) -> None:
        """The node was declared lost: what waits to be told is not so any more. What ends by that is told as any failure."""
        for entry in self._open.values():
            entry.accepted, entry.ready = [], []
