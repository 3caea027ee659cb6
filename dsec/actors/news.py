"""News of bursts to their callers' inboxes: gathered for a few milliseconds, never delayed when there is only one.

The first news of a burst leaves at the end of the loop's current round; what follows within the window leaves together at its end.
"""

from __future__ import annotations

import asyncio

import structlog

from dsec.bus.bus import Bus
from dsec.bus.messages import BurstNews, Failed, Placed, ReadyItem
from dsec.errors import DsecError

log = structlog.get_logger("dsec.edge")
MOST = 2_000  # items in one message


class _Open:
    __slots__ = ("accepted", "failed", "quiet_until", "ready", "timer")

    def __init__(self) -> None:
        self.accepted: list[Placed] = []
        self.ready: list[ReadyItem] = []
        self.failed: list[Failed] = []
        self.quiet_until = 0.0  # loop time until which news are gathered
        self.timer: asyncio.TimerHandle | asyncio.Handle | None = None


class Reporter:
    """Posts `BurstNews`; ``window`` in seconds."""

    def __init__(self, bus: Bus, edge: str, window: float) -> None:
        self._bus = bus
        self._edge = edge
        self._window = window
        self._open: dict[tuple[str, str], _Open] = {}

    def accepted(self, burst: str, inbox: str, placed: list[Placed]) -> None:
        self._of(burst, inbox).accepted += placed

    def ready(self, burst: str, inbox: str, item: ReadyItem) -> None:
        self._of(burst, inbox).ready.append(item)

    def failed(self, burst: str, inbox: str, item: Failed) -> None:
        self._of(burst, inbox).failed.append(item)

    def _of(self, burst: str, inbox: str) -> _Open:
        key = (burst, inbox)
        entry = self._open.get(key)
        if entry is None:
            entry = self._open[key] = _Open()
        if entry.timer is None:
            loop = asyncio.get_running_loop()
            wait = entry.quiet_until - loop.time()
            entry.timer = loop.call_later(wait, self._send, key) if wait > 0 else loop.call_soon(self._send, key)
        return entry

    def _send(self, key: tuple[str, str]) -> None:
        entry = self._open[key]
        entry.timer = None
        if not (entry.accepted or entry.ready or entry.failed):
            del self._open[key]  # a whole window without news
            return
        loop = asyncio.get_running_loop()
        entry.quiet_until = loop.time() + self._window
        entry.timer = loop.call_later(self._window, self._send, key)
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
            if (entry.timer) is not None:
                entry.timer.cancel()
        self._open.clear()
