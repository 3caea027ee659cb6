"""The backends of one node: opened once, asked for plans (pure) and instances."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog

from dsec.actors import capacity
from dsec.backends.base import Backend, Capabilities, LaunchPlan
from dsec.backends.plan import Node, another, make_plan
from dsec.config import Config, PauseConfig
from dsec.errors import Busy, InvalidRequest, NotFound, Unsupported
from dsec.layers import stack
from dsec.layers.fetch import NodeLayers
from dsec.layers.forget import forget
from dsec.layers.pins import Pins
from dsec.layers.pull import Puller
from dsec.layers.store import LayerConfig, LayerStore
from dsec.model import LayerRef, SandboxId, SandboxSpec

if TYPE_CHECKING:
    from dsec.backends.container import ContainerBackend
    from dsec.backends.driver import Site
    from dsec.backends.fake import FakeBackend
    from dsec.backends.layer_mounts import LayerMounts

log = structlog.get_logger("dsec.host")
ALIKE, ALIKE_BYTES = 64, 4096  # plans by which others of the same spec are made, and bytes of a spec that may be one of many
PULL_PATIENCE = 1.0  # seconds that a create waits for a pull before it says that it goes on


class Resolved(msgspec.Struct, frozen=True):
    """The layers of one spec on this node, topmost first, and what each says of itself."""

    refs: tuple[LayerRef, ...]
    configs: tuple[LayerConfig | None, ...] = ()
    processes: str = ""  # where images of processes are, with which it begins


class Planner(Protocol):
    """A backend with what planning needs."""

    @property
    def backend(self) -> Backend: ...

    @property
    def node(self) -> Node:
        """As it is now: a node whose addresses were taken chooses others."""
        ...

    def hold(self, refs: tuple[LayerRef, ...]) -> None:
        """Keep a sandbox's layers, which are held or mounted, from being removed until `let_go`."""
        ...

    def let_go(self, refs: tuple[LayerRef, ...]) -> None: ...

    @property
    def disk_place(self) -> tuple[str, int]:
        """What sandboxes write to that is not memory: a name, the same for those that share it, and its bytes (0: none, or not known)."""
        ...

    async def resolve(self, spec: SandboxSpec) -> Resolved:
        """The layers, held: the caller lets go of them. Raises `NotFound` for a layer that this node does not have, `InvalidRequest` for
        what cannot be a layer."""
        ...

    async def stand(self, spec: SandboxSpec, refs: tuple[LayerRef, ...]) -> Resolved:
        """As `resolve`, on these layers whatever the spec's names mean now."""
        ...

    def processes(self, name: str) -> str:
        """Where images of processes are that belong to the layer of that name; there need not be any."""
        ...

    async def named(self, prefix: str) -> tuple[str, ...]:
        """Names of this node's layers and images of processes that begin so."""
        ...

    async def forget(self, name: str, prefix: str) -> bool:
        """Take a layer's name away, and free the layer unless somebody wants it under another, and its images of processes; False while it
        is mounted, or while another one of ``prefix`` was made on it."""
        ...


class FakePlanner:
    """The fake backend needs no layers: any name resolves, except those that begin with ``missing``."""

    def __init__(self, backend: FakeBackend, node: Node) -> None:
        self.backend = backend
        self.node = node
        self.disk_place = ("", 0)

    def hold(self, refs: tuple[LayerRef, ...]) -> None:
        pass

    def let_go(self, refs: tuple[LayerRef, ...]) -> None:
        pass

    async def resolve(self, spec: SandboxSpec) -> Resolved:
        refs = []
        for _, field, name in stack.names(spec):
            if name.startswith("missing"):
                raise NotFound("no such layer", field=field, value=name, fix="the fake backend has every other name")
            refs.append(LayerRef(name=name, digest="sha256:" + hashlib.sha256(name.encode()).hexdigest()))
        return Resolved(tuple(refs))

    async def stand(self, spec: SandboxSpec, refs: tuple[LayerRef, ...]) -> Resolved:  # noqa: ARG002
        return Resolved(refs)

    def processes(self, name: str) -> str:
        raise Unsupported(self.backend.capabilities.missing["snapshot"], field="checkpoint", value=name, reason="snapshot")

    async def named(self, prefix: str) -> tuple[str, ...]:
        return tuple(name for name in self.backend.world.names if name.startswith(prefix))

    async def forget(self, name: str, prefix: str) -> bool:  # noqa: ARG002
        self.backend.world.forget(name)
        return True


