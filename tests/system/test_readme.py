"""README's first example, as it stands, on a real one-node cluster; and what is left after it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.actors.up import Cluster
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from tests.census import Census
from tests.fixtures_backend import build_small_base

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest")]


async def test_readme_example_runs_and_leaves_nothing(leftovers: Census, edge_name: str, state_dir: Path) -> None:
    """The snippet prints what README says, and after the cluster's end no process, mount, cgroup, namespace or loop device is left."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    await asyncio.to_thread(build_small_base, state_dir / "base")
    cluster = Cluster(state_dir / "up", edges=(edge_name,))
    await import_dir(LayerStore(cluster.layer_store), state_dir / "base", "debian-12")
    async with cluster:
        code = code.replace("nats://127.0.0.1:4222", cluster.url)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
        )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.strip().splitlines()
    assert re.fullmatch(r"3 hello from root", first)
    assert last == "[]"


async def test_stopped_sandboxes_leave_nothing_on_a_running_node(edge_name: str, state_dir: Path) -> None:
    """While the Edge goes on, a stopped burst has no process, mount, cgroup or namespace any more."""
    import libdsec

    await asyncio.to_thread(build_small_base, state_dir / "base")
    cluster = Cluster(state_dir / "up", edges=(edge_name,))
    await import_dir(LayerStore(cluster.layer_store), state_dir / "base", "small")
    async with cluster, libdsec.connect(cluster.url) as dsec:
        async with dsec.sandbox("small", memory="64MiB", disk="16MiB") as sb:  # the first one makes what all share: holder, layer mount
            await sb.exec("true")
        census = Census(roots=[state_dir], tokens=[edge_name], keep=[state_dir])
        before = await asyncio.to_thread(census.snapshot)
        async with dsec.burst(libdsec.spec("small", memory="64MiB", disk="16MiB"), 6) as burst:
            count = 0
            async for sb in burst:
                await sb.exec("sleep 300 & true")
                count += 1
            assert count == 6
            during = await asyncio.to_thread(census.snapshot)
            assert len(during["cgroups"]) > len(before["cgroups"])
        left = await asyncio.to_thread(census.left_since, before, 10.0)
        assert left == {}
