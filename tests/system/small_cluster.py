"""One Edge with the container backend and a base of this machine's programs: fixtures of a module that imports them."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from libdsec import Client, Sandbox
from tests.fixtures_backend import build_small_base

ROOMY: libdsec.Options = {"memory": "256MiB", "disk": "256MiB", "cpus": 1, "pids": 256}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        await asyncio.to_thread(build_small_base, place / "base")
        cluster = Cluster(place / "up", edges=(f"t{secrets.token_hex(4)}",), overrides={"edge": {"sweep_ms": 200}})
        await import_dir(LayerStore(cluster.layer_store), place / "base", "small")
        async with cluster:
            yield cluster
    finally:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with libdsec.connect(cluster.url) as client:
        before = {info.id for info in await client.list()}
        yield client
        assert {info.id for info in await client.list()} == before


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with client.sandbox("small", **ROOMY) as sandbox:
        yield sandbox