class LayerPlanner:
    """A backend whose root is a stack of layers of this node's store."""

    def __init__(self, backend: ContainerBackend, layers: NodeLayers, puller: Puller) -> None:
        self.puller = puller
        layers.release = self._drop
        self.backend: Backend = backend
        self._container = backend
        self.layers = layers
        self._pins = Pins(layers.store)
        self._stacks: dict[str, tuple[str, ...]] = {}
        self._configs: dict[str, LayerConfig] = {}  # by digest: a digest's record never changes

    @property
    def node(self) -> Node:
        return self._container.node

    @property
    def mounts(self) -> LayerMounts:
        return self._container.mounts

    @property
    def disk_place(self) -> tuple[str, int]:
        return self._container.disk_place

    def hold(self, refs: tuple[LayerRef, ...]) -> None:
        self._pins.take((ref.digest for ref in refs), mounted=True)

    def let_go(self, refs: tuple[LayerRef, ...]) -> None:
        self._pins.give_back((ref.digest for ref in refs), self.mounts.holds)

    async def _drop(self, digest: str) -> bool:
        if not await self._container.drop_layer(digest):
            return False
        self._pins.unmounted(digest)
        return True

    async def resolve(self, spec: SandboxSpec) -> Resolved:
        if spec.network.mode == "open":
            await self._container.settle_network()

        async def find() -> tuple[LayerRef, ...]:
            await self.layers.ensure(name for _, _, name in stack.names(spec))
            try:
                found = stack.build(spec, self.layers.lookup)
            except NotFound:
                await self._image(spec.image)
                found = stack.build(spec, self.layers.lookup)
            return await self._whole(found.lowers)

        return await self._held(find)

    async def stand(self, spec: SandboxSpec, refs: tuple[LayerRef, ...]) -> Resolved:
        if spec.network.mode == "open":
            await self._container.settle_network()
        if len(refs) > stack.MAX_LOWERS:
            fix = "begin anew from files that were copied out, or pack them as one layer"
            raise InvalidRequest(f"the kernel stacks at most {stack.MAX_LOWERS} layers", field="checkpoint", value=len(refs), fix=fix)

        async def find() -> tuple[LayerRef, ...]:
            await self.layers.ensure(ref.digest for ref in refs)
            return refs

        return await self._held(find)

    def processes(self, name: str) -> str:
        return self._container.snapshots.place(name)

    async def named(self, prefix: str) -> tuple[str, ...]:
        names = {name for info in await self.layers.store.list() for name in info.names}
        names |= await asyncio.to_thread(self._container.snapshots.names)
        return tuple(name for name in names if name.startswith(prefix))

    async def forget(self, name: str, prefix: str) -> bool:
        if not await forget(self.layers.store, name, prefix, self._drop):
            return False
        await asyncio.to_thread(self._container.snapshots.forget, name)
        return True

    async def _known(self, refs: tuple[LayerRef, ...]) -> Resolved:
        for ref in refs:
            if ref.digest not in self._configs:
                self._configs[ref.digest] = await self.layers.config(ref.digest)
        return Resolved(refs, tuple(self._configs[ref.digest] for ref in refs))

    async def _image(self, name: str) -> None:
        """See that the image is here, as far as it can be pulled. Raises `Busy` (reason ``pulling``) when that takes longer than a request
        may: the Scheduler asks again until the create's deadline."""
        with contextlib.suppress(NotFound):
            self.layers.lookup(name)
            return
        if not self.puller.wants(name):
            return
        job = self.puller.job(name)
        await asyncio.wait([job.task], timeout=PULL_PATIENCE)
        if not job.task.done():
            raise Busy(f"the image is being pulled: {job.line}", field="image", value=name, reason="pulling")
        job.task.result()

    async def _whole(self, refs: tuple[LayerRef, ...]) -> tuple[LayerRef, ...]:
        """With what always goes below a layer: an image that was too large to become one."""
        found: dict[str, LayerRef] = {}
        for ref in refs:
            found.setdefault(ref.digest, ref)
            if ref.digest not in self._stacks:
                below = (await self.layers.store.info(ref.digest)).stack
                await self.layers.ensure(below)
                self._stacks[ref.digest] = below
            for number, digest in enumerate(self._stacks[ref.digest]):
                found.setdefault(digest, LayerRef(name=f"{ref.name}#{len(self._stacks[ref.digest]) - number}", digest=digest))
        return tuple(found.values())

    async def _held(self, find: Callable[[], Awaitable[tuple[LayerRef, ...]]]) -> Resolved:
        """What ``find`` brings, held. Somebody may remove a layer in between, once."""
        refs = await find()
        try:
            self._pins.take(ref.digest for ref in refs)
        except NotFound:
            self.layers.ask_again()
            refs = await find()
            self._pins.take(ref.digest for ref in refs)
        try:
            return await self._known(refs)
        except BaseException:
            self.let_go(refs)
            raise


