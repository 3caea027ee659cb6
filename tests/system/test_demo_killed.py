"""A program that holds an embedded cluster is killed: nothing of its sandboxes outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples import leftovers

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import asyncio, sys
from pathlib import Path
import libdsec
from dsec.actors.up import Cluster
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.store import LayerStore

async def main(state, name):
    store = LayerStore(Path(".cache/layers"))
    await bootstrap_tiny(store)
    async with Cluster(state, edges=(name,), overrides={"layers": {"store_dir": str(store.root.absolute())}}) as cluster:
        async with libdsec.connect(cluster.url) as client:
            sandboxes = await asyncio.gather(*(client.create("busybox", memory="32MiB", disk="16MiB") for _ in range(4)))
            await sandboxes[0].exec("sleep 1000 &")
            print("ready", flush=True)
            await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.needs("root", "oci", "nats_server")
def test_c01_nothing_outlives_a_killed_program(state_dir: Path, edge_name: str) -> None:
    """After SIGKILL of the process that runs the cluster and the client, its four sandboxes and all actors are gone within seconds."""
    command = [sys.executable, "-c", PROGRAM, str(state_dir / "up"), edge_name]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(leftovers.traces(edge_name).cgroups) > 4
        process.kill()
    end = time.monotonic() + 20
    while (left := leftovers.traces(edge_name)).any() and time.monotonic() < end:
        time.sleep(0.1)
    assert not left.any(), left
