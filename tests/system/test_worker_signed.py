"""A worker on a bus that checks credentials: nats-server itself holds its job to its subjects."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.client import bootstrap_client
from dsec.layers.importer import import_dir
from dsec.layers.store import LayerStore
from tests.census import Census
from tests.integration.test_bus_creds import Authority
from tests.system.worker_box import WORKER, build_base, inside, settled

pytestmark = [pytest.mark.slow, pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.timeout(180)]


async def test_the_edge_signs_in_for_the_job(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """Actors and users have credentials, the worker's connections those that its Edge signs: it makes and drives what is its job's, through
    a restart of the Edge, and nobody gets in without."""
    authority = Authority(jetstream=True)
    actors, key = state_dir / "actors.creds", state_dir / "account.seed"
    actors.write_text(authority.creds())
    key.write_text(authority.account_seed)
    overrides = {"bus": {"creds": str(actors), "signing_key": str(key)}, "edge": {"sweep_ms": 200}}
    cluster = Cluster(state_dir / "up", edges=(edge_name,), overrides=overrides)
    cluster.nats.extra = authority.config
    await asyncio.to_thread(build_base, state_dir / "base")
    store = LayerStore(cluster.layer_store)
    await import_dir(store, state_dir / "base", "small")
    await bootstrap_client(store)
    async with cluster:
        with pytest.raises(libdsec.Denied):
            await libdsec.connect(cluster.url, connect_timeout=2)
        async with libdsec.connect(cluster.url, creds=authority.creds()) as dsec:
            async with dsec.sandbox("small", **WORKER) as worker:
                body = 'made = await dsec.create("small", **CHILD)\nprint((await made.exec("echo signed", check=True)).stdout.text)'
                assert (await inside(worker, body)).strip() == "signed"
                await cluster.edges[edge_name].kill()
                await cluster.edges[edge_name].start()
                assert (await inside(worker, body)).strip() == "signed"
                assert len(await dsec.list(labels={"dsec.job": worker.id})) == 3
            await settled(dsec, 0)
