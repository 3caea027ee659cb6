"""Sandboxes that end with another one, on two nodes with the fake backend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.model import SandboxId
from tests.integration.client_box import FAKE, eventually


async def test_an_edge_asks_for_the_end_that_it_did_not_hear(state_dir: Path) -> None:
    """What ends with a sandbox ends when that has, on its node and on another, also where nobody tells; what is bound to one that lives
    stays, and so does it while the node of that one is away."""
    overrides = {"edge": {"sweep_ms": 100}}
    async with (
        Cluster(state_dir, backends=("fake",), edges=("n1", "n2"), overrides=overrides) as cluster,
        libdsec.connect(cluster.url) as dsec,
    ):
        first, second = await dsec.create("image", **FAKE), await dsec.create("image", **FAKE)
        await eventually(lambda: _nodes(dsec, 2))
        bound = {host.id: await _bound(dsec, host) for host in (first, second)}
        await first.stop()  # no worker: its Edge tells nobody
        await eventually(lambda: _left(dsec, 1 + len(bound[second.id])), timeout=30)
        left = {info.id for info in await dsec.list()}
        assert left == {second.id, *(sandbox.id for sandbox in bound[second.id])}
        ended = {info.id: info.exit for info in await dsec.list(stopped=True) if info.exit is not None}
        for sandbox in bound[first.id]:
            assert ended[sandbox.id].detail == f"{first.id} has ended, and this with it"
        home = SandboxId.parse(second.id).edge
        await cluster.edges[home].kill()
        await asyncio.sleep(3)  # it is asked for meanwhile, and does not answer
        other = [sandbox for sandbox in bound[second.id] if sandbox._id.edge != home]
        for sandbox in other:
            assert await sandbox.is_running()


@pytest.mark.slow
async def test_what_is_bound_to_a_lost_node_ends(state_dir: Path) -> None:
    """Once the Watcher has declared the node of the other one lost."""
    overrides = {"edge": {"sweep_ms": 100}, "watcher": {"lost_after_ms": 2000, "vanish_share": 1.0}}
    async with (
        Cluster(state_dir, backends=("fake",), edges=("n1", "n2"), overrides=overrides) as cluster,
        libdsec.connect(cluster.url) as dsec,
    ):
        host = await dsec.create("image", **FAKE)
        await eventually(lambda: _nodes(dsec, 2))
        bound = await _bound(dsec, host)
        home = SandboxId.parse(host.id).edge
        await cluster.edges[home].kill()
        other = [sandbox for sandbox in bound if sandbox._id.edge != home]

        async def over() -> bool:
            return not any([await sandbox.is_running() for sandbox in other])

        await eventually(over, timeout=40)


async def _left(dsec: libdsec.Client, count: int) -> bool:
    return len(await dsec.list()) == count


async def _nodes(dsec: libdsec.Client, count: int) -> bool:
    return len((await dsec.nodes()).nodes) == count


async def _bound(dsec: libdsec.Client, host: libdsec.Sandbox) -> list[libdsec.Sandbox]:
    """Some on each node that end with ``host``."""
    made: list[libdsec.Sandbox] = []
    for _ in range(20):
        made += await dsec.create_many(libdsec.spec("image", ends_with=host.id, on_client_loss="keep", **FAKE), 4)
        if {sandbox._id.edge for sandbox in made} == {"n1", "n2"}:
            break
    assert {sandbox._id.edge for sandbox in made} == {"n1", "n2"}
    return made
