"""A worker's way to the bus, and its job, through the deaths of client, Edge, worker and controller; and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.client import bootstrap_client
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from tests.census import Census
from tests.system.worker_box import HEAD, WORKER, build_base, inside, settled, until

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parent.parent.parent
COUNTING = """
async def main():
    async with libdsec.connect(lease="counter", lease_ttl=120) as dsec:
        sandbox = await dsec.create("small", **CHILD)
        n = 0
        while not os.path.exists("/tmp/enough"):
            result = await sandbox.exec("echo . >>/tmp/count; wc -l </tmp/count", step=f"s{n}", check=True, timeout=60)
            n += 1
            assert int(result.stdout) == n, (n, result.stdout)
            open("/tmp/progress", "w").write(f"{n} {sandbox.id}")
    open("/tmp/done", "w").write(str(n))
asyncio.run(main())
"""


async def made(state_dir: Path, edge: str) -> Cluster:
    cluster = Cluster(state_dir / "up", edges=(edge,), overrides={"edge": {"sweep_ms": 200}})
    await asyncio.to_thread(build_base, state_dir / "base")
    store = LayerStore(cluster.layer_store)
    await import_dir(store, state_dir / "base", "small")
    await bootstrap_client(store)
    return cluster


async def progress(worker: libdsec.Sandbox) -> int:
    if not await worker.files.exists("/tmp/progress"):
        return 0
    return int([*(await worker.files.read_text("/tmp/progress")).split(), "0"][0])  # empty while it is being written


async def test_a_controller_goes_on_while_client_edge_and_bus_die(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """The client that started it, the Edge and nats-server are killed with -9, the last two come back: the controller inside connects
    again by itself, its steps run once each, and its job ends with the worker's kill. Nothing is left."""
    cluster = await made(state_dir, edge_name)
    async with cluster:
        starter = """
import asyncio, os, sys, libdsec
async def main():
    async with libdsec.connect(os.environ["URL"]) as dsec:
        worker = await dsec.create("small", toolkits=["libdsec"], worker=True, memory="160MiB", disk="64MiB", pids=128)
        async with worker.start(["python3", "-c", os.environ["PROGRAM"]], stdin=False) as process:
            process.detach()
        print(worker.id, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "URL": cluster.url, "PROGRAM": HEAD + COUNTING}
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", starter, stdout=asyncio.subprocess.PIPE, env=environ)
        assert client.stdout is not None
        worker_id = (await client.stdout.readline()).decode().strip()
        client.send_signal(signal.SIGKILL)
        await client.wait()
        async with libdsec.connect(cluster.url) as dsec:
            worker = await dsec.attach(worker_id)
            for kill in ("none", "edge", "nats"):
                if kill == "edge":
                    await cluster.edges[edge_name].kill()
                    await asyncio.sleep(0.5)
                    await cluster.edges[edge_name].start()
                elif kill == "nats":
                    cluster.nats.kill()
                    await asyncio.sleep(0.3)
                    await cluster.nats.start()
                before = await progress(worker)

                async def further(before: int = before) -> bool:
                    return await progress(worker) > before + 3

                await until(further)
            await worker.files.write("/tmp/enough", b"")
            await until(lambda: worker.files.exists("/tmp/done"))
            assert len(await dsec.list(labels={"dsec.job": worker_id})) == 2
            await worker.exec("kill -9 -1")
            await worker.stop()
            await settled(dsec, 0)


@pytest.mark.slow  # the same question is asked in tests/integration/test_ends_with.py
async def test_a_job_ends_though_nobody_told_its_edge(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """The worker's end is not heard, for its Edge is killed just then: the Edge that comes back asks, and ends what was the job's."""
    cluster = await made(state_dir, edge_name)
    async with cluster, libdsec.connect(cluster.url) as dsec:
        worker = await dsec.create("small", **WORKER)
        await inside(worker, 'await dsec.create("small", **CHILD)')
        child = next(info for info in await dsec.list() if info.id != worker.id)
        init = next(pid for pid in _inits(worker.id))
        await cluster.edges[edge_name].kill()
        os.kill(init, signal.SIGKILL)
        await asyncio.sleep(0.3)
        await cluster.edges[edge_name].start()
        await settled(dsec, 0, timeout=40)
        info = next(each for each in await dsec.list(stopped=True) if each.id == child.id)
        assert info.exit is not None
        assert (info.exit.reason, "this with it" in info.exit.detail) == ("lease", True)


def _inits(sandbox: str) -> list[int]:
    """Pids of the first process of a sandbox: the lowest in its cgroup."""
    ulid = sandbox.rpartition("-")[2]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if ulid in (entry / "cgroup").read_text() and "NSpid" in (status := (entry / "status").read_text()):
                    line = next(text for text in status.splitlines() if text.startswith("NSpid:"))
                    if line.split()[-1] == "1":
                        found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)
