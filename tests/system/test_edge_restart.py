"""Real containers through the death of their Edge: adoption, running commands, nothing left at the end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import libdsec
from dsec import faults
from dsec.actors.up import Cluster
from dsec.backends import orphans
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.store import LayerStore
from dsec.model import ExitReason
from tests.census import Census
from tests.system.test_orphans import until_gone

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.timeout(180)]
OPTIONS = {"cpus": 0.25, "memory": "48MiB", "disk": "4MiB", "pids": 32}


async def test_50_live_through_kill_9_of_their_edge(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """Killed with -9 and started: all 50 answer exec, an operation that ran through is finished with whole output, nothing is left."""
    cluster = Cluster(state_dir, edges=(edge_name,))
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        spec = libdsec.spec("busybox", **OPTIONS)
        handles = await dsec.create_many(spec, 50)
        assert len(handles) == 50
        lines = "".join(f"line {n}\n" for n in range(30)).encode()
        command = "for n in $(seq 0 29); do echo line $n; sleep 0.2; done"
        running = asyncio.create_task(handles[0].exec(command, timeout=60))
        followed: list[bytes] = []

        async def follow() -> None:
            async with handles[1].start(command) as process:
                async for event in process:
                    followed.append(event.data)

        following = asyncio.create_task(follow())
        await asyncio.sleep(1.0)
        edge = cluster.edges[edge_name]
        await edge.kill()
        await asyncio.sleep(0.5)
        await edge.start()

        async def answers(sb: libdsec.Sandbox) -> bool:
            nonce = os.urandom(8).hex()
            return (await sb.exec(f"echo {nonce}", timeout=60)).stdout.decode().strip() == nonce

        assert all(await asyncio.gather(*(answers(sb) for sb in handles)))
        result = await running
        assert result.stdout == lines
        assert result.exit_code == 0
        await following
        assert b"".join(followed) == lines
        await asyncio.gather(*(sb.stop() for sb in handles))
        assert await dsec.list() == []


async def test_what_died_with_its_edge_away_is_told(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """A sandbox whose init is killed while no Edge is there: found dead at the restart, reason and remains in order."""
    cluster = Cluster(state_dir, edges=(edge_name,))
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        spec = libdsec.spec("busybox", **OPTIONS)
        dead, alive = await dsec.create_many(spec, 2)
        edge = cluster.edges[edge_name]
        # It ends by itself a second from now: its only other process takes the init down with it.
        async with dead.start("sleep 0.6; kill -9 -1") as process:
            process.detach()
        await edge.kill()
        await asyncio.sleep(1.2)
        await edge.start()
        assert (await alive.exec("echo alive", timeout=30)).stdout == b"alive\n"
        info = await dead.info()
        if info.exit is not None:  # the guest's init cannot be killed from inside on every kernel
            assert info.exit.reason in (ExitReason.EXITED, ExitReason.BROKEN)


async def test_a_burst_through_kill_9_leaves_nothing_half_made(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """Killed while it launches 40: after the restart each is running or has failed, and the census is clean at the end."""
    cluster = Cluster(state_dir, edges=(edge_name,))
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url, lease_ttl=5.0) as dsec:
        spec = libdsec.spec("busybox", **OPTIONS)
        async with dsec.burst(spec, 40, min_ready=0, deadline=25) as burst:
            ready = aiter(burst)
            for _ in range(5):
                await anext(ready)
            edge = cluster.edges[edge_name]
            await edge.kill()
            await edge.start()
            handles = [sb async for sb in burst]
            for sb in burst.sandboxes[:5] + handles[:5]:
                assert (await sb.exec("echo x", timeout=30)).stdout == b"x\n"
            assert len(burst.sandboxes) + len(burst.failed) == 40


@pytest.mark.parametrize("point", ["create.started", "create.ready"])
async def test_killed_around_the_start_of_one(
    point: str, state_dir: Path, edge_name: str, leftovers: Census, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when its init runs, or when its caller is told, while the disk knows less: the create ends with one sandbox that answers."""
    monkeypatch.setenv(faults.VARIABLE, f"{point}:1 {tmp_path}/told")
    cluster = Cluster(state_dir, edges=(edge_name,))
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        creating = asyncio.create_task(dsec.create(libdsec.spec("busybox", **OPTIONS), timeout=60))
        edge = cluster.edges[edge_name]
        assert edge.process is not None
        await edge.process.wait()
        assert (tmp_path / "told").read_text() == f"{point}\n"
        monkeypatch.delenv(faults.VARIABLE)
        await edge.start()
        sandbox = await creating
        assert (await sandbox.exec("echo here", timeout=30)).stdout == b"here\n"
        assert [info.id for info in await dsec.list()] == [sandbox.id]
        await sandbox.stop()


async def test_an_edge_that_comes_back_too_late(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """The key of the configuration reaches the holder, and an Edge that comes back too late tells each sandbox's end and the reason."""
    cluster = Cluster(state_dir, edges=(edge_name,), overrides={"edge": {"orphan_grace_ms": 500}})
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as client:
        spec = libdsec.spec("busybox", **OPTIONS)
        sandbox = (await client.create_many(spec, 1))[0]
        holders = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_holder(pid, state_dir)]
        assert holders
        edge = cluster.edges[edge_name]
        await edge.kill()
        await until_gone(*holders)
        await edge.start()
        end = (await sandbox.info()).exit
        assert end is not None
        assert (end.reason, end.detail) == (ExitReason.BROKEN, orphans.DETAIL)


def _is_holder(pid: int, state: Path) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"dsec.backends.holder" in words and any(os.fsencode(state) in word for word in words)
