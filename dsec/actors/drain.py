"""A node is emptied: it takes no more, and what it runs goes on, is stopped, or is paused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dsec.bus.messages import DrainRequest
from dsec.errors import DsecError, SandboxGone
from dsec.model import Exit, ExitReason, State

if TYPE_CHECKING:
    from dsec.actors.edge import Edge
    from dsec.actors.sandbox import Sandbox


class Drain:
    """Of one Edge."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._working: dict[str, asyncio.Task[tuple[str, ...]]] = {}  # by mode

    async def order(self, request: DrainRequest, wait: float) -> tuple[str, ...]:
        """What could not be done, as far as it is known after ``wait`` seconds; it goes on after them, and a repeat joins it."""
        edge = self._edge
        edge.draining = not request.undo
        edge.beat()
        if request.undo or request.mode == "wait":
            return ()
        work = self._working.get(request.mode)
        if work is None or work.done():
            work = self._working[request.mode] = edge.spawn(self._stop() if request.mode == "stop" else self._pause())
        await asyncio.wait([work], timeout=wait)
        return work.result() if work.done() else ()

    async def _stop(self) -> tuple[str, ...]:
        await self._edge.stop_all(Exit(reason=ExitReason.DRAINED, detail="the node was drained"))
        return ()

    async def _pause(self) -> tuple[str, ...]:
        gate = asyncio.Semaphore(self._edge.config.stop_parallel)

        async def one(sandbox: Sandbox) -> str:
            async with gate:
                try:
                    await sandbox.pause()
                except SandboxGone:
                    return ""
                except DsecError as error:
                    return f"{sandbox.id}: {error}"
            return ""

        running = [sandbox for sandbox in self._edge.sandboxes.values() if sandbox.state is State.RUNNING]
        return tuple(filter(None, await asyncio.gather(*(one(sandbox) for sandbox in running))))
