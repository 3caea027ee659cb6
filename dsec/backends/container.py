"""Sandboxes as containers: our overlay as root, our cgroups, a driver (`dsec.backends.driver`) in between, Aether as PID 1.

Everything that a sandbox holds derives from its ulid: ``<state>/sandboxes/<ulid>/``, its socket, its cgroups, its place in the
holder. So an Edge that restarts, with or without its holder, finds all of it by name. Mounts live only in the sandbox's own
mount namespace. One door out: `ContainerInstance.stop` and the undoing of a failed launch are the same function.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import structlog

from dsec import faults, syscalls, trees
from dsec.backends import disk, frame, orphans, runtime
from dsec.backends.base import Capabilities, LaunchPlan, Undone
from dsec.backends.capture import forget_sockets
from dsec.backends.driver import Driver, Place, Site
from dsec.backends.drivers import make_driver, settle
from dsec.backends.guest.connection import in_touch
from dsec.backends.guest.link import Link
from dsec.backends.holder_client import HolderClient
from dsec.backends.instance import ContainerInstance, End, defaults
from dsec.backends.layer_mounts import LayerMounts, Layers
from dsec.backends.network import OpenNetwork
from dsec.backends.pause import Pauser
from dsec.backends.plan import MASKED, Node, memory_bytes
from dsec.backends.snapshots import Snapshots
from dsec.backends.stock import Stock
from dsec.config import NetworkConfig, PauseConfig
from dsec.errors import DsecError, NodeError, Unavailable
from dsec.model import Exit, ExitReason, Qos, Usage
from dsec.qos.cgroup import Cgroups, Group, Limits, detect
from dsec.qos.hogs import Hogs
from dsec.security import seccomp

log = structlog.get_logger("dsec.container")
T = TypeVar("T")

EXIT_TIMEOUT = 10.0  # seconds from SIGKILL until the kernel has taken the sandbox apart
READY_TIMEOUT = 15.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the backend is set up. ``generation`` grows with each start of the Edge: the newest owns the guests' links."""

    edge: str
    state_dir: str
    generation: int
    driver: str = "native"  # native | crun | runc
    runtime: str = "auto"  # of the OCI drivers: auto | crun | runc | a path
    cgroup_root: str = ""  # "" = dsec
    memory: int = 0  # bytes that all sandboxes together may use; 0 = no such limit
    userns: bool = True
    remote: bool = False  # layers may come from a remote store
    launcher: str = ""  # paths of the static programs; "" = the package's own, built when absent
    guest: str = ""
    holder_linger: float = 30.0
    orphan_grace: float = 0.0  # seconds without an Edge after which the holder has the sandboxes ended; 0 = never, -1 = as it is
    disk: str = "auto"  # and the next: ContainerConfig's
    disk_store_bytes: int = 0
    network: NetworkConfig = NetworkConfig()
    pause: PauseConfig = PauseConfig()
    bus: tuple[tuple[str, int], ...] = ()  # addresses and ports that no sandbox may reach


