"""Whether an Edge may still speak for its node, or a Watcher may have declared it lost while nobody heard it.

An Edge that was out of touch for longer than half of the time after which a Watcher declares a node lost is in doubt: it answers
nothing, takes nothing and tells no result until it has entered anew, as at a start: under a new incarnation it writes its node record and
reads its fence, so that it and a Watcher that is about to fence it cannot both miss each other. Fenced, it frees all that it holds; not
fenced, it goes on. Touch is a ping of ours that was answered: what comes in proves nothing, for a half-open connection brings that too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

from dsec.actors.fence import Fences
from dsec.bus.actor import Context
from dsec.errors import DsecError, SandboxGone
from dsec.model import Exit, ExitReason

if TYPE_CHECKING:
    from dsec.actors.edge import Edge

log = structlog.get_logger("dsec.edge")
LOST = Exit(reason=ExitReason.NODE_LOST, detail="the node was declared lost while it was cut off")


class Touch:
    """Pure; times are monotonic seconds. ``trust``: how long after the last proof of touch nobody can have declared us lost."""

    def __init__(self, trust: float, now: float) -> None:
        self._trust = trust
        self._last = now
        self._doubted = False

    def proved(self, sent: float, now: float) -> bool:
        """What was sent at ``sent`` has been answered now. True when that ends a silence in which we may have been declared lost."""
        if now - self._last > self._trust:
            self._doubted = True
        self._last = max(self._last, sent)
        return self._doubted

    def doubt(self) -> None:
        self._doubted = True

    def doubtful(self, now: float) -> bool:
        return self._doubted or now - self._last > self._trust

    def cleared(self, asked: float) -> None:
        """The fence was asked for at ``asked``, and we are not, or no more, behind it."""
        self._doubted = False
        self._last = max(self._last, asked)


class Standing:
    """Of one Edge. ``turn`` counts the times that it was found fenced: what was begun before is not told after."""

    def __init__(self, edge: Edge, fences: Fences | None, trust: float) -> None:
        self.turn = 0
        self._edge = edge
        self._fences = fences
        self._loop = asyncio.get_running_loop()
        self._touch = Touch(trust, self._loop.time())
        self._entering: asyncio.Task[None] | None = None
        if fences is not None:
            edge.bus.transport.on_touch = self._proved

    def in_doubt(self) -> bool:
        """Asking is enough: where it is, entering begins."""
        if self._fences is None or not self._touch.doubtful(self._loop.time()):
            return False
        if self._entering is None and not self._edge.over:
            self._entering = self._edge.spawn(self._enter(self._fences))
        return True

    def doubt(self) -> None:
        """Somebody says that we may be fenced."""
        self._touch.doubt()
        self.in_doubt()

    async def settled(self) -> None:
        """Returns once it is in no doubt."""
        while self.in_doubt() and self._entering is not None:
            await asyncio.shield(self._entering)

    async def same(self, turn: int) -> None:
        """Returns once it is certain that we were not fenced since ``turn``; raises `SandboxGone` if we were."""
        await self.settled()
        if self.turn != turn:
            raise SandboxGone(f"has ended ({LOST.reason}): {LOST.detail}", reason=str(LOST.reason))

    def guard(self, handler: Any, *, again: bool = False, at_once: bool = False) -> Any:
        """A handler that begins nothing and tells nothing while it is in doubt. Where this node was fenced meanwhile, the answer is that
        the sandbox is gone; with ``again`` it is asked for once more. ``at_once``: it begins in any case, and only its
        answer waits."""
        if not asyncio.iscoroutinefunction(handler):
            return handler

        async def handle(context: Context, request: Any) -> Any:
            turn = self.turn
            if self.in_doubt() and not at_once:
                await self.settled()
                turn = self.turn
            reply = await handler(context, request)
            if self.in_doubt():
                await self.settled()
            if self.turn != turn:
                if again:
                    return await handler(context, request)
                await self.same(turn)
            return reply

        return handle

    def _proved(self, sent: float) -> None:
        if self._touch.proved(sent, self._loop.time()):
            self.in_doubt()

    async def _enter(self, fences: Fences) -> None:
        edge, pause = self._edge, 0.1
        log.warning("edge.in_doubt", edge=edge.name, text="out of touch for long: nothing is answered until its fence has been read")
        try:
            incarnation = ""
            while True:
                try:
                    asked = self._loop.time()
                    incarnation = incarnation or await edge.store.renew()
                    if await fences.enter(edge.name, incarnation):
                        await self._fall()
                        await fences.told(edge.name)
                    break
                except DsecError as error:
                    log.warning("edge.fence_unread", edge=edge.name, error=str(error))
                    await asyncio.sleep(pause)
                    pause = min(1.0, pause * 2)
            edge.store.incarnation = incarnation
            self._touch.cleared(asked)
        finally:
            self._entering = None
        edge.beat()
        edge.reporter.go_on()

    async def _fall(self) -> None:
        """Another may run what we run: all of it ends, and nothing of it is told."""
        edge = self._edge
        log.error("edge.fenced", edge=edge.name, incarnation=edge.store.incarnation, sandboxes=len(edge.sandboxes))
        self.turn += 1
        while edge.adopting:  # noqa: ASYNC110 - once a start; all that is to end must be there first
            await asyncio.sleep(0.05)
        while edge.sandboxes:
            await edge.stop_all(LOST)
        edge.reporter.forget()
