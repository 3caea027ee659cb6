"""An order to empty a node is its Edge's own, until somebody takes it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.backends.fake import Faults
from dsec.bus import subjects
from dsec.bus.messages import DrainRequest, EdgeInfo
from dsec.bus.server import NatsServer
from dsec.errors import Conflict, InvalidRequest, NotFound
from dsec.model import ExitReason, State
from tests.integration.actors_box import SPEC, Box, eventually

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]
SLOW = 3600.0  # seconds: nothing that waits for it ends in a test


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    try:
        await made.watcher()
        await made.scheduler()
        yield made
    finally:
        await made.close()


async def test_undo_ends_a_drain_that_somebody_else_waits_for(box: Box) -> None:
    """Who waits is told, the node takes sandboxes again and goes on taking them, and what was not stopped yet runs on."""
    faults = Faults(stop_delay=SLOW)
    edge = await box.edge(faults=faults, stop_parallel=1)
    async with box.client() as dsec, box.client() as other:
        made = [await dsec.create(SPEC) for _ in range(3)]
        waiting = asyncio.create_task(other.drain("n1", "stop"))
        await eventually(lambda: any(each.state is State.STOPPING for each in edge.sandboxes.values()))
        assert (await dsec.drain("n1", "undo")).heartbeat.draining is False
        with pytest.raises(Conflict) as caught:
            await waiting
        assert caught.value.reason == "undone"
        faults.stop_delay = 0.0
        await dsec.create(SPEC, timeout=30)
        assert not edge.heartbeat().draining
        states = [(await each.info()).state for each in made]
        assert states.count(State.RUNNING) == 2


async def test_an_edge_that_is_started_anew_goes_on(box: Box) -> None:
    """It takes no sandboxes, and stops those that the one before it had not stopped; the order ends with its undo, for good."""
    edge = await box.edge(faults=Faults(stop_delay=SLOW))
    async with box.client() as dsec:
        made = await dsec.create(SPEC)
        waiting = asyncio.create_task(dsec.drain("n1", "stop", timeout=60))
        await eventually(lambda: edge.drain.mode == "stop")
        await box.crash("n1")
        edge = await box.edge()
        assert (await made.wait(30)).reason is ExitReason.DRAINED
        assert edge.heartbeat().draining
        assert (await waiting).drained
        await dsec.drain("n1", "undo")
        await box.crash("n1")
        assert not (await box.edge()).heartbeat().draining


async def test_who_was_resumed_after_a_pause_is_left_alone(box: Box) -> None:
    """The drain is over when all stand still: neither it nor a next Edge pauses them again."""
    await box.edge()
    async with box.client() as dsec:
        made = [await dsec.create(SPEC) for _ in range(2)]
        info = await dsec.drain("n1", "pause", timeout=60)
        assert (info.drained, info.trouble, info.heartbeat.states) == (True, (), {"paused": 2})
        await made[0].resume()
        await box.crash("n1")
        edge = await box.edge()
        assert edge.heartbeat().draining
        assert edge.heartbeat().states == {"running": 1, "paused": 1}
        assert (await dsec.drain("n1", "pause", timeout=60)).heartbeat.states == {"paused": 2}


async def test_what_cannot_be_paused_is_named(box: Box) -> None:
    """The drain ends, and says which sandbox runs on and why; a later order tries again."""
    faults = Faults(pause_fails=True)
    await box.edge(faults=faults)
    async with box.client() as dsec:
        made = await dsec.create(SPEC)
        info = await dsec.drain("n1", "pause", timeout=60)
        assert info.drained
        assert [made.id in line for line in info.trouble] == [True]
        faults.pause_fails = False
        assert (await dsec.drain("n1", "pause", timeout=60)).trouble == ()


async def test_what_is_no_node_or_no_mode(box: Box) -> None:
    """A node that the Watcher does not know is not found; a mode that does not exist is refused here and there."""
    await box.edge()
    bus = await box.bus()
    async with box.client() as dsec:
        with pytest.raises(NotFound) as caught:
            await dsec.drain("nope")
        assert (caught.value.field, caught.value.value) == ("node", "nope")
        with pytest.raises(InvalidRequest):
            await dsec.drain("n1", "halt")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        await bus.call(subjects.edge("main", "n1", "drain"), DrainRequest(mode="halt"), EdgeInfo, timeout=10)
