"""A job whose client is killed at each of its steps and started again, on real containers: every side effect happens once."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

import libdsec
from dsec.actors.up import Cluster
from tests.system.small_cluster import ROOMY, client, cluster, sandbox

__all__ = ["client", "cluster", "sandbox"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.timeout(240)]
STEPS = 20
# A trainer: it knows nothing but the sandbox's id, and begins at the beginning each time it is started.
JOB = f"""
import asyncio, sys, libdsec
async def main(url, sandbox_id):
    async with libdsec.connect(url) as dsec:
        sb = await dsec.attach(sandbox_id)
        for number in range({STEPS}):
            print(number, flush=True)
            result = await sb.exec(f"echo {{number}} >>/effects; sleep 0.05; echo result {{number}}", step=f"step-{{number}}", check=True)
            assert result.stdout == f"result {{number}}\\n".encode(), result
        print("done", flush=True)
asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_client_killed_at_each_of_twenty_steps(cluster: Cluster, sandbox: libdsec.Sandbox) -> None:
    """Killed with -9 as soon as it has begun each step, 20 times, and started again: 20 side effects, in order."""
    for death in range(STEPS + 1):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", JOB, cluster.url, sandbox.id, stdout=asyncio.subprocess.PIPE
        )  # fmt: skip
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                if line.strip() == b"done" or (death < STEPS and int(line) == death):
                    break
            if death < STEPS:
                # Some die before their request is sent, some while the command runs, some as its result arrives.
                await asyncio.sleep((death % 4) * 0.03)
        finally:
            if death < STEPS:
                with contextlib.suppress(ProcessLookupError):  # it was quick
                    process.kill()
            await process.wait()
    assert process.returncode == 0
    assert (await sandbox.files.read("/effects")).split() == [str(number).encode() for number in range(STEPS)]
    found = [item for item in await sandbox.commands() if item.step]
    assert [item.step for item in found] == [f"step-{number}" for number in range(STEPS)]
    assert [item.seq for item in found] == sorted({item.seq for item in found})
    assert all(item.exit_code == 0 for item in found)
    # Results are copied to the stream of events, each once, a moment later.
    async with libdsec.connect(cluster.url) as dsec, asyncio.timeout(60):
        copies: list[object] = []
        while len(copies) < STEPS:
            events = dsec.events(kinds=("step",), ids=[sandbox.id], since="all", follow=False)
            copies = [(event.detail["step"], event.detail["stdout"]) async for event in events]
    assert copies == [(f"step-{number}", f"result {number}\n") for number in range(STEPS)]


async def test_steps_of_several_sandboxes_are_their_own(client: libdsec.client.Client) -> None:
    """The same key in two sandboxes is two steps; a repeat while the command runs waits for it and gets its result."""
    async with client.sandbox("small", **ROOMY) as one, client.sandbox("small", **ROOMY) as two:
        found = await asyncio.gather(*(sb.exec("echo x >>/f; sleep 0.2; cat /f", step="s") for sb in (one, one, two, two, one)))
        assert [result.stdout for result in found] == [b"x\n"] * 5
        assert {len(await sb.commands()) for sb in (one, two)} == {1}