def _pause(config: Config, backend: str) -> PauseConfig:
    """One backend of a node makes its swap; the others use what the node has then."""
    first = next((name for name in config.edge.backends if name != "fake"), backend)
    return config.pause if backend == first or config.pause.swap == "off" else msgspec.structs.replace(config.pause, swap="node")


async def bus_endpoints(urls: str) -> tuple[tuple[str, int], ...]:
    """Address and port of every server of the bus that is configured: no sandbox may reach them, wherever they are. A name that does not
    resolve now names nobody that this Edge could be connected to."""
    found: set[tuple[str, int]] = set()
    for url in urls.split(","):
        parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
        with contextlib.suppress(OSError):
            for entry in await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port or 4222, type=socket.SOCK_STREAM):
                found.add((str(entry[4][0]).partition("%")[0], int(entry[4][1])))
    return tuple(sorted(found))


def node_layers(config: Config) -> NodeLayers:
    """This node's layer store, and the remote one where one is configured. Raises `NodeError`, `InvalidRequest`, `Unsupported`."""
    room = config.layers
    store = LayerStore(room.store_dir or Path(config.edge.state_dir) / "layers")
    remote = None
    if room.remote:
        from dsec.layers.remote import RemoteStore

        remote = RemoteStore(room.remote)
    return NodeLayers(store, remote, cache=room.cache_bytes, lazy=room.on_demand, patience=room.patience_ms / 1e3)


def log_layer_news(news: dict[str, Any]) -> None:
    """Log what becomes of layers that are loaded on demand."""
    what = news["what"]
    if what == "trouble":
        log.warning("layer.trouble", layer=news["name"], why=news["text"])
    elif what == "loader_died":
        log.error("layer.loader_died", deaths=news["deaths"])
    else:
        log.info("layer.news", what=what, **{key: value for key, value in news.items() if key not in ("event", "what")})


