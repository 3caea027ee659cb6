"""Docker's sandboxes beside others on one Edge, through libdsec and NATS, and through the Edge's death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.backends.docker import container_name
from dsec.errors import InvalidRequest, Unsupported
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.store import LayerStore
from dsec.model import ExitReason, SandboxId
from tests.census import Census
from tests.fixtures_docker import Dockerd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OPTIONS = {"cpus": 0.5, "memory": "48MiB", "disk": "4MiB", "pids": 32}


def of(sandbox: libdsec.Sandbox) -> str:
    return container_name(SandboxId.parse(sandbox.id).ulid)


async def test_both_backends_on_one_edge(dockerd: Dockerd, state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """Each sandbox is where it was asked for; after kill -9 of the Edge both answer, a kill from Docker's side is told with its signal."""
    overrides = {"docker": msgspec.to_builtins(dockerd.config)}
    cluster = Cluster(state_dir, edges=(edge_name,), backends=("container", "docker"), overrides=overrides)
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        plain = await dsec.create("busybox", **OPTIONS)
        boxed = await dsec.create_many(libdsec.spec("busybox", backend="docker", **OPTIONS), 3)
        shown = await asyncio.to_thread(dockerd.docker, "ps", "--format", "{{.Names}}")
        assert {of(sandbox) for sandbox in boxed} <= set(shown.split())
        assert of(plain) not in shown.split()
        running = asyncio.create_task(boxed[0].exec("for n in 1 2 3; do echo $n; sleep 1; done", timeout=60))
        await asyncio.sleep(0.5)
        edge = cluster.edges[edge_name]
        await edge.kill()
        await asyncio.to_thread(dockerd.docker, "kill", of(boxed[2]))
        await edge.start()
        for sandbox in (plain, *boxed[:2]):
            assert (await sandbox.exec("echo alive", timeout=60)).stdout == b"alive\n"
        assert (await running).stdout == b"1\n2\n3\n"
        ended = (await boxed[2].info()).exit
        assert ended is not None
        assert (ended.reason, ended.signal) == (ExitReason.EXITED, 9)
        await asyncio.gather(*(sandbox.stop() for sandbox in (plain, *boxed)))
        assert await dsec.list() == []
        left = await asyncio.to_thread(dockerd.docker, "ps", "-a", "--format", "{{.Names}}")
        assert not {of(sandbox) for sandbox in boxed} & set(left.split())


async def test_a_node_without_docker_refuses(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """Where the daemon is absent the node serves its other backends, says why, and a sandbox for Docker is refused for good."""
    overrides = {"docker": {"host": f"unix://{state_dir}/nobody.sock"}}
    cluster = Cluster(state_dir, edges=(edge_name,), backends=("container", "docker"), overrides=overrides)
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        with pytest.raises((InvalidRequest, Unsupported)) as caught:
            await dsec.create("busybox", backend="docker", timeout=30, **OPTIONS)
        assert "docker" in str(caught.value)
        async with dsec.sandbox("busybox", **OPTIONS) as sandbox:
            assert (await sandbox.exec("echo here")).stdout == b"here\n"


async def test_an_open_network_reaches_a_docker_sandbox(dockerd: Dockerd, state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """network="open" gives it an interface of its own beside that of a container of the other backend, with another address."""
    overrides = {"docker": msgspec.to_builtins(dockerd.config)}
    cluster = Cluster(state_dir, edges=(edge_name,), backends=("container", "docker"), overrides=overrides)
    await bootstrap_tiny(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        found = []
        for backend in ("container", "docker"):
            try:
                sandbox = await dsec.create("busybox", backend=backend, network="open", **OPTIONS)
            except Unsupported as error:
                pytest.skip(str(error))
            found.append((await sandbox.exec("ip -4 -o addr show scope global")).stdout.text.split())
            await sandbox.stop()
        assert all(words for words in found), found
        assert found[0][3] != found[1][3]
