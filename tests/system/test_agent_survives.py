"""The guest agent goes on whatever a sandbox does to itself: no process left, no disk left, no memory left."""

from __future__ import annotations

import asyncio

import pytest

from libdsec import Client, DsecError, Sandbox
from tests.system.container_box import SMALL, client, cluster, sandbox  # noqa: F401

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]


async def works(box: Sandbox) -> None:
    """Commands, files and a clean end of each, once the sandbox has room again."""
    assert (await box.exec("echo alive")).stdout == b"alive\n"
    await box.files.write("/dev/shm/small", b"x")
    assert await box.files.read("/dev/shm/small") == b"x"


async def test_c21_pids_full_of_zombies_and_sleepers(sandbox: Sandbox) -> None:  # noqa: F811
    """With every process of its limit taken the agent answers (a typed error for a command), and works again afterwards."""
    code = """
import os, time
try:
    for n in range(1000):
        os.fork() or (time.sleep(600 * (n % 2)), os._exit(0))  # every other one is a zombie
except OSError:
    print("full", flush=True)
    time.sleep(600)
"""
    process = sandbox.start(["python3", "-c", code])
    async with process:
        async with asyncio.timeout(20):
            await process.expect("full")
        with pytest.raises(DsecError) as caught:  # no process is left for a command: asked again until its time is over …
            await asyncio.wait_for(sandbox.exec("true", timeout=2), 30)
        assert caught.value.code == "busy"
        assert (await sandbox.info()).state == "running"
        assert [op.running for op in await sandbox.ops()].count(True) >= 1  # … and the agent itself is well
        await process.kill()
        await process.wait(15)
    await works(sandbox)


async def test_c26_disk_full(sandbox: Sandbox) -> None:  # noqa: F811
    """With the disk full commands still run, a write says ENOSPC, and there is no more to it once there is room."""
    assert (await sandbox.exec("cat /dev/zero > /tmp/fill")).exit_code != 0
    assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    with pytest.raises(DsecError) as caught:
        await sandbox.files.write("/tmp/more", b"x" * 1_000_000)
    assert caught.value.reason == "ENOSPC"
    await sandbox.files.remove("/tmp/fill")
    await works(sandbox)


async def test_c23_memory_full(client: Client) -> None:  # noqa: F811
    """Commands that fill the memory again and again are killed, told so, and never the agent."""
    async with client.sandbox("small", **(SMALL | {"disk": "16MiB"})) as box:
        for _ in range(4):
            result = await box.exec(["python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))"], timeout=30)
            assert (result.oom_killed, result.signal) == (True, 9)
        assert (await box.info()).state == "running"
        await works(box)