class Host:
    """``planners`` by backend name. `open` brings up every configured backend; one that cannot start is left out and named."""

    def __init__(self, config: Config, edge: str, generation: int) -> None:
        self.config = config
        self.edge = edge
        self.generation = generation
        self.planners: dict[str, Planner] = {}
        self.missing: dict[str, str] = {}
        self.puller: Puller | None = None
        self.layer_told: Callable[[dict[str, Any]], None] = lambda _: None
        self.upcoming: Callable[[int], Sequence[int]] = lambda _: ()  # slots of the sandboxes that will be next
        self._keeping: list[asyncio.Task[None]] = []
        self._sites: dict[str, Site] = {}
        self._plans: dict[tuple[bytes, tuple[LayerRef, ...]], tuple[Node, Sequence[LayerConfig | None], LaunchPlan]] = {}

    async def open(self) -> None:
        """Raises `Unsupported` when no backend at all can start; `missing` says why for each."""
        for name in self.config.edge.backends:
            try:
                self.planners[name] = await self._open(name)
            except Unsupported as error:
                self.missing[name] = str(error)
                log.error("edge.backend_missing", backend=name, why=str(error))
        if not self.planners:
            whys = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
            raise Unsupported(f"no backend can start here: {whys}", field="edge.backends", fix="run `dsec doctor`")

    def _upcoming(self, count: int) -> Sequence[int]:
        return self.upcoming(count)

    def _layer_news(self, news: dict[str, Any]) -> None:
        log_layer_news(news)
        self.layer_told(news)

    async def _open(self, name: str) -> Planner:
        if name == "fake":
            from dsec.backends.fake import FakeBackend, Faults

            faults = Faults(launch_delay=self.config.fake.launch_ms / 1000, launch_fail_rate=self.config.fake.launch_fail_rate)
            fake = FakeBackend(faults, edge=self.edge, generation=self.generation)
            await fake.open()
            return FakePlanner(fake, fake.node)
        if name in ("container", "docker"):
            return await self._open_containers(name)
        raise InvalidRequest("no such backend", field="edge.backends", value=name, fix="use container, docker or fake")

    async def _open_containers(self, name: str) -> Planner:
        """Docker's sandboxes have a directory, a holder, cgroups and addresses of their own: both backends may serve one Edge."""
        from dsec.backends.container import ContainerBackend, Options

        config, of = self.config, "" if name == "container" else f"-{name}"
        state_dir = config.edge.state_dir if name == "container" else f"{config.edge.state_dir}/{name}"
        layers = node_layers(config)
        options = Options(
            edge=f"{self.edge}{of}",
            state_dir=state_dir,
            generation=self.generation,
            driver=config.container.driver,
            runtime=config.container.runtime,
            cgroup_root=config.container.cgroup_root,
            memory=capacity.room(config.edge, capacity.node_has()[0]),
            userns=config.container.userns,
            orphan_grace=config.edge.orphan_grace_ms / 1e3,
            disk=config.container.disk,
            disk_store_bytes=config.container.disk_store_bytes,
            remote=bool(config.layers.remote),
            network=config.network,
            pause=_pause(config, name),
            bus=await bus_endpoints(config.bus.url),
        )
        if name == "docker":
            from dsec.backends.docker import DockerBackend

            backend: ContainerBackend = DockerBackend(options, layers, config.docker)
        else:
            backend = ContainerBackend(options, layers)
        backend.on_layer = self._layer_news
        backend.site.upcoming = self._upcoming
        self._sites[name] = backend.site
        await backend.open()
        # What both kinds of containers read is cached once: the second one takes the first one's mounts over.
        backend.mounts.lender = next((planner.mounts for planner in self.planners.values() if isinstance(planner, LayerPlanner)), None)
        puller = self.puller or Puller(layers, config.layers.registries)
        self.puller = puller
        self._keeping.append(asyncio.get_running_loop().create_task(layers.keep_used()))
        return LayerPlanner(backend, layers, puller)

    def planner(self, spec: SandboxSpec) -> Planner:
        planner = self.planners.get(spec.backend)
        if planner is None:
            known = " or ".join(self.planners)
            raise InvalidRequest("this node has no such backend", field="backend", value=spec.backend, fix=f"use {known}")
        return planner

    def plan(self, spec: SandboxSpec, sandbox: SandboxId, slot: int, resolved: Resolved) -> LaunchPlan:
        """See `make_plan`; raises what it raises."""
        node, configs = self.planner(spec).node, resolved.configs
        key = (msgspec.msgpack.encode(spec), resolved.refs)
        alike = self._plans.get(key)
        if alike is not None and alike[0] is node and alike[1] == configs:
            plan = another(alike[2], spec, sandbox, slot, node)
        else:
            plan = make_plan(spec, id=sandbox, slot=slot, refs=resolved.refs, node=node, layer_configs=configs)
            while len(self._plans) >= ALIKE:
                del self._plans[next(iter(self._plans))]
            if len(key[0]) <= ALIKE_BYTES:
                self._plans[key] = (node, configs, plan)
        return msgspec.structs.replace(plan, processes=resolved.processes) if resolved.processes else plan

    @property
    def backends(self) -> Mapping[str, Backend]:
        return {name: planner.backend for name, planner in self.planners.items()}

    @property
    def capabilities(self) -> tuple[Capabilities, ...]:
        return tuple(planner.backend.capabilities for planner in self.planners.values())

    @property
    def pools(self) -> dict[str, tuple[int, int]]:
        """How many launches of each backend found their namespaces made ahead, and how many there were; where such are made. And by
        "<backend> groups" how many found their groups."""
        pools = {name: (site.from_pool, site.launches) for name, site in self._sites.items() if site.launches}
        return pools | {f"{name} groups": (self._sites[name].from_stock, launches) for name, (_, launches) in pools.items()}

    @property
    def drivers(self) -> dict[str, str]:
        """What starts the sandboxes of each backend, where it has a choice."""
        return {able.name: able.driver for able in self.capabilities if able.driver}

    @property
    def tmpfs_upper(self) -> bool:
        """Whether "auto" means tmpfs on any backend of this node: what the Scheduler counts with."""
        return any(planner.node.disk_modes[:1] == ("tmpfs",) for planner in self.planners.values())

    @property
    def disk_room(self) -> int:
        """Bytes of all places where sandboxes' writes go, unless to memory; 0 where there is none."""
        return sum(dict(planner.disk_place for planner in self.planners.values()).values())

    async def close(self, *, nothing_lives: bool) -> None:
        """Let go; with ``nothing_lives`` helper processes and empty groups go too."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        if self.puller is not None:
            await self.puller.close()
        for planner in self.planners.values():
            await (planner.backend.shutdown() if nothing_lives else planner.backend.close())
