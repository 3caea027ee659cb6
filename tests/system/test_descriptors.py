"""A node that has no descriptor left: creates are refused as that and leave nothing, and what runs goes on."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from dsec.actors.up import Cluster
from dsec.errors import NodeError
from libdsec import Client, Sandbox
from tests.system.small_cluster import ROOMY, client, cluster, sandbox

__all__ = ["client", "cluster", "sandbox"]
pytestmark = [pytest.mark.needs("root", "cgroup", "guest"), pytest.mark.asyncio(loop_scope="module")]
HARD = 20_000


def held(edge: str) -> set[str]:
    """Control groups of its sandboxes, of any hierarchy, by their ids: not those that are made ahead."""
    return {str(path) for path in Path("/sys/fs/cgroup").glob(f"*/dsec/{edge}/{'?' * 26}/")}


async def test_a_node_without_descriptors_goes_on(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """Twelve creates at a live Edge that may open nothing more: each succeeds or is refused for want of descriptors; commands go on; with
    room again, all is freed and the next create succeeds."""
    ((name, child),) = cluster.edges.items()
    async with asyncio.timeout(60):
        before = held(name)
        open_now = max(int(number) for number in os.listdir(f"/proc/{child.pid}/fd")) + 1
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (open_now, HARD))
        try:
            made = await asyncio.gather(*(client.create("small", timeout=20, **ROOMY) for _ in range(12)), return_exceptions=True)
            assert (await sandbox.exec("echo on")).stdout.text == "on\n"
        finally:
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (HARD, HARD))
        refused = [each for each in made if isinstance(each, BaseException)]
        assert refused
        assert {(type(each), getattr(each, "reason", None)) for each in refused} == {(NodeError, "descriptors")}
        for each in made:
            if isinstance(each, Sandbox):
                await each.stop()
        async with client.sandbox("small", **ROOMY) as another:
            assert (await another.exec("echo on")).stdout.text == "on\n"
        while held(name) != before:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)
