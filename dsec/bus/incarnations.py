"""Requests under way, by the incarnation of the Edge that was asked: when it has died, its answer never comes.

NATS does not tell that a responder has died, so such a request would end at its own deadline. Who hears heartbeats or the Watcher's view
knows as soon as the next incarnation is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

from dsec.errors import Unavailable

T = TypeVar("T")


class Incarnations:
    """``hear`` what heartbeats say, ``ask`` what would be lost with an Edge."""

    def __init__(self) -> None:
        self._now: dict[str, str] = {}
        self._asking: dict[asyncio.Timeout, dict[str, str]] = {}

    def hear(self, edge: str, incarnation: str) -> None:
        """This one serves now. What is older than one heard before is late news, and none."""
        before = self._now.get(edge, "")
        if incarnation == before or _older(incarnation, before):
            return
        self._now[edge] = incarnation
        for bell, asked in self._asking.items():
            if edge not in asked:
                continue
            if not asked[edge]:
                asked[edge] = incarnation
            elif not bell.expired():
                bell.reschedule(asyncio.get_running_loop().time())

    async def ask(self, edges: Collection[str], call: Awaitable[T]) -> T:
        """The outcome of ``call``, a request to these Edges; `Unavailable` (reason ``restarted``) as soon as another incarnation of one of
        them is heard of than the one known when it began, or the first one heard of since."""
        bell = asyncio.timeout(None)
        try:
            async with bell:
                self._asking[bell] = {edge: self._now.get(edge, "") for edge in edges}
                return await call
        except TimeoutError:
            if not bell.expired():
                raise
            text = f"{' or '.join(edges)} was started anew: what the one before it was asked is lost"
            raise Unavailable(text, reason="restarted") from None
        finally:
            self._asking.pop(bell, None)


def _older(one: str, other: str) -> bool:
    """Incarnations are a state directory's UUID and its count of starts."""
    place, _, count = one.rpartition(".")
    where, _, reached = other.rpartition(".")
    return bool(place) and place == where and count.isdecimal() and reached.isdecimal() and int(count) < int(reached)
