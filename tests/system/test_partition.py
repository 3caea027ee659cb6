"""A node that is cut from the bus, wholly or in one direction, or stands still: it is declared lost, and fences itself before it speaks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import libdsec
from dsec import config as configs
from dsec.actors import run
from dsec.bus import Bus, subjects
from dsec.bus.messages import ExecReply, ExecRequest
from dsec.bus.server import NatsServer
from dsec.bus.subjects import Caller
from dsec.errors import DsecError
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.store import LayerStore
from dsec.model import ExecSpec, ExitReason, SandboxId, State
from dsec.trees import clear
from libdsec import Client, Sandbox, SandboxGone
from tests.census import Census
from tests.system.netns_box import EdgeProcess, Wire

pytestmark = [pytest.mark.needs("root", "cgroup", "nft", "guest"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
LOST_AFTER = 4.0  # seconds; a machine under load is silent for a moment too
SMALL: libdsec.Options = {"memory": "48MiB", "disk": "4MiB", "cpus": 0.25, "pids": 16}


class World:
    """Two nodes: ``far`` behind the wire, ``near`` beside the bus."""

    def __init__(self, client: Client, wire: Wire, far: EdgeProcess, name: str, bus: Bus) -> None:
        self.client, self.wire, self.far, self.name, self.bus = client, wire, far, name, bus

    async def box(self, node: str = "far") -> Sandbox:
        return await self.client.create("busybox", node_labels={"node": node}, timeout=60, **SMALL)

    async def lost(self) -> bool:
        return self.name in (await self.client.nodes()).lost

    async def see(self, *names: str) -> bool:
        """Whether these nodes are there and take sandboxes."""
        return {node.edge for node in (await self.client.nodes()).nodes if not node.draining} >= {*names}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    name = "t" + place.name[-8:].replace("_", "x").lower()
    wire = Wire(name)
    census = Census(roots=[place], tokens=[name], keep=[place])
    before = census.snapshot()
    try:
        async with AsyncExitStack() as stack:
            stack.callback(wire.close)
            wire.open()
            nats = await stack.enter_async_context(NatsServer(place / "nats", host=wire.host))
            await bootstrap_tiny(LayerStore(place / "layers"))
            tables: dict[str, dict[str, Any]] = {
                "bus": {"url": nats.url, "connect_timeout_ms": 1_000},
                "watcher": {"lost_after_ms": int(LOST_AFTER * 1000), "publish_ms": 100},
                "layers": {"store_dir": str(place / "layers")},
                "edge": {"heartbeat_ms": 200, "sweep_ms": 200, "on_shutdown": "stop"},
            }

            def edge(node: str, prefix: tuple[str, ...] = ()) -> EdgeProcess:
                mine = {"name": name if node == "far" else f"{name}b", "state_dir": str(place / node), "labels": {"node": node}}
                return EdgeProcess(place, tables | {"edge": tables["edge"] | mine}, prefix)

            far, near = edge("far", wire.inside()), edge("near")
            for each in (far, near):
                stack.push_async_callback(each.stop)
            await asyncio.gather(far.start(), near.start())
            own = configs.parse(tables | {"edge": {"state_dir": str(place / "watcher")}})
            await stack.enter_async_context(run.watcher(own))
            await stack.enter_async_context(run.scheduler(own))
            bus = await stack.enter_async_context(Bus.connect(nats.url))
            client = await stack.enter_async_context(libdsec.connect(nats.url, lease_ttl=20))
            world = World(client, wire, far, name, bus)
            await until(lambda: world.see(name, f"{name}b"))
            yield world
        left = census.left_since(before, seconds=10.0)
        assert not left, f"left behind: {left}"
    finally:
        await asyncio.to_thread(clear, place)


async def until(holds: Callable[[], Any], timeout: float = 60.0) -> None:
    async with asyncio.timeout(timeout):
        while not await holds():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.05)


class Prober:
    """Asks a sandbox's node all the time, whatever the client library knows, and keeps what it accepts."""

    def __init__(self, bus: Bus, box: Sandbox) -> None:
        self.accepted: list[ExecReply] = []
        self.errors: list[DsecError] = []
        self._bus = bus
        self._sid = SandboxId.parse(box.id)
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(4)]

    async def _ask(self, number: int) -> None:
        subject = subjects.sandbox(self._bus.unit, "exec", Caller("local", "default"), self._sid)
        count = 0
        while True:
            count += 1
            request = ExecRequest(op=f"{number:016x}{count:016x}", spec=ExecSpec(argv=("true",)), wait_ms=1_000)
            try:
                self.accepted.append(await self._bus.call(subject, request, ExecReply, timeout=3.0))
            except DsecError as error:
                self.errors.append(error)
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def alive(ulid: str) -> list[int]:
    """Processes in a sandbox's groups."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and ulid in (entry / "cgroup").read_text():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("how", ["both", *(pytest.param(how, marks=pytest.mark.slow) for how in ("in", "out", "stopped"))])
async def test_a_node_that_was_declared_lost_tells_nothing_and_frees_all(world: World, how: str) -> None:
    """Cut (both ways, or half-open) or standing still for longer than the lease of its node: the Watcher declares it lost, the client hears
    `node_lost` and goes on elsewhere; healed, the node answers no request with a result, ends what it ran, and takes sandboxes again."""
    box = await world.box()
    ulid = SandboxId.parse(box.id).ulid
    assert (await box.exec("echo before")).stdout == b"before\n"
    step = asyncio.create_task(box.exec("sleep 1; echo done in the dark", step="s", timeout=60))
    await asyncio.sleep(0.3)
    if how == "stopped":
        world.far.signal(signal.SIGSTOP)
    else:
        world.wire.cut(how)
    try:
        await until(world.lost)
        with pytest.raises(SandboxGone) as caught:
            await asyncio.wait_for(step, 60)
        assert caught.value.reason == ExitReason.NODE_LOST
        assert alive(ulid)  # what runs there goes on: nobody there can know
        async with world.client.sandbox("busybox", node_labels={"node": "near"}, **SMALL) as elsewhere:
            assert (await elsewhere.exec("echo again")).stdout == b"again\n"
        prober = Prober(world.bus, box)
    finally:
        if how == "stopped":
            world.far.signal(signal.SIGCONT)
        else:
            world.wire.heal()
    await until(lambda: world.see(world.name))
    await until(lambda: asyncio.sleep(0, not alive(ulid)))
    await until(lambda: asyncio.sleep(0, any(isinstance(error, SandboxGone) for error in prober.errors)))
    await prober.stop()
    assert prober.accepted == []
    info = await box.info()
    assert (info.state, info.exit and info.exit.reason) == (State.STOPPED, ExitReason.NODE_LOST)
    async with world.client.sandbox("busybox", node_labels={"node": "far"}, **SMALL) as new:
        assert (await new.exec("echo back")).stdout == b"back\n"


@pytest.mark.parametrize("how", ["in", *(pytest.param(how, marks=pytest.mark.slow) for how in ("both", "out"))])
async def test_a_cut_shorter_than_that_costs_nothing(world: World, how: str) -> None:
    """Nothing is declared lost, the sandbox lives on, and a command that ran through it is answered."""
    box = await world.box()
    running = asyncio.create_task(box.exec("sleep 1; echo through", timeout=60))
    await asyncio.sleep(0.3)
    world.wire.cut(how)
    await asyncio.sleep(LOST_AFTER / 8)
    world.wire.heal()
    assert (await running).stdout == b"through\n"
    assert not await world.lost()
    await box.stop()
