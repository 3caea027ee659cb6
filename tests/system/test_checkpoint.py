"""Checkpoint, restore and fork of real containers: they branch, they are of one moment, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from dsec import syscalls
from dsec.actors.up import Cluster
from dsec.errors import InvalidRequest, NodeError, SandboxGone
from dsec.layers.store import LayerStore
from dsec.model import State
from libdsec import Client, Sandbox
from tests.system.small_cluster import ROOMY, client, cluster, sandbox

__all__ = ["client", "cluster", "sandbox"]
pytestmark = [pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest"), pytest.mark.asyncio(loop_scope="module")]

# Rewrites many files in turn, so that what is read at one moment is n, …, n, n-1, …, n-1.
WRITER = """
import os
os.makedirs("/root/w")
files = [os.open(f"/root/w/{n}", os.O_RDWR | os.O_CREAT) for n in range(400)]
turn = 0
while True:
    turn += 1
    for file in files:
        os.pwrite(file, b"%12d" % turn, 0)
    if turn == 1:
        print("begun", flush=True)
"""


async def text(box: Sandbox, command: str) -> str:
    return (await box.exec(command, check=True)).stdout.text


async def freed(cluster: Cluster, client: Client) -> None:
    """Until the node has no checkpoint and no layer but the base."""
    store = LayerStore(cluster.layer_store)
    base = store.lookup("small").digest.replace(":", "-")

    async def left() -> list[object]:
        found: list[object] = [*await client.checkpoints(), *(info for info in await store.list() if info.names != ("small",))]
        return found + [path for place in ("tmp", "blobs") for path in (store.root / place).iterdir() if base not in path.name]

    async with asyncio.timeout(30):
        while await left():  # noqa: ASYNC110 - a store tells nobody
            await asyncio.sleep(0.05)


async def test_a_fork_of_four_diverges_and_its_parent_lives_on(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """Four children begin with the parent's files and deletions, go their own ways with names of their own, three generations deep; the
    parent and its processes go on; at the end nothing is left."""
    server = sandbox.start("while :; do sleep 0.1; done")
    async with server:
        await sandbox.exec("echo 0 >/root/a; mkdir /root/d; echo x >/tmp/t; rm /etc/group; chown 1000:1000 /root/d", check=True)
        async with await sandbox.fork(4) as children:
            assert not children.failed
            assert len(children) == 4
            names = set()
            for number, child in enumerate(children):
                assert await text(child, "cat /root/a /tmp/t; test ! -e /etc/group; stat -c %u /root/d") == "0\nx\n1000\n"
                await child.exec(f"echo {number} >>/root/a; rm /tmp/t", check=True)
                names.add(await text(child, "cat /proc/sys/kernel/hostname"))
                assert len((await child.info()).layers) == 2
            assert len(names) == 4
            async with await children.sandboxes[2].fork(2) as grandchildren:
                for child in grandchildren:
                    assert await text(child, "cat /root/a; test ! -e /tmp/t") == "0\n2\n"
                one = grandchildren.sandboxes[0]
                await one.exec("echo 3 >>/root/a", check=True)
                async with await one.fork() as last:
                    assert await text(last.sandboxes[0], "cat /root/a") == "0\n2\n3\n"
                    assert len(last.checkpoint.layers) == 4
            assert await text(sandbox, "cat /root/a /tmp/t") == "0\nx\n"
            assert [op for op in await sandbox.ops() if op.running]
        await server.kill()
    await freed(cluster, client)


async def test_a_fork_under_write_load_is_of_one_moment(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """What a child finds was there at one moment, however fast its parent writes."""
    async with sandbox.start(["python3", "-c", WRITER]) as writer:
        async for event in writer:
            assert b"begun" in event.data
            break
        for _ in range(3):
            async with await sandbox.fork() as children:
                found = [int(n) for n in (await text(children.sandboxes[0], "cat $(seq -f /root/w/%g 0 399)")).split()]
            assert len(found) == 400
            assert found == sorted(found, reverse=True)
            assert found[0] - found[-1] <= 1
        await writer.kill()
    await freed(cluster, client)


async def test_checkpoints_outlive_their_sandbox_and_gc(cluster: Cluster, client: Client) -> None:
    """A kept checkpoint stays when its sandbox ends and the store is collected; a dropped one while a sandbox stands on it."""
    store = LayerStore(cluster.layer_store)
    async with client.sandbox("small", **ROOMY) as box:
        await box.exec("echo kept >/root/a", check=True)
        cp = await box.checkpoint("state")
        with pytest.raises(InvalidRequest):
            await box.checkpoint(kind="network")
        await box.pause()
        paused = await box.checkpoint()
        assert (await box.info()).state is State.PAUSED
        assert paused.layers == (paused.layers[0], *cp.layers[1:])
    with pytest.raises(SandboxGone):
        await box.checkpoint()
    await store.gc()
    async with await client.restore(cp.id, 2) as children:
        await client.drop_checkpoints([cp.id, paused.id])
        await store.gc()
        assert not (await client.checkpoints())[0].kept
        assert [await text(child, "cat /root/a") for child in children] == ["kept\n"] * 2
    await freed(cluster, client)


async def test_a_full_node_makes_nothing(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """When the node's store is full a fork is a typed error, nothing half-made stays, and the sandbox runs on."""
    blobs = str(LayerStore(cluster.layer_store).root / "tmp")
    syscalls.mount("dsec-test", blobs, "tmpfs", 0, "size=1m")
    try:
        await sandbox.exec("head -c 9000000 /dev/urandom >/root/big", check=True)
        with pytest.raises(NodeError) as caught:
            await sandbox.fork(2)
        assert (caught.value.reason, caught.value.retryable) == ("disk", True)
        assert os.listdir(blobs) == []
        assert await text(sandbox, "wc -c </root/big") == "9000000\n"
        assert [info.id for info in await client.list()] == [sandbox.id]
    finally:
        syscalls.umount2(blobs, syscalls.MNT_DETACH)
    await freed(cluster, client)


async def test_commands(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """`dsec checkpoint`, `restore`, `fork` and `tree` print ids and the branches."""

    async def dsec(*words: str) -> str:
        more: dict[str, Any] = {"env": os.environ | {"DSEC_URL": cluster.url}}
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "dsec.cli", *words, stdout=subprocess.PIPE, **more)
        out = (await process.communicate())[0].decode()
        assert process.returncode == 0, out
        return out.strip()

    await sandbox.exec("echo 1 >/root/a", check=True)
    cp = await dsec("checkpoint", sandbox.id, "--name", "one")
    (child,) = (await dsec("restore", cp)).split()
    (grandchild,) = (await dsec("fork", child)).split()
    assert await text(await client.attach(grandchild), "cat /root/a") == "1\n"
    lines = (await dsec("tree")).splitlines()
    assert [line.lstrip("└─ ").split()[0].strip("[]") for line in lines] == [cp, child, lines[2].split()[1].strip("[]"), grandchild]
    assert '"one"' in lines[0]
    assert lines[3].startswith("      └─ ")
    await client.stop(ids=[child, grandchild])
    await dsec("tree", "--drop", cp)
    await freed(cluster, client)
