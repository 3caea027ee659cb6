"""A backend in memory: sandboxes that cost nothing, for placement at scale and for logic tests, with faults on demand.

It keeps the contract of `dsec.backends.base` and runs its suite. Commands are a handful of words that it understands itself
(`fake_guest`); nothing is isolated and nothing is executed on the node.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable

import msgspec

from dsec.backends.base import Capabilities, LaunchPlan, PackOrder, Undone
from dsec.backends.fake_guest import FakeGuest, FakeLink
from dsec.backends.plan import Node
from dsec.errors import NodeError, NotFound
from dsec.model import Exit, ExitReason, PackedLayer, Paused, Usage


class Faults(msgspec.Struct, kw_only=True):
    """What goes wrong, and how slowly what goes right goes. Times in seconds; may be changed while sandboxes live."""

    seed: int = 0
    prepare_delay: float = 0.0
    launch_delay: float = 0.0
    launch_jitter: float = 0.0  # up to this much more
    launch_fail_rate: float = 0.0
    die_after: float = 0.0  # 0 = never
    die_oom: bool = False
    stop_delay: float = 0.0
    stop_failures: int = 0  # so many stops fail first
    pause_fails: bool = False
    pause_delay: float = 0.0
    resume_fails: bool = False
    pack_delay: float = 0.0
    pack_fails: bool = False
    unknown_layers: frozenset[str] = frozenset()  # digests that `prepare` does not find


class FakeNode:
    """What outlives a `FakeBackend`, as a kernel outlives an Edge: give the same one to the next backend to test adoption."""

    def __init__(self) -> None:
        self.guests: dict[str, FakeGuest] = {}
        self.names: dict[str, str] = {}  # of packed layers, and the digest that each means
        self.packed: dict[str, tuple[dict[str, bytes], frozenset[str]]] = {}  # files and directories by digest

    def pack(self, name: str, guest: FakeGuest) -> str:
        """Keep all that is in a guest as a layer; its digest."""
        content = (dict(guest.files), frozenset(guest.dirs))
        parents = [layer.digest for layer in guest.plan.lowers]
        text = repr((sorted(content[0].items()), sorted(content[1]), parents)).encode()
        digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
        self.packed[digest], self.names[name] = content, digest
        return digest

    def unpack(self, guest: FakeGuest) -> None:
        """What a guest begins with: the topmost of its layers that was packed here."""
        for layer in guest.plan.lowers:
            if (content := self.packed.get(layer.digest)) is not None:
                guest.files, guest.dirs = dict(content[0]), set(content[1])
                return

    def forget(self, name: str) -> None:
        digest = self.names.pop(name, None)
        if digest is not None and digest not in self.names.values():
            self.packed.pop(digest, None)


class FakeInstance:
    """One sandbox in memory."""

    __slots__ = ("_backend", "_link", "guest", "id", "plan")

    def __init__(self, backend: FakeBackend, plan: LaunchPlan, guest: FakeGuest) -> None:
        self.id = plan.id
        self.plan = plan
        self.guest = guest
        self._backend = backend
        self._link: FakeLink | None = None

    @property
    def link(self) -> FakeLink:
        if self._link is None:
            self._link = FakeLink(self.guest, self._backend.generation)
        return self._link

    async def wait(self) -> Exit:
        return await asyncio.shield(self.guest.gone())

    def on_exit(self, call: Callable[[Exit], object]) -> None:
        self.guest.gone().add_done_callback(lambda gone: call(gone.result()))

    async def pause(self, reclaim: bool = True, /) -> Paused:  # noqa: ARG002 - there is no memory to give back
        if self._backend.faults.pause_delay:
            await asyncio.sleep(self._backend.faults.pause_delay)
        if self._backend.faults.pause_fails:
            raise Undone("the fake was told to fail", sandbox=self.id)
        self.guest.frozen = True
        return Paused(note="the fake backend holds no memory")

    async def resume(self) -> None:
        if self._backend.faults.resume_fails:
            raise Undone("the fake was told to fail", sandbox=self.id)
        self.guest.thaw()

    async def stands_still(self) -> bool:
        return self.guest.frozen

    async def usage(self) -> Usage:
        return self.guest.usage()

    async def pack_diff(self, order: PackOrder, _paused: bool, thawed: Callable[[], object], /) -> PackedLayer:
        await asyncio.sleep(self._backend.faults.pack_delay)
        if self._backend.faults.pack_fails:
            raise Undone("the fake was told to fail", sandbox=self.id)
        thawed()
        parents = tuple(layer.digest for layer in self.plan.lowers)
        digest = self._backend.world.pack(order.name, self.guest)
        return PackedLayer(name=order.name, digest=digest, parents=parents, entries=len(self.guest.files))

    async def stop(self, grace: float = 0.0) -> None:  # noqa: ARG002 - nothing in here needs time to end
        faults = self._backend.faults
        if faults.stop_delay:
            await asyncio.sleep(faults.stop_delay)
        if faults.stop_failures > 0:
            faults.stop_failures -= 1
            raise NodeError("the fake was told to fail", sandbox=self.id, reason="fault")
        self._backend.free(self.plan.ulid, Exit(reason=ExitReason.REQUESTED, wall_ts=time.time()))


class FakeBackend:
    """Implements `dsec.backends.base.Backend` in memory. A launch without delays is one dict entry and two objects."""

    def __init__(self, faults: Faults | None = None, *, edge: str = "fake", node: FakeNode | None = None, generation: int = 1) -> None:
        self.faults = faults or Faults()
        missing = {"snapshot": "the fake backend has no processes"}
        self.capabilities = Capabilities(name="fake", pause=True, pack_diff=True, fork=True, tty=True, missing=missing)
        self.node = Node(edge=edge, state_dir="/nonexistent", backends=("fake",), userns=True)
        self.generation = generation
        self.world = node or FakeNode()
        self._random = random.Random(self.faults.seed)

    async def open(self) -> None:
        return None

    async def prepare(self, plan: LaunchPlan) -> None:
        if self.faults.prepare_delay:
            await asyncio.sleep(self.faults.prepare_delay)
        for layer in plan.lowers:
            if layer.digest in self.faults.unknown_layers:
                raise NotFound("no such layer", field="layer", value=layer.name)

    async def launch(self, plan: LaunchPlan) -> FakeInstance:
        faults = self.faults
        if plan.ulid in self.world.guests:
            raise Undone(f"{plan.ulid} is here already", sandbox=plan.id, retryable=False)
        guest = self.world.guests[plan.ulid] = FakeGuest(plan)
        if self.world.packed:
            self.world.unpack(guest)
        try:
            if faults.launch_delay or faults.launch_jitter:
                await asyncio.sleep(faults.launch_delay + faults.launch_jitter * self._random.random())
            if faults.launch_fail_rate and self._random.random() < faults.launch_fail_rate:
                raise Undone("launch failed: the fake was told to fail", sandbox=plan.id, reason="fault")
        except BaseException:
            self.world.guests.pop(plan.ulid, None)
            raise
        if faults.die_after:
            reason = ExitReason.OOM if faults.die_oom else ExitReason.EXITED
            ending = Exit(reason=reason, signal=9 if faults.die_oom else None, exit_code=None if faults.die_oom else 1)
            asyncio.get_running_loop().call_later(faults.die_after, guest.end, ending)
        return FakeInstance(self, plan, guest)

    async def adopt(self, plan: LaunchPlan) -> FakeInstance | None:
        guest = self.world.guests.get(plan.ulid)
        return FakeInstance(self, plan, guest) if guest is not None and guest.exit is None else None

    async def last_exit(self, ulid: str) -> Exit | None:
        guest = self.world.guests.get(ulid)
        return guest.exit if guest is not None else None

    async def reap(self, known: frozenset[str]) -> tuple[str, ...]:
        strays = tuple(sorted(self.world.guests.keys() - known))
        for ulid in strays:
            self.free(ulid, Exit(reason=ExitReason.REQUESTED, wall_ts=time.time()))
        return strays

    async def close(self) -> None:
        return None

    async def shutdown(self) -> None:
        return None

    def free(self, ulid: str, ending: Exit) -> None:
        guest = self.world.guests.pop(ulid, None)
        if guest is not None:
            guest.end(ending)
