"""Fence and node records in KV: who may still act for a node's name.

``node.<edge>`` holds the incarnation that serves now, written by the Edge at its start. ``fence.<edge>`` holds the incarnation that was
declared lost, written by a Watcher with compare-and-set. A returning Edge reads its fence before it serves: fenced, it frees everything;
not fenced, it adopts.
"""

from __future__ import annotations

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
        """An Edge starts. True when an earlier start of the same state directory was declared lost, and it has not been told yet."""
        entry = await self._bucket.get(f"fence.{edge}")
        fenced = False
        if entry is not None:
            uuid, _, start = entry.value.decode().partition(".")
            mine, _, now = incarnation.partition(".")
            fenced = uuid == mine and int(start) < int(now)
        await self._bucket.put(f"node.{edge}", incarnation.encode())
        return fenced

    async def told(self, edge: str) -> None:
        """The fenced Edge has freed everything: the fence has done its work."""
        await self._bucket.delete(f"fence.{edge}")

    async def leave(self, edge: str) -> None:
        """It stopped in order and holds nothing."""
        await self._bucket.delete(f"node.{edge}")

    async def lose(self, edge: str, incarnation: str) -> bool:
        """Declare it lost. False when another Watcher has done so or another incarnation serves."""
        node = await self._bucket.get(f"node.{edge}")
        if node is not None and node.value.decode() != incarnation:
            return False
        old = await self._bucket.get(f"fence.{edge}")
        try:
            if old is None:
                await self._bucket.create(f"fence.{edge}", incarnation.encode())
            elif old.value.decode() != incarnation:
                await self._bucket.update(f"fence.{edge}", incarnation.encode(), old.revision)
            else:
                return False
        except Conflict:
            return False
        if node is not None:
            try:
                await self._bucket.delete(f"node.{edge}", node.revision)
            except Conflict:
                return True  # it came back in this moment: it reads the fence, or reads none and its new incarnation is not fenced
        return True

    async def nodes(self) -> AsyncIterator[tuple[str, str]]:
        """(edge, incarnation) of every node that should be there."""
        for key in await self._bucket.keys("node"):
            entry = await self._bucket.get(key)
            if entry is not None:
                yield key.removeprefix("node."), entry.value.decode()
