"""Fence and node records in KV: who may still act for a node's name.

``node.<edge>`` holds the incarnation that serves now, written by the Edge at its start. ``fence.<edge>`` holds the incarnation that was
declared lost, written by a Watcher with compare-and-set. A returning Edge reads its fence before it serves: fenced, it frees everything;
not fenced, it adopts.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from dsec.bus.bus import Bus
from dsec.bus.streams import KvBucket, kv_bucket
from dsec.errors import Conflict

BUCKET = "DSEC_NODES"


class Fences:
    """Raises `Unavailable` while JetStream is away."""

    def __init__(self, bucket: KvBucket) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, bus: Bus, replicas: int = 1) -> Fences:
        return cls(await kv_bucket(bus, BUCKET, replicas=replicas))

    async def enter(self, edge: str, incarnation: str) -> bool:
        """An Edge starts. True when an earlier start of the same state directory was declared lost, and it has not been told yet.

        The node record is written before the fence is read, and `lose` looks at the record again after it has written the fence: of the
        two at least one sees the other.
        """
        await self._bucket.put(f"node.{edge}", incarnation.encode())
        entry = await self._bucket.get(f"fence.{edge}")
        if entry is None:
            return False
        uuid, _, start = entry.value.decode().partition(".")
        mine, _, now = incarnation.partition(".")
        return uuid == mine and int(start) < int(now)

    async def told(self, edge: str) -> None:
        """The fenced Edge has freed everything: the fence has done its work."""
        await self._bucket.delete(f"fence.{edge}")

    async def leave(self, edge: str) -> None:
        """It stopped in order and holds nothing."""
        await self._bucket.delete(f"node.{edge}")

    async def lose(self, edge: str, incarnation: str) -> str:
        """Declare it lost.

        Returns "won"; "known" when another Watcher has done so; "other" when another incarnation serves, so that nothing is lost.
        """
        key = f"fence.{edge}"
        if await self._serves_other(edge, incarnation):
            return "other"
        old = await self._bucket.get(key)
        if old is not None and old.value.decode() == incarnation:
            return "known"
        try:
            if old is None:
                revision = await self._bucket.create(key, incarnation.encode())
            else:
                revision = await self._bucket.update(key, incarnation.encode(), old.revision)
        except Conflict:
            return "known"
        if await self._serves_other(edge, incarnation):  # it came back in this very moment
            with contextlib.suppress(Conflict):
                await self._bucket.delete(key, revision)
            return "other"
        return "won"

    async def _serves_other(self, edge: str, incarnation: str) -> bool:
        node = await self._bucket.get(f"node.{edge}")
        return node is not None and node.value.decode() != incarnation

    async def forget(self, edge: str, incarnation: str) -> None:
        """No Watcher expects the lost node any more; its fence stays until it returns."""
        node = await self._bucket.get(f"node.{edge}")
        if node is not None and node.value.decode() == incarnation:
            with contextlib.suppress(Conflict):
                await self._bucket.delete(f"node.{edge}", node.revision)

    async def nodes(self) -> AsyncIterator[tuple[str, str]]:
        """(edge, incarnation) of every node that should be there."""
        for key in await self._bucket.keys("node"):
            entry = await self._bucket.get(key)
            if entry is not None:
                yield key.removeprefix("node."), entry.value.decode()
