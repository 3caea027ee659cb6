"""Fixtures: a cluster with real containers for one module, its client, and a small sandbox for one test."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from dsec.trees import clear
from libdsec import Client, Sandbox
from tests.fixtures_backend import build_small_base

SMALL: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64}


@asynccontextmanager
async def running(*, edge: Mapping[str, Any] | None = None, container: Mapping[str, Any] | None = None) -> AsyncIterator[Cluster]:
    """One Edge with the container backend and a base of this machine's programs, with more of its configuration."""
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        await asyncio.to_thread(build_small_base, place / "base")
        overrides = {"edge": {"sweep_ms": 200, **(edge or {})}, "container": container or {}}
        cluster = Cluster(place / "up", edges=(f"t{secrets.token_hex(4)}",), overrides=overrides)
        await import_dir(LayerStore(cluster.layer_store), place / "base", "small")
        async with cluster:
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with libdsec.connect(cluster.url) as client:
        yield client
        assert await client.list() == []


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with client.sandbox("small", **SMALL) as sandbox:
        yield sandbox


async def living(box: Sandbox, command: str) -> int:
    """How many processes inside have exactly this command line. Not by ps, which an image need not have."""
    count = "n=0; for c in /proc/[0-9]*/cmdline; do [ \"$(tr '\\0' ' ' <$c)\" = \"$WANTED \" ] && n=$((n + 1)); done 2>/dev/null; echo $n"
    return int((await box.exec(count, env={"WANTED": command}, check=True)).stdout)


async def comes_to(box: Sandbox, command: str, count: int) -> bool:
    """Whether that many such processes live within ten seconds."""
    for _ in range(100):
        if await living(box, command) == count:
            return True
        await asyncio.sleep(0.1)
    return False
