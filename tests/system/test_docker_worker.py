"""A worker that is a Docker container."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.client import bootstrap_client
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from tests.census import Census
from tests.fixtures_docker import Dockerd
from tests.system.worker_box import WORKER, build_base, inside, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_worker_in_docker(dockerd: Dockerd, state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """It makes and drives sandboxes of its job as any other; these end with it."""
    overrides = {"docker": msgspec.to_builtins(dockerd.config)}
    cluster = Cluster(state_dir / "up", edges=(edge_name,), backends=("container", "docker"), overrides=overrides)
    await asyncio.to_thread(build_base, state_dir / "base")
    store = LayerStore(cluster.layer_store)
    await import_dir(store, state_dir / "base", "small")
    await bootstrap_client(store)
    async with cluster, libdsec.connect(cluster.url) as dsec:
        async with dsec.sandbox("small", backend="docker", **WORKER) as worker:
            said = await inside(
                worker,
                """
for backend in ("container", "docker"):
    made = await dsec.create("small", backend=backend, **CHILD)
    print((await made.exec("echo from below", check=True)).stdout.text.strip())
""",
            )
            assert said == "from below\n" * 2
            assert len(await dsec.list(labels={"dsec.job": worker.id})) == 3
        await settled(dsec, 0)
