"""When spare groups (dsec/qos/spares.py) are made, given away and given up: they pay where very many sandboxes live, and cost there what
they save, so they are made while nothing is launched. A burst that needs more makes its groups as if there were none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from dsec.errors import NodeError
from dsec.qos.cgroup import Cgroups, Limits
from dsec.qos.spares import MOST, Spares

log = structlog.get_logger("dsec.stock")
MANY = 1_000  # live sandboxes from which on there are spares; with less than half as many they go again
QUIET_S = 0.2  # since the last launch; while there is always another, one spare is made in each such span, and only when few are left
FEW = MOST // 4
PAUSE_S = 0.2  # after so long without a launch the next one's zygote has made its process ahead, with groups of its own (launcher/ahead.c)


class Stock:
    """``live`` counts the sandboxes that live, ``spawn`` runs a coroutine that the backend waits for at its end."""

    def __init__(self, groups: Cgroups, live: Callable[[], int], spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._spares = Spares(groups)
        self._live, self._spawn = live, spawn
        self.given = 0  # spares that became a sandbox's
        self._like = True  # the last launch made its groups, and its zygote makes a process with groups like them ahead
        self._works = False
        self._last = 0.0
        self._closed = False

    def __len__(self) -> int:
        return len(self._spares)

    async def give(self, name: str, limits: Limits, *, ahead: bool = False) -> bool:
        """Make a spare the group ``name``, where one is there. True when it has the quota of ``limits``. ``ahead``: it may be of those
        that zygotes make ahead, which need none."""
        last, self._last = self._last, time.monotonic()
        if ahead and self._like and self._last - last > PAUSE_S:
            self._spares.cpus = limits.cpus  # those that are made next are for the likes of it
            return False
        if (spare := self._spares.take(limits)) is None or not await asyncio.to_thread(self._spares.become, spare, name):
            self._like = True
            return False
        self.given += 1
        self._like = spare.cpus != limits.cpus
        return not self._like

    def settle(self) -> None:
        """A sandbox was launched, or has ended: see that there are as many spares as there should be."""
        if not self._works and not self._closed and (self._short() or self._over()):
            self._works = True
            self._spawn(self._work())

    def close(self) -> None:
        """Make no more and give up what there is, which what was spawned does."""
        self._closed = True
        if len(self._spares) and not self._works:
            self._works = True
            self._spawn(self._work())

    def _short(self) -> bool:
        return not self._closed and self._spares.wanting and self._live() >= MANY

    def _over(self) -> bool:
        return bool(len(self._spares)) and (self._closed or self._live() < MANY // 2)

    async def _work(self) -> None:
        try:
            while self._short():
                if time.monotonic() - self._last < QUIET_S:
                    await asyncio.sleep(QUIET_S)
                    if time.monotonic() - self._last < QUIET_S and len(self._spares) > FEW:
                        continue
                self._spares.put(await asyncio.to_thread(self._spares.make, self._spares.cpus))
            if self._over():
                await asyncio.to_thread(self._spares.remove, self._spares.take_all())
        except NodeError as error:
            log.warning("stock.not_filled", error=str(error), then="groups are made when they are needed")
        finally:
            self._works = False
