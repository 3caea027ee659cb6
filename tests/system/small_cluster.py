"""The cluster of container_box for modules that keep a sandbox of their own over several tests, and one with more room for one test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from libdsec import Client, Sandbox
from tests.system.container_box import cluster

__all__ = ["ROOMY", "client", "cluster", "sandbox"]

ROOMY: libdsec.Options = {"memory": "256MiB", "disk": "256MiB", "cpus": 1, "pids": 256}


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
