"""Real actors in the test's own loop over a real nats-server, with the fake backend so that faults can be ordered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

import libdsec
from dsec.actors import capacity
from dsec.actors.edge import Edge
from dsec.actors.fence import Fences
from dsec.actors.host import FakePlanner, Host
from dsec.actors.outbox import EventSink
from dsec.actors.scheduler import Scheduler
from dsec.actors.store import SqliteStore
from dsec.actors.verbs import Verbs
from dsec.actors.watcher import Watcher
from dsec.backends.fake import FakeBackend, FakeNode, Faults
from dsec.bus import codec, subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import BurstNews, CreateAck, CreateItem, CreateRequest, Event, Lease
from dsec.bus.server import NatsServer
from dsec.bus.subjects import Caller
from dsec.bus.transport import Msg
from dsec.config import Config, EdgeConfig, SchedulerConfig, WatcherConfig
from dsec.model import GIB, MIB, Resources, SandboxSpec, new_ulid

ME = Caller("local", "default")
SMALL = Resources(cpus=0.1, memory=64 * MIB, disk=16 * MIB, pids=32)
SPEC = SandboxSpec(image="debian", backend="fake", resources=SMALL)


class Kept:
    """Events that were posted, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def post(self, *events: Event) -> None:
        self.events.extend(events)

    async def close(self) -> None:
        return None


class Feed:
    """Of one Edge: what it posts is kept, and told."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.told: Callable[[Sequence[Event]], object] = lambda _: None

    def post(self, *events: Event) -> None:
        self.kept.post(*events)
        self.told(events)

    async def close(self) -> None:
        return None


class Box:
    """``edge``, ``scheduler``, ``watcher`` start an actor each; ``close`` ends them all."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.dir = directory
        self.edges: dict[str, Edge] = {}
        self.backends: dict[str, FakeBackend] = {}
        self.nodes: dict[str, FakeNode] = {}
        self.events = Kept()
        self.trust = 15.0  # seconds out of touch after which an Edge reads its fence
        self.ping = 10.0
        self._ends: list[Callable[[], Any]] = []
        self._buses: list[Bus] = []

    async def bus(self, name: str = "test") -> Bus:
        bus = await Bus.connect(self.url, name=name, ping_interval=self.ping)
        self._buses.append(bus)
        return bus

    async def edge(self, name: str = "n1", faults: Faults | None = None, sink: EventSink | None = None, **config: Any) -> Edge:
        """A serving Edge, whose events are kept or go to ``sink``. A second start under the same name finds the same directory and the same
        fake kernel."""
        defaults: dict[str, Any] = {
            "name": name, "state_dir": str(self.dir / name), "backends": ("fake",), "heartbeat_ms": 50, "sweep_ms": 50, "memory": 64 * GIB,
        }  # fmt: skip
        whole = Config(edge=EdgeConfig(**(defaults | config)))
        store = SqliteStore(whole.edge.state_dir)
        records = await store.open()
        control, bulk = await self.bus(f"edge {name}"), await self.bus(f"edge {name} bulk")
        fences = await Fences.open(control)
        fenced = await fences.enter(name, store.incarnation)
        host = Host(whole, name, int(store.incarnation.rpartition(".")[2]))
        node = self.nodes.setdefault(name, FakeNode())
        backend = FakeBackend(faults, edge=name, node=node, generation=host.generation)
        host.planners["fake"] = FakePlanner(backend, backend.node)
        limits = capacity.limits(whole.edge, memory=64 * GIB, cpus=8, pid_max=1 << 20)
        edge = Edge(control, bulk, whole.edge, name, store, host, limits, sink or Feed(self.events), fences, self.trust)
        self.edges[name], self.backends[name] = edge, backend
        self._ends.append(lambda: self._stop_edge(name, edge))
        await edge.start(records, fenced, rebooted=store.rebooted)
        if fenced:
            await fences.told(name)
        await Verbs(edge).serve()
        edge.beat()
        await control.flush()
        return edge

    async def _stop_edge(self, name: str, edge: Edge) -> None:
        if self.edges.get(name) is edge:
            del self.edges[name]
            await edge.stop()

    async def crash(self, name: str) -> None:
        """The Edge is gone without a word: connections cut, tasks gone, nothing written any more."""
        edge = self.edges.pop(name)
        edge.stopping = edge.over = True
        for bus in (edge.bus, edge.bulk):
            await bus.close(0)
        for task in list(edge._tasks):
            task.cancel()
        await asyncio.gather(*edge._tasks, return_exceptions=True)
        await edge.store.close()

    async def scheduler(self, **config: Any) -> Scheduler:
        actor = Scheduler(await self.bus("scheduler"), SchedulerConfig(**config))
        self._ends.append(actor.stop)
        await actor.start()
        return actor

    async def watcher(self, *, records: bool = True, **config: Any) -> Watcher:
        """Without ``records`` it has no node records to begin from."""
        bus = await self.bus("watcher")
        fences = await Fences.open(bus) if records else None
        actor = Watcher(bus, WatcherConfig(**({"publish_ms": 50} | config)), fences, self.events)
        self._ends.append(actor.stop)
        await actor.start()
        return actor

    def client(self, **options: Any) -> libdsec.client.Client:
        return libdsec.connect(self.url, **options)

    async def close(self) -> None:
        for end in reversed(self._ends):
            await end()
        for bus in self._buses:
            await bus.close(1.0)


class Asker:
    """Sends creates as a client does and keeps the news, without libdsec's own repeats: what the actors say is what is seen."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.inbox = bus.new_inbox()
        self.accepted: dict[int, list[str]] = {}
        self.ready: dict[int, list[str]] = {}
        self.failed: dict[int, Any] = {}
        self._news = asyncio.Event()

    async def open(self) -> Asker:
        await self.bus.subscribe_raw(self.inbox, self._on_news)
        await self.bus.flush()
        return self

    def _on_news(self, msg: Msg) -> None:
        news = codec.decode(msg.data, BurstNews)
        for placed in news.accepted:
            self.accepted.setdefault(placed.index, []).append(f"{news.edge}-{placed.ulid}")
        for ready in news.ready:
            self.ready.setdefault(ready.index, []).append(f"{news.edge}-{ready.ulid}")
        for failed in news.failed:
            self.failed[failed.index] = failed.error
        self._news.set()

    async def create(
        self, count: int = 1, spec: SandboxSpec = SPEC, *, burst: str = "", deadline: float = 10.0, lease: Lease | None = None
    ) -> CreateAck:
        request = CreateRequest(
            burst=burst or new_ulid(),
            specs=(spec,),
            items=(CreateItem(spec=0, first=0, count=count),),
            inbox=self.inbox,
            deadline_ms=int(deadline * 1000),
            lease=lease,
        )
        return await self.bus.call(subjects.api("main", "create", ME), request, CreateAck, timeout=5.0)

    async def until(self, holds: Callable[[Asker], bool], timeout: float = 10.0) -> None:
        async with asyncio.timeout(timeout):
            while not holds(self):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def serving(server: NatsServer) -> AsyncIterator[Box]:
    """A box with one Edge, a Watcher and a Scheduler."""
    made = Box(server.url, server.dir.parent)
    try:
        await made.edge()
        await made.watcher()
        await made.scheduler()
        yield made
    finally:
        await made.close()


async def eventually(holds: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(timeout):
        while not holds():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


def but(spec: SandboxSpec = SPEC, **changes: Any) -> SandboxSpec:
    return msgspec.structs.replace(spec, **changes)