class ContainerBackend:
    """Implements `dsec.backends.base.Backend`. ``node`` (for `make_plan`) is known once `open` has returned."""

    kind = "container"

    def __init__(self, options: Options, layers: Layers) -> None:
        self.options = options
        self.layers = layers
        self.capabilities = Capabilities(name=self.kind)
        self.node: Node
        state = options.state_dir
        self._sandboxes = f"{state}/sandboxes"
        self._run = runtime.socket_dir(state)
        self._holder = HolderClient(f"{self._run}/holder", on_exit=self._on_exit, on_lost=self._on_lost, on_layer=self._on_layer)
        self.network = OpenNetwork(options.network, options.edge, state, self._run, options.bus, options.holder_linger)
        self._instances: dict[str, ContainerInstance] = {}
        self._launching: set[str] = set()
        self._unserved: set[str] = set()
        self.on_layer: Callable[[dict[str, Any]], None] = lambda _: None  # what becomes of layers that are loaded on demand
        self._ends: dict[str, End] = {}
        self._releases: dict[str, asyncio.Task[None]] = {}
        self.mounts = LayerMounts(self._holder, layers, self._spawn)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._makers = ThreadPoolExecutor(2, "dsec-launch")
        self._breakers = ThreadPoolExecutor(8, "dsec-release")
        self._holder_lock = asyncio.Lock()
        self._disks = disk.Disks(state, options.disk, options.disk_store_bytes)
        self._closed = False
        self.site = Site(self._holder, self.network)
        self.snapshots = Snapshots(self.site, state)
        self._stock: Stock
        self.driver: Driver
        self.pauser: Pauser
        self.hogs: Hogs
        self._watching: asyncio.Task[None] | None = None

    # --- the node --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        opts = self.options
        self.driver = self._make_driver()
        userns, why = opts.userns, "switched off in the configuration"
        if userns and syscalls.disabled("userns"):
            userns, why = False, "disabled by DSEC_DISABLE"
        if userns:
            why = await asyncio.to_thread(runtime.userns_trouble)
            userns = not why
        root = opts.cgroup_root or "dsec"
        self._cgroups = Cgroups(f"{root}/{opts.edge}", await asyncio.to_thread(detect), devices=not userns)
        await asyncio.to_thread(self._make_directories)
        await asyncio.to_thread(self._cgroups.open, opts.memory)
        self._stock = Stock(self._cgroups, self._instances.__len__, self._spawn)
        self.pauser = Pauser(self._cgroups, opts.pause, opts.state_dir)
        loop = asyncio.get_running_loop()
        self.hogs = Hogs(self._cgroups, lambda: list(self._instances), lambda: map(os.path.basename, in_touch(loop)), self._asked)
        try:
            await self.pauser.open()
            await self._equip(opts, root, userns, why)
            if "cpuacct" in self._cgroups.hierarchy.roots:
                self._watching = self._spawn(self.hogs.watch())
        except BaseException:
            # Nothing half-made: the holder ends by itself, and groups that hold no sandbox of an earlier Edge are removed.
            self._closed = True
            self._holder.close()
            await self.pauser.undo()
            await asyncio.shield(asyncio.to_thread(self._cgroups.close))
            raise

    def _asked(self, ulid: str) -> int | None:
        """How many requests a sandbox had; None where its CPU weight stays, whatever it uses."""
        instance = self._instances.get(ulid)
        return instance.link.requests if instance is not None and instance.plan.qos is Qos.BE else None

    def _heir(self) -> list[str]:
        return orphans.command(self.kind, self.options)

    async def alone(self) -> bool:
        """Whether no other Edge is connected to the holder."""
        return int((await self._holder.request("edges"))["count"]) == 1

    def _make_driver(self) -> Driver:
        return make_driver(self.site, self.options.driver, self.options.runtime)

    async def _equip(self, opts: Options, root: str, userns: bool, why: str) -> None:
        """Programs, holder, and what this node can do."""
        self._launcher, self._guest = await asyncio.to_thread(runtime.programs, opts.launcher, opts.guest)
        self.site.launcher = self._launcher
        looking = self._spawn(asyncio.to_thread(self.snapshots.look))
        await asyncio.to_thread(self._disks.look, userns)
        self.disk_place = self._disks.measured
        self.site.cgroup_v2 = self._cgroups.version == 2
        await self._ensure_holder()
        self.driver, no_native = settle(self.driver, self.site, opts.runtime)
        await looking
        self.snapshots.settle(self.driver, userns=userns)
        troubles = {"snapshot": self.snapshots.missing, "reclaim": self.pauser.missing, "driver=native": no_native}
        missing = {name: trouble for name, trouble in troubles.items() if trouble}
        if not userns:
            missing["userns"] = why
            if self._cgroups.version == 2:
                missing["devices"] = "without user namespaces cgroup v2 does not keep device nodes of a layer from being opened"
        self.site.masked_directories = frozenset(path for path in MASKED if os.path.isdir(path))
        missing |= self._disks.missing
        self.site.mappable = await asyncio.to_thread(disk.mappable, opts.state_dir) if userns else frozenset()
        await self.network.look(idmapped=not userns or "dir" in self.site.mappable)
        node = Node(
            edge=opts.edge,
            state_dir=opts.state_dir,
            cgroup_root=root,
            backends=(self.kind,),
            userns=userns,
            userns_missing=why,
            disk_modes=self._disks.modes,
            seccomp=seccomp.available(),
            cpu_idle=self._cgroups.can_idle,
        )
        able = Capabilities(
            name=self.kind,
            driver=self.driver.name,
            pause=True,
            snapshot=not self.snapshots.missing,
            pack_diff=True,
            fork=True,
            tty=True,
            userns=userns,
            disk_limit=True,
            worker=True,
            missing=missing,
        )
        self.node, self.capabilities = self.network.told(node, able)

    def _make_directories(self) -> None:
        for path in (self.options.state_dir, self._sandboxes, self._run):
            os.makedirs(path, mode=0o700, exist_ok=True)
        runtime.forget_ahead(self._run)

    async def _ensure_holder(self) -> None:
        async with self._holder_lock:
            if self._holder.connected:
                return
            self.mounts.forget()
            for last in (False, False, True):
                await self._holder.start(
                    guest=self._guest,
                    launcher=self._launcher,
                    log=f"{self.options.state_dir}/holder.log",
                    keep=(self.options.state_dir, self._run, *filter(None, (self.driver.keep,))),
                    linger=self.options.holder_linger,
                )
                try:
                    hello = await self._holder.hello()
                    break
                except Unavailable:  # we met one that was just ending
                    if last:
                        raise
            await self._holder.restore_kits()
            self.site.zygotes = hello.get("native") == frame.VERSION
            if self.driver.name == "native" and self.site.zygotes:
                await self._holder.request("zygotes")
            if self.options.remote:
                await self._holder.request("loader")  # it takes a moment to start: before the first layer needs it
            try:
                if self.options.orphan_grace >= 0:
                    await self._holder.request("heir", grace=self.options.orphan_grace, argv=self._heir())
            except NodeError as error:  # a holder that an earlier version started
                log.warning("container.no_heir", error=str(error), then="sandboxes whose Edge never returns live on")
            if self._disks.in_image:
                await self._holder.request("disks", image=self._disks.image, place=self._disks.place)
                self._disks.reached(hello["pid"])
            self.site.root, self.site.prefix, self.site.by_paths = hello["root"], hello["prefix"], hello["by_paths"]

    async def close(self) -> None:
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        for instance in self._instances.values():
            await instance.link.close()
        self._stock.close()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        await self.network.close()
        await self.pauser.close()
        self._holder.close()
        self._makers.shutdown(wait=False)
        self._breakers.shutdown(wait=False)

    async def shutdown(self) -> None:
        """Close and end the holder too; refused by it while sandboxes live. Removes the Edge's cgroups where they are empty."""
        self._closed = True
        with contextlib.suppress(Unavailable):
            if self._holder.connected:
                await self._holder.request("quit", force=False)
        await self.network.shutdown()
        await self.close()
        await self.pauser.give_back()
        await asyncio.to_thread(self._cgroups.close)
        await asyncio.to_thread(runtime.forget_ahead, self._run)
        await asyncio.to_thread(self._disks.forget)

    # --- launch ----------------------------------------------------------------------------------------------------

    async def prepare(self, plan: LaunchPlan) -> None:
        await self._ensure_holder()
        if plan.wiring is not None:
            try:
                await self.network.up(plan.wiring)
            finally:
                self.node, self.capabilities = self.network.told(self.node, self.capabilities)
        for layer in plan.lowers:
            await self.mounts.mount(layer.digest)

    async def settle_network(self) -> None:
        """Before a sandbox with ``network="open"`` is planned: the addresses in ``node`` are ones that nobody else on the node uses."""
        await self.network.settle()
        self.node, self.capabilities = self.network.told(self.node, self.capabilities)

    async def drop_layer(self, digest: str) -> bool:
        """Unmount a layer that no sandbox stands on; False while one may."""
        if self._launching or any(layer.digest == digest for box in self._instances.values() for layer in box.plan.lowers):
            return False
        await self.mounts.drop(digest)
        return True

    async def launch(self, plan: LaunchPlan) -> ContainerInstance:
        if plan.ulid in self._launching or plan.ulid in self._instances:
            raise Undone(f"{plan.ulid} is here already", sandbox=plan.id, retryable=False)
        self._launching.add(plan.ulid)
        steps = self._spawn(self._launch(plan))
        try:
            return await asyncio.shield(steps)
        except asyncio.CancelledError:
            # The steps run on; killing what they started makes them end soon. The cancel is passed on when nothing is left.
            undo = self._spawn(self._abandon(plan, steps))
            await runtime.through_cancels(undo)
            raise

    async def _abandon(self, plan: LaunchPlan, steps: asyncio.Task[ContainerInstance]) -> None:
        while not steps.done():
            with contextlib.suppress(NodeError, Unavailable):
                await self._holder.request("kill", ulid=plan.ulid)
            await asyncio.wait([steps], timeout=0.05)
        if not steps.cancelled() and steps.exception() is None:
            await self._free(plan)

    async def _free(self, plan: LaunchPlan) -> None:
        """What a launch has made; as soon as it can be, for nobody else would come back for it."""
        try:
            await self.release(plan.ulid)
        except (DsecError, OSError) as error:
            log.error("container.not_freed", sandbox=plan.id, error=str(error), then="trying again")
            self._spawn(runtime.until_done(functools.partial(self.release, plan.ulid), lambda: self._closed))

    async def _launch(self, plan: LaunchPlan) -> ContainerInstance:
        try:
            await self.prepare(plan)
            driver = self.snapshots.driver(plan, self.driver)
            self._ends[plan.ulid] = End()
            try:
                place = await self._place(plan, driver)
                faults.reached("create.made")
                try:
                    pid = await driver.start(plan, place)
                    faults.reached("create.started")
                finally:
                    if place.listener is not None:
                        place.listener.close()
                link = self._link(plan, pid)
                instance = self._instance(plan, pid, link)
                await self.network.ready(instance.answers(READY_TIMEOUT), plan, pid, link)
                return instance
            except BaseException as error:
                self._instances.pop(plan.ulid, None)
                detail = await driver.detail(plan) if not isinstance(error, asyncio.CancelledError) else ""
                await self._free(plan)
                if isinstance(error, Exception):
                    raise Undone(f"launch failed: {error}{detail}", sandbox=plan.id, reason=runtime.reason(error)) from error
                raise
        finally:
            self._launching.discard(plan.ulid)
            self._stock.settle()

    async def _place(self, plan: LaunchPlan, driver: Driver) -> Place:
        """Everything on disk and in cgroupfs that the launch needs, but for what the driver makes."""
        asked = plan.resources
        limits = Limits(memory=memory_bytes(plan), cpus=asked.cpus, pids=asked.pids, best_effort=plan.qos is Qos.BE)
        if not driver.makes_place:
            return await self._in(self._makers, self._make, plan, driver, limits)
        if plan.disk_mode != "tmpfs" or plan.wiring is not None:
            await self._in(self._makers, self._make_directory, plan, driver)
        has_quota = await self._stock.give(plan.ulid, limits, ahead=plan.disk_mode == "tmpfs")
        self.site.from_stock = self._stock.given
        return Place(self._cgroups.order(plan.ulid, limits, has_quota=has_quota), self.socket_path(plan.ulid), None)

    def _make_directory(self, plan: LaunchPlan, driver: Driver) -> None:
        os.makedirs(plan.state_dir, mode=0o700, exist_ok=True)
        self._disks.make(plan)
        self.network.write_layer(plan)
        driver.make(plan)

    def _make(self, plan: LaunchPlan, driver: Driver, limits: Limits) -> Place:
        """In a thread. The listening socket is left in no tree."""
        self._make_directory(plan, driver)
        groups, path = self._cgroups.create(plan.ulid, limits), self.socket_path(plan.ulid)
        return Place(groups, path, runtime.listen_at(path))

    def socket_path(self, ulid: str) -> str:
        """Where the sandbox's Aether listens."""
        return f"{self._run}/{ulid}"

    def _link(self, plan: LaunchPlan, pid: int) -> Link:
        group = Group(self._cgroups, plan.ulid)
        return Link(
            self.socket_path(plan.ulid),
            generation=self.options.generation,
            expect_pid=pid,
            sandbox_id=plan.id,
            oom_kills=group.oom_kills,
            defaults=defaults(plan.user, plan.workdir),
            memory=memory_bytes(plan),
            frozen=group.frozen,
        )

    def _instance(self, plan: LaunchPlan, pid: int, link: Link) -> ContainerInstance:
        instance = ContainerInstance(self, plan, pid, link)
        self._instances[plan.ulid] = instance
        if (end := self._ends.get(plan.ulid)) is not None and end.seen.is_set():
            self._spawn(self._tell(instance, end.status))
        return instance

    # --- life ------------------------------------------------------------------------------------------------------

    async def usage(self, plan: LaunchPlan) -> Usage:
        try:
            used = await self._in(self._breakers, self._cgroups.usage, plan.ulid)
        except OSError:
            return Usage()
        return Usage(
            cpu_ms=used.cpu_ms,
            memory=used.memory,
            memory_peak=used.memory_peak,
            pids=used.pids,
            oom_kills=used.oom_kills,
            disk=await self._in(self._breakers, self._disk, plan),
        )

    def _disk(self, plan: LaunchPlan) -> int:
        """Bytes in the upper, where somebody counts them."""
        instance = self._instances.get(plan.ulid)
        return self._disks.used(plan, instance.pid) if instance is not None else 0

    async def terminate(self, ulid: str) -> None:
        """SIGTERM to the init."""
        with contextlib.suppress(NodeError, Unavailable):
            await self._holder.request("signal", ulid=ulid, signal=15)

    async def release(self, ulid: str) -> None:
        """Kill what lives and free everything; the one door out. Idempotent: several at once are one, and a cancelled caller does not
        interrupt it. Raises `NodeError` while something is still there."""
        task = self._releases.get(ulid)
        if task is None:
            task = self._releases[ulid] = self._spawn(self._release(ulid))
            task.add_done_callback(lambda _: self._releases.pop(ulid, None))
        await asyncio.shield(task)

    async def _release(self, ulid: str) -> None:
        await self._ensure_holder()
        end = self._ends.setdefault(ulid, End())
        unwired = self.network.unwiring(ulid, self._instances[ulid].plan if ulid in self._instances else None)
        await self._in(self._breakers, self._cgroups.kill, ulid)
        if (await self._holder.request("kill", ulid=ulid))["live"]:
            try:
                await asyncio.wait_for(end.seen.wait(), EXIT_TIMEOUT)
            except TimeoutError as error:
                raise NodeError(f"the sandbox did not end within {EXIT_TIMEOUT} s of SIGKILL", sandbox=ulid, reason="kill") from error
        faults.reached("stop.killed")
        instance = self._instances.pop(ulid, None)
        if instance is not None:
            await instance.link.close()
        await self._in(self._breakers, self._remove, ulid)
        if unwired is not None:
            await unwired
        faults.reached("stop.removed")
        await self._holder.request("forget", ulids=[ulid])
        self._ends.pop(ulid, None)
        self._stock.settle()

    def _remove(self, ulid: str) -> None:
        """Cgroups, socket and directory (in a thread)."""
        end = time.monotonic() + EXIT_TIMEOUT
        while self._cgroups.kill(ulid):  # what a killed runtime left behind, or what outlived an unknown init
            if time.monotonic() > end:
                raise NodeError("processes are still in the sandbox's cgroup", sandbox=ulid, reason="cgroup")
            time.sleep(0.002)
        self._cgroups.destroy(ulid)
        forget_sockets(self.socket_path(ulid))
        box = f"{self._sandboxes}/{ulid}"
        try:
            self._disks.remove(ulid, box)
            trees.remove(box)
        except FileNotFoundError:
            return
        except OSError as error:
            raise NodeError(f"cannot remove {box}: {error}", sandbox=ulid, reason="disk") from error

    def _on_exit(self, ulid: str, status: dict[str, Any]) -> None:
        if (end := self._ends.get(ulid)) is not None:
            end.status = status
            end.seen.set()
        if (instance := self._instances.get(ulid)) is not None:
            self._spawn(self._tell(instance, status))

    async def _tell(self, instance: ContainerInstance, status: Mapping[str, Any]) -> None:
        instance.ended(await self._in(self._breakers, self._exit, instance.plan.ulid, status, instance))

    def _exit(self, ulid: str, status: Mapping[str, Any], instance: ContainerInstance | None = None) -> Exit:
        code, signum, wall = status.get("code"), status.get("signal"), status.get("wall", 0.0)
        told = getattr(instance.link, "oom_seen", 0) if instance else 0  # kills that ended commands; one beyond them was the init's
        if signum == 9 and self._cgroups.oom_kills(ulid) > told:
            limit = f"memory: its limit of {memory_bytes(instance.plan)} bytes was reached" if instance else "memory"
            return Exit(reason=ExitReason.OOM, detail=limit, signal=signum, wall_ts=wall)
        if why := status.get("why"):
            return Exit(reason=ExitReason.LAUNCH_FAILED, detail=why, wall_ts=wall)
        if code is None and signum is None:
            return Exit(reason=ExitReason.BROKEN, detail="it ended while no holder watched it", wall_ts=wall)
        return Exit(reason=ExitReason.EXITED, detail="its init ended", exit_code=code, signal=signum, wall_ts=wall)

    # --- after a restart -------------------------------------------------------------------------------------------

    async def adopt(self, plan: LaunchPlan) -> ContainerInstance | None:
        await self._ensure_holder()
        if not all([await self._holder.serves(layer.digest, self.layers.mount_plan) for layer in plan.lowers]):
            self._unserved.add(plan.ulid)  # `reap` ends it
            return None
        self._ends[plan.ulid] = End()
        known = (await self._holder.request("find", ulid=plan.ulid))["found"]
        pid = known if isinstance(known, int) else 0
        if known is None:
            pid = await self._in(self._breakers, self.find_init, plan)
            if pid:
                try:
                    await self._holder.request("adopt", ulid=plan.ulid, pid=pid)
                except NodeError:  # it ended in between
                    pid = 0
        if not pid:
            self._ends.pop(plan.ulid, None)
            return None
        if plan.wiring is not None:
            await self.network.adopt(plan)
        instance = self._instance(plan, pid, self._link(plan, pid))
        self.hogs.adopted(plan.ulid)
        return instance

    async def last_exit(self, ulid: str) -> Exit | None:
        """How a sandbox ended that `adopt` found dead, where the holder saw it."""
        if ulid in self._unserved:
            return Exit(reason=ExitReason.BROKEN, detail="nobody filled its layers for a while: it may have read zeros")
        if (ended := (await asyncio.to_thread(orphans.noted, self.options.state_dir)).get(ulid)) is not None:
            return Exit(reason=ExitReason.BROKEN, detail=orphans.DETAIL, wall_ts=ended)
        known = (await self._holder.request("find", ulid=ulid))["found"]
        return self._exit(ulid, known) if isinstance(known, dict) else None

    def find_init(self, plan: LaunchPlan) -> int:
        """The process of the sandbox's group that is number 1 in its pid namespace; 0 when there is none."""
        return runtime.init_among(self.pids(plan))

    def pids(self, plan: LaunchPlan) -> tuple[int, ...]:
        """Of all its processes, as the node numbers them."""
        return self._cgroups.pids(plan.ulid)

    async def reap(self, known: frozenset[str]) -> tuple[str, ...]:
        await self._ensure_holder()
        found = set(await self._holder.listing())
        found |= await self._in(self._breakers, self._cgroups.names)
        found |= set(await self._in(self._breakers, os.listdir, self._sandboxes))
        found |= await self._named_elsewhere()
        found |= set(await self._in(self._breakers, self._disks.names))
        found |= await self.network.strays(known | self._launching | self._instances.keys())
        strays = sorted(found - known - self._launching - self._instances.keys())
        results = await asyncio.gather(*(self.release(ulid) for ulid in strays), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, DsecError):
                raise result
        await self._in(self._breakers, orphans.forget, self.options.state_dir)
        return tuple(ulid for ulid, result in zip(strays, results, strict=True) if result is None)

    async def _named_elsewhere(self) -> set[str]:
        """Sandboxes of this Edge that something beside the node's kernel and the holder knows."""
        return set()

    def _on_layer(self, news: dict[str, Any]) -> None:
        self.on_layer(news)

    def _on_lost(self) -> None:
        if not self._closed:
            self._spawn(self._recover())

    async def _recover(self) -> None:
        """The holder died under us: start another and let it watch what lives. Kept up until it serves: deaths go unseen meanwhile."""
        while not self._holder.connected:
            try:
                await self._ensure_holder()
            except (OSError, DsecError, subprocess.SubprocessError) as error:
                log.error("container.no_holder", error=str(error), then="trying again")
                await asyncio.sleep(1.0)
            if self._closed:
                return
        for ulid, instance in list(self._instances.items()):
            pid = await self._in(self._breakers, self.find_init, instance.plan)
            try:
                if pid != instance.pid:
                    raise NodeError("it ended")
                await self._holder.request("adopt", ulid=ulid, pid=pid)
            except NodeError:
                self._on_exit(ulid, {"wall": time.time()})

    # --- helpers ---------------------------------------------------------------------------------------------------

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, functools.partial(function, *args))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
