"""One running container, as the Edge holds it: names, its link, its end. What it does goes through its backend."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.backends.base import LaunchPlan, PackOrder
from dsec.backends.capture import Subject
from dsec.backends.pack import pack_upper
from dsec.errors import DsecError, NodeError, Unsupported
from dsec.model import Exit, ExitReason, PackedLayer, Paused, Usage

if TYPE_CHECKING:
    from dsec.backends.container import ContainerBackend
    from dsec.backends.guest.link import Link


_NOTHING: Mapping[str, Any] = MappingProxyType({})
LAST_WORDS = 1.0  # seconds in which the reason of an end is heard


@functools.lru_cache(256)
def defaults(user: str, workdir: str) -> Mapping[str, str]:
    """What a command gets that names neither; the same object for all sandboxes that are alike."""
    return MappingProxyType({"user": user, "cwd": workdir})


class Once:
    """As `asyncio.Event`, for what happens once. An event has a queue of waiters, which would be the largest part of an idle sandbox."""

    __slots__ = ("_future", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._future: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        if not self._is_set:
            if self._future is None:
                self._future = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._future)


class End:
    """The end of one sandbox: known to the holder before anybody here may have asked for it."""

    __slots__ = ("seen", "status")

    def __init__(self) -> None:
        self.seen = Once()
        self.status: Mapping[str, Any] = _NOTHING


def _tell(call: Callable[[Exit], object], gone: asyncio.Future[Exit]) -> None:
    call(gone.result())


class ContainerInstance:
    """One running container."""

    def __init__(self, backend: ContainerBackend, plan: LaunchPlan, pid: int, link: Link) -> None:
        self.id = plan.id
        self.plan = plan
        self.pid = pid
        self.link = link
        self._backend = backend
        self._gone: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._released = False
        self._stopping = False

    @property
    def cgroup(self) -> str:
        return self.plan.cgroup

    @property
    def netns(self) -> str:
        """A path that names the network namespace while the sandbox lives."""
        return f"/proc/{self.pid}/ns/net"

    async def wait(self) -> Exit:
        return await asyncio.shield(self._gone)

    async def answers(self, timeout: float) -> None:
        """Until the agent answers, its sandbox ends or ``timeout`` seconds pass (`NodeError`)."""
        patience = asyncio.timeout(timeout)
        waiting = True

        def ended(_: asyncio.Future[Exit]) -> None:
            if waiting:  # it may be called a moment after it was taken away
                patience.reschedule(0.0)

        self._gone.add_done_callback(ended)
        try:
            async with patience:
                try:
                    await self.link.reach()
                finally:
                    waiting = False
        except (TimeoutError, DsecError) as error:
            if isinstance(error, DsecError):  # the end of who held the socket is seen a little before the sandbox's
                await asyncio.wait([self._gone], timeout=LAST_WORDS)
            if self._gone.done():
                how = self._gone.result()
                text = "" if how.reason is ExitReason.LAUNCH_FAILED else "the sandbox ended before it answered: "
                raise NodeError(f"{text}{how.detail}", reason="guest" if text else "launcher") from error
            if isinstance(error, DsecError):
                raise
            raise NodeError(f"the guest did not answer within {timeout} s", reason="guest") from error
        finally:
            self._gone.remove_done_callback(ended)

    def on_exit(self, call: Callable[[Exit], object]) -> None:
        self._gone.add_done_callback(functools.partial(_tell, call))

    async def pause(self, reclaim: bool = True, /) -> Paused:
        return await self._backend.pauser.pause(self.plan.ulid, self.pid, reclaim)

    async def resume(self) -> None:
        await self._backend.pauser.resume(self.plan.ulid, self.pid)

    async def stands_still(self) -> bool:
        return await self._backend.pauser.stands_still(self.plan.ulid)

    @property
    def has_ended(self) -> bool:
        return self._gone.done()

    async def pack_diff(self, order: PackOrder, paused: bool, thawed: Callable[[], object], /) -> PackedLayer:
        backend, plan = self._backend, self.plan
        freeze = functools.partial(backend.pauser.freeze, plan.ulid)
        pack = functools.partial(
            pack_upper,
            self,
            backend.layers,
            order,
            paused=paused,
            freeze=freeze,
            find_init=functools.partial(backend.find_init, plan),
        )
        if not order.processes:
            return await pack(thawed=thawed)
        if paused:
            raise Unsupported("the processes of a paused sandbox cannot be kept", sandbox=self.id, reason="paused", fix="resume it first")
        capture = backend.snapshots.capture(
            order.processes,
            Subject(
                sandbox=self.id,
                init=self.pid,
                owner=plan.idmap.base if plan.idmap is not None else 0,
                socket_path=backend.socket_path(plan.ulid),
                generation=backend.options.generation,
                freezer=backend.pauser.place(plan.ulid),
                freeze=freeze,
                pids=functools.partial(backend.pids, plan),
            ),
        )

        def runs() -> None:
            self.link.let_go()
            thawed()

        self.link.hold()
        try:
            await capture.prepare()
            packed = await pack(thawed=runs, still=capture.dump)
            await capture.keep()
            return msgspec.structs.replace(packed, processes=capture.size)
        except BaseException:
            await asyncio.shield(capture.discard())
            raise
        finally:
            self.link.let_go()

    async def usage(self) -> Usage:
        return await self._backend.usage(self.plan)

    async def stop(self, grace: float = 0.0) -> None:
        if self._released:
            return
        self._stopping = True
        if grace > 0 and not self._gone.done():
            await self._backend.terminate(self.plan.ulid)
            await asyncio.wait([self._gone], timeout=grace)
        await self._backend.release(self.plan.ulid)
        self._released = True
        if not self._gone.done():
            self._gone.set_result(Exit(reason=ExitReason.REQUESTED, wall_ts=time.time()))

    def ended(self, ending: Exit) -> None:
        if self._stopping and ending.signal == 9:  # ours; whatever it did by itself before that keeps its reason
            ending = Exit(reason=ExitReason.REQUESTED, signal=9, wall_ts=ending.wall_ts)
        if not self._gone.done():
            self._gone.set_result(ending)
