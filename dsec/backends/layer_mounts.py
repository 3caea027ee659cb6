"""Layers as the Edge has its holder mount them: each once, however many launches ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec
import structlog

from dsec.backends.holder_client import HolderClient
from dsec.backends.pack import Shelf
from dsec.errors import NodeError, Unavailable
from dsec.layers.mounts import LayerMount

log = structlog.get_logger("dsec.container")


class Layers(Shelf, Protocol):
    """What a backend asks of the layer store."""

    async def mount_plan(self, digest: str) -> LayerMount: ...

    async def pull(self, digest: str) -> None:
        """Make a partly filled layer whole."""
        ...


class LayerMounts:
    """Of one holder. ``lender``: those of another holder on this machine, whose mounts of whole layers are taken over, so that what both
    read is cached once."""

    def __init__(self, holder: HolderClient, layers: Layers, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self.lender: LayerMounts | None = None
        self._holder = holder
        self._layers = layers
        self._spawn = spawn
        self._mounted: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._mounted

    def holds(self, digest: str) -> bool:
        """Whether it is mounted."""
        task = self._mounted.get(digest)
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    def forget(self) -> None:
        """Another holder serves now, and has mounted nothing."""
        self._mounted.clear()

    async def mount(self, digest: str) -> None:
        """Raises `NodeError`, `Unavailable`, and what the store raises."""
        if self.holds(digest):
            return
        task = self._mounted.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._mounted[digest] = self._spawn(self._mount(digest))
        await asyncio.shield(task)

    async def drop(self, digest: str) -> None:
        """Unmount it; nothing may stand on it."""
        self._mounted.pop(digest, None)
        await self._holder.request("drop_layer", key=digest)

    async def _mount(self, digest: str) -> None:
        mount = await self._layers.mount_plan(digest)
        try:
            await self._ask(digest, mount)
        except NodeError as error:
            if mount.lazy is None:
                raise
            # The node cannot guard one more partly filled layer (descriptors, groups, FUSE): a whole one needs no guard.
            log.warning("container.layer_not_lazy", layer=digest, error=str(error), then="fetching it whole")
            await self._layers.pull(digest)
            await self._ask(digest, await self._layers.mount_plan(digest))

    async def _ask(self, digest: str, mount: LayerMount) -> None:
        lent = None
        if self.lender is not None and mount.lazy is None and mount.kind != "dir":
            try:
                lent = await self.lender.lend(digest)
            except (NodeError, Unavailable) as error:
                log.info("container.layer_not_lent", layer=digest, error=str(error))
        await self._holder.request("layer", key=digest, mount=msgspec.to_builtins(mount), of=lent)

    async def lend(self, digest: str) -> dict[str, Any]:
        """The mount of a layer, made now if it is not there, as another holder asks for it. Raises as `mount`."""
        await self.mount(digest)
        return await self._holder.request("lend_layer", key=digest)
