"""The power of a node fails at any moment: its disk as it is then, started from by another Edge, tells the truth about everything."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from copy import deepcopy
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec.actors import store
from dsec.actors.up import Cluster
from dsec.bus.server import NatsServer
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.store import LayerStore
from dsec.model import ExitReason, SandboxId
from dsec.trees import clear
from libdsec import Client, Sandbox
from tests import power_box
from tests.integration.actors_box import SMALL, SPEC, Box
from tests.system.netns_box import EdgeProcess

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(600)]


class Acks:
    """What was acknowledged to clients."""

    def __init__(self) -> None:
        self.created: set[str] = set()
        self.stopping: set[str] = set()  # asked for
        self.stopped: set[str] = set()  # and answered
        self.steps: dict[tuple[str, str], bytes] = {}
        self.layers: dict[str, str] = {}


@pytest_asyncio.fixture
async def disk() -> AsyncIterator[power_box.Disk]:
    if why := power_box.missing():
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    made = power_box.Disk(folder)
    try:
        await asyncio.to_thread(made.open)
        yield made
    finally:
        await asyncio.to_thread(made.close)
        await asyncio.to_thread(clear, folder)


async def live(client: Client, spec: libdsec.SandboxSpec, acks: Acks, name: str, packs: bool) -> None:
    """One client's work without an end: sandboxes that are made, run steps, are paused, packed and stopped."""
    for turn in range(10_000):
        box = await client.create(spec, timeout=60)
        acks.created.add(box.id)
        for number in range(3):
            result = await box.exec(f"echo {name}.{turn}.{number}", step=f"s{number}", timeout=60)
            acks.steps[box.id, f"s{number}"] = result.stdout
            if number == 1 and turn % 2:
                await box.pause()
        if packs and turn % 3 == 0:
            layer = await box.pack_diff(f"packed/{name}-{turn}")
            acks.layers[layer.name] = layer.digest
        if turn % 2:
            acks.stopping.add(box.id)
            await box.stop()
            acks.stopped.add(box.id)


async def under_load(
    client: Client, spec: libdsec.SandboxSpec, disk: power_box.Disk, moments: int, *, packs: bool, longest: float
) -> list[tuple[Path, Acks]]:
    """Copies of the disk, each with what had been acknowledged before."""
    acks = Acks()
    working = [asyncio.create_task(live(client, spec, acks, str(n), packs)) for n in range(4)]
    cuts = []
    try:
        while len(acks.steps) < 8:  # noqa: ASYNC110 - it is under way
            await asyncio.sleep(0.02)
        for number in range(moments):
            await asyncio.sleep(random.uniform(0.02, longest))
            known = deepcopy(acks)
            cuts.append((await asyncio.to_thread(disk.cut, number), known))
            known.stopping |= acks.stopping  # what was asked for meanwhile may have been done before that moment
    finally:
        for task in working:
            task.cancel()
        results = await asyncio.gather(*working, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results
    return cuts


async def told(client: Client, acks: Acks) -> None:
    """Every sandbox that was acknowledged has ended and says why, and every step has the result that was told."""
    assert acks.created
    for box_id in acks.created:
        end = await Sandbox(client, SandboxId.parse(box_id)).wait(60)
        wanted = {ExitReason.REQUESTED} if box_id in acks.stopped else {ExitReason.NODE_LOST}
        if box_id in acks.stopping - acks.stopped:
            wanted |= {ExitReason.REQUESTED}
        assert end.reason in wanted, (box_id, end)
    for (box_id, step), stdout in acks.steps.items():
        again = Sandbox(client, SandboxId.parse(box_id)).exec(f"echo {stdout.decode().strip()}", step=step, timeout=60)
        result = await again
        assert result.stdout == stdout


def whole(database: Path) -> None:
    db = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    finally:
        db.close()


async def test_three_moments(nats_server: NatsServer, disk: power_box.Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Edge with the fake backend, and another one that starts from its disk with nothing else: no record that keeps it from starting,
    every sandbox that was live ended as `node_lost`, every recorded step readable."""
    box = Box(nats_server.url, disk.place)
    try:
        await box.edge(sweep_ms=200)
        await box.watcher()
        await box.scheduler()
        async with box.client() as client:
            cuts = await under_load(client, SPEC, disk, 3, packs=False, longest=0.3)
    finally:
        await box.close()
    boot = disk.place.parent / "boot_id"
    boot.write_text(str(uuid.uuid4()))
    monkeypatch.setattr(store, "BOOT_ID", boot)
    for copy, acks in cuts:
        place = await asyncio.to_thread(disk.power_on, copy)
        again = Box(nats_server.url, place)
        try:
            edge = await again.edge()
            async with again.client() as client:
                await told(client, acks)
            assert not edge.sandboxes
            await edge.store.settle()
            whole(place / "n1" / "edge.db")
        finally:
            await again.close()
        await asyncio.to_thread(disk.power_off, copy)


@pytest.mark.slow
@pytest.mark.needs("root", "cgroup", "guest")
@pytest.mark.timeout(1800)
async def test_twenty_four_moments_of_real_containers(disk: power_box.Disk, edge_name: str) -> None:
    """All of `dsec up` on one disk, with containers, steps, pauses and packed layers; each copy is started from by a real Edge on a
    "machine" with another boot id. Layers that were acknowledged are there, and their bytes give their digests."""
    cluster = Cluster(disk.place / "up", edges=(edge_name,))
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    spec = libdsec.spec("busybox", memory=SMALL.memory, disk="8MiB", cpus=0.1, pids=32)
    async with cluster, libdsec.connect(cluster.url) as client:
        cuts = await under_load(client, spec, disk, 24, packs=True, longest=1.0)
    folder = disk.place.parent
    boot = folder / "boot_id"
    boot.write_text(str(uuid.uuid4()))
    other = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"', str(boot))
    steps = layers = 0
    for copy, acks in cuts:
        place = await asyncio.to_thread(disk.power_on, copy)
        async with AsyncExitStack() as stack:
            nats = await stack.enter_async_context(NatsServer(folder / "nats"))
            tables = {
                "bus": {"url": nats.url},
                "layers": {"store_dir": str(place / "up" / "layers")},
                "edge": {"name": edge_name, "state_dir": str(place / "up" / "edges" / edge_name), "on_shutdown": "stop"},
            }
            edge = EdgeProcess(folder, tables, other)
            stack.push_async_callback(edge.stop)
            await edge.start()
            client = await stack.enter_async_context(libdsec.connect(nats.url))
            await told(client, acks)
            kept = LayerStore(place / "up" / "layers")
            for name, digest in acks.layers.items():
                assert (await kept.verify(name)).digest == digest
        whole(place / "up" / "edges" / edge_name / "edge.db")
        steps, layers = steps + len(acks.steps), layers + len(acks.layers)
        await asyncio.to_thread(clear, folder / "nats")
        await asyncio.to_thread(disk.power_off, copy)
    print(f"\n24 cuts: {steps} steps and {layers} layers read back")
