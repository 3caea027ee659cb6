"""Sandboxes that end with another one, on two nodes with the fake backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.bus import subjects
from dsec.bus.messages import EdgeInfo, Empty, EndsWith
from dsec.bus.server import NatsServer
from dsec.bus.subjects import Caller
from dsec.model import SandboxId, State
from tests.integration.actors_box import SPEC, Box, but
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


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    try:
        await made.edge(sweep_ms=3_600_000)
        await made.scheduler()
        yield made
    finally:
        await made.close()


async def test_only_its_owner_ends_a_job(box: Box) -> None:
    """Another principal who says that a worker has ended is not believed."""
    edge, bus = box.edges["n1"], await box.bus()
    async with box.client() as dsec:
        host = await dsec.create(SPEC)
        bound = await dsec.create(but(ends_with=host.id))
        sandbox = edge.sandboxes[bound._id.ulid]
        for principal, state in (("eve", State.RUNNING), ("local", State.STOPPED)):
            subject = subjects.everyone("main", "ended", Caller(principal, "default"))
            await bus.call(subject, EndsWith(worker=host.id), Empty, timeout=30)
            await bus.call(subjects.edge("main", "n1", "info"), Empty(), EdgeInfo, timeout=30)
            if state is State.STOPPED:
                await bound.wait(30)
            assert sandbox.state is state


async def test_who_was_away_does_not_count_as_silent(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """That another Edge does not answer says something only where we are on the bus ourselves."""
    edge = box.edges["n1"]
    away = "n2-" + "0" * 26
    monkeypatch.setattr("dsec.actors.workers.Workers._is_lost", _no)
    await edge.workers._ask_one("n2", [away])
    assert list(edge.workers._silent) == ["n2"]
    with monkeypatch.context() as off:
        off.setattr(type(edge.bus), "connected", property(lambda _: False))
        await edge.workers._ask_one("n2", [away])
    assert not edge.workers._silent
    await edge.workers._ask_one("n2", [away])
    await edge.workers._ask()  # nothing here is bound to one of its sandboxes
    assert not edge.workers._silent


async def _no(*_: object) -> bool:
    return False
