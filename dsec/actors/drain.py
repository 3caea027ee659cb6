"""A node is emptied: it takes no more, and what it runs goes on, is stopped, or is paused.

The order is the Edge's own: it is written down, outlives the Edge's process, and is worked on whether or not somebody watches, until it
is done or undone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from dsec.bus.messages import DrainRequest
from dsec.errors import Conflict, DsecError, InvalidRequest, SandboxGone
from dsec.model import Exit, ExitReason, State

if TYPE_CHECKING:
    from dsec.actors.edge import Edge
    from dsec.actors.sandbox import Sandbox

log = structlog.get_logger("dsec.edge")
MODES = ("wait", "stop", "pause")
LOOK = 0.2  # seconds between two looks at what is left: what is starting must be there first
STOP_PATIENCE = 30.0  # seconds for one sandbox, after which it is looked at again
_DONE = " done"
_DRAINED = Exit(reason=ExitReason.DRAINED, detail="the node was drained")


def left(mode: str, states: Iterable[State]) -> int:
    """How many sandboxes there still are to see to."""
    return sum(mode != "pause" or state is not State.PAUSED for state in states)


class Drain:
    """Of one Edge. ``mode``: the order in force, "" when there is none; ``trouble``: by sandbox, why it could not be paused."""

    def __init__(self, edge: Edge) -> None:
        self.mode = ""
        self.trouble: dict[str, str] = {}
        self._edge = edge
        self._finished = False  # a pause that is over: who is resumed after it is left alone
        self._turn = 0  # orders so far: who works on an earlier one ends
        self._writing = asyncio.Lock()
        self._work: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self._finished or (self.mode != "pause" and not self._edge.sandboxes)

    def take_up(self) -> None:
        """What an Edge before this one was ordered."""
        order = self._edge.store.drain
        self.mode, self._finished = order.removesuffix(_DONE), order.endswith(_DONE)
        if not self._finished:
            self._begin()

    async def order(self, request: DrainRequest, wait: float) -> None:
        """Returns when it is done, or after ``wait`` seconds; it goes on after them.

        Raises `Conflict` where ``again`` asks for an order that another has replaced, `NodeError` when it could not be written."""
        if request.mode not in MODES:
            raise InvalidRequest("is not a choice", field="mode", value=request.mode, fix=f"use {', '.join(MODES)}")
        mode = "" if request.undo else request.mode
        if request.again and mode != self.mode:
            what = f"it is now drained otherwise ({self.mode})" if self.mode else "it takes sandboxes again"
            raise Conflict(f"this drain was undone: {what}", field="node", value=self._edge.name, reason="undone", fix="see `dsec node ls`")
        if not request.again:
            async with self._writing:
                await self._edge.store.put_drain(mode)
                if mode != self.mode or self._finished:
                    self.mode, self._finished, self.trouble = mode, False, {}
                    self._begin()
            self._edge.beat()
        if not self.done and self._work is not None and self._work.done():  # one that was on its way here has come
            self._begin()
        if self._work is not None and not self.done:
            await asyncio.wait([self._work], timeout=wait)

    def _begin(self) -> None:
        self._turn += 1
        self._work = self._edge.spawn(self._empty(self._turn)) if self.mode in ("stop", "pause") else None

    async def _empty(self, turn: int) -> None:
        gate = asyncio.Semaphore(self._edge.config.stop_parallel)
        while self._turn == turn:
            await asyncio.gather(*(self._one(sandbox, gate, turn) for sandbox in list(self._edge.sandboxes.values())))
            states = [each.state for each in self._edge.sandboxes.values() if each.id not in self.trouble]
            if self._turn == turn and not left(self.mode, states):
                break
            await asyncio.sleep(LOOK)
        async with self._writing:
            if self._turn == turn and self.mode == "pause":
                self._finished = True
                try:
                    await self._edge.store.put_drain("pause" + _DONE)
                except DsecError as error:  # then a next Edge pauses once more
                    log.error("edge.drain_not_written", error=str(error))

    async def _one(self, sandbox: Sandbox, gate: asyncio.Semaphore, turn: int) -> None:
        async with gate:
            if self._turn != turn:
                return
            if self.mode == "stop":
                with contextlib.suppress(DsecError):  # looked at again
                    await sandbox.stop(0.0, _DRAINED, asyncio.get_running_loop().time() + STOP_PATIENCE)
            elif sandbox.state is State.RUNNING and sandbox.id not in self.trouble:
                try:
                    await sandbox.pause()
                except SandboxGone:
                    return
                except DsecError as error:
                    self.trouble[sandbox.id] = f"{sandbox.id}: {error}"
