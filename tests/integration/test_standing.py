"""An Edge that may have been declared lost without noticing, and a bus that says nothing although its connections are open."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.actors.edge import Edge
from dsec.backends.fake import Faults
from dsec.bus import subjects
from dsec.bus.messages import LeaseAck, LeaseRenew
from dsec.bus.server import NatsServer
from dsec.model import ExitReason, State
from libdsec import SandboxGone
from tests.integration.actors_box import ME, SPEC, Asker, Box, but, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


async def test_an_edge_in_doubt_that_was_not_fenced_goes_on(box: Box) -> None:
    """It enters under a new incarnation and keeps what it runs; what was asked meanwhile is answered then, and creates go on."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        handles = await dsec.create_many(SPEC, 3)
        running = asyncio.create_task(handles[0].exec("sleep 0.2; echo through"))
        await asyncio.sleep(0.1)
        first = edge.store.incarnation
        edge.standing.doubt()
        assert edge.heartbeat().draining
        assert (await handles[1].exec("echo asked")).stdout == b"asked\n"
        assert edge.store.incarnation != first
        assert not edge.heartbeat().draining
        assert (await running).stdout == b"through\n"
        assert len(edge.sandboxes) == 3
        await dsec.create(SPEC)
    await eventually(lambda: not edge.sandboxes)
    assert not any(event.kind == "node_lost" for event in box.events.events)


async def test_a_watcher_tells_a_node_that_it_has_declared_lost(box: Box) -> None:
    """The node was in touch with its server all the time, and only the Watcher did not hear it: told so, it reads its fence, ends all as
    `node_lost` and takes sandboxes again. A result that was on its way is not told."""
    edge = await box.edge("n1", heartbeat_ms=3_600_000)
    await box.edge("n2")
    await box.watcher(lost_after_ms=1_000)
    scheduler = await box.scheduler()
    await eventually(lambda: len(scheduler.picture) == 2)
    async with box.client() as dsec:
        handles = await dsec.create_many(but(node_labels={}), 6)
        mine = [sb for sb in handles if sb.id.startswith("n1-")]
        assert mine
        first = edge.store.incarnation
        await eventually(lambda: any(event.kind == "node_lost" for event in box.events.events))
        running = asyncio.create_task(mine[0].exec("sleep 60; echo too late"))
        await asyncio.sleep(0.05)
        edge.beat()  # now it is heard again
        await eventually(lambda: edge.store.incarnation != first)
        assert not edge.sandboxes
        assert not box.nodes["n1"].guests
        with pytest.raises(SandboxGone) as caught:
            await running
        assert caught.value.reason == ExitReason.NODE_LOST
        assert {record.exit.reason for record, _ in edge.ended.values() if record.exit} == {ExitReason.NODE_LOST}
        for sb in handles:
            assert sb in mine or (await sb.exec("true")).ok
        assert not edge.heartbeat().draining


async def test_no_lease_lapses_while_the_bus_is_mute(box: Box, nats_server: NatsServer) -> None:
    """nats-server stands still for longer than the lease; its connections stay open, so nobody is told. No sandbox is taken for abandoned,
    and a whole lease follows when it goes on."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client(lease_ttl=2) as dsec:
        handles = await dsec.create_many(SPEC, 3)
        assert nats_server.process is not None
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(3.5)
            assert len(edge.sandboxes) == 3
        finally:
            nats_server.process.send_signal(signal.SIGCONT)
        assert [(await sb.exec("echo here")).stdout for sb in handles] == [b"here\n"] * 3
        assert len(edge.sandboxes) == 3


async def test_what_is_not_known_yet_is_no_final_refusal(box: Box) -> None:
    """A Scheduler that begins with a Watcher which has not heard all nodes yet does not say of a node's label that nobody has it."""
    edge = await box.edge("n1", labels={"gpu": "yes"}, heartbeat_ms=3_600_000)
    await box.edge("n2")
    watcher = await box.watcher()
    await eventually(lambda: watcher.cluster.nodes["n1"].beat is not None)
    watcher.cluster.nodes["n1"].beat = None  # as it was a moment ago
    scheduler = await box.scheduler()
    async with box.client() as dsec:
        making = asyncio.create_task(dsec.create(but(node_labels={"gpu": "yes"}), timeout=20))
        await eventually(lambda: bool(scheduler._slices))
        await asyncio.sleep(0.2)
        assert not making.done()
        edge.beat()
        assert (await making).id.startswith("n1-")


def unread(edge: Edge, *, fenced: bool) -> asyncio.Event:
    """From now on the Edge is in doubt, until the event is set: then its fence is read."""
    fences, read = edge.standing._fences, asyncio.Event()
    assert fences is not None

    async def enter(_edge: str, _incarnation: str) -> bool:
        await read.wait()
        return fenced

    fences.enter = enter  # type: ignore[method-assign]
    edge.standing.doubt()
    return read


@pytest.mark.parametrize("fenced", [False, True])
async def test_news_wait_while_an_edge_is_in_doubt(box: Box, fenced: bool) -> None:
    """What has become ready is told when the fence has been read, and never where the node was declared lost."""
    slow = Faults(launch_delay=0.3)
    edge = await box.edge(faults=slow)
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    await asker.create()
    await eventually(lambda: len(edge.sandboxes) == 1)
    read = unread(edge, fenced=fenced)
    (sandbox,) = edge.sandboxes.values()
    await eventually(lambda: sandbox.state is State.RUNNING)
    await asyncio.sleep(0.2)
    assert not asker.ready
    read.set()
    slow.launch_delay = 0.0
    await eventually(lambda: not edge.standing.in_doubt())
    if fenced:
        await asker.create(2)
        await asker.until(lambda asked: 1 in asked.ready and 0 in asked.ready)
    else:
        await asker.until(lambda asked: 0 in asked.ready)
    assert (sandbox.id in asker.ready[0]) is not fenced


async def test_a_renewal_counts_at_once_and_is_answered_when_there_is_no_doubt(box: Box) -> None:
    """No lease lapses because its Edge is in doubt, and none is told to be held by a node that was declared lost."""
    edge = await box.edge()
    await box.scheduler()
    async with box.client(lease_ttl=60) as dsec:
        made = await dsec.sandbox(SPEC).__aenter__()
        ulid = made.id.rpartition("-")[2]
        lease = edge.leases.of[ulid]
        read = unread(edge, fenced=True)
        before = edge.leases.held[lease].expires
        request = LeaseRenew(lease=dsec.lease, seq=1_000, ttl_ms=3_600_000, claims=(ulid,))
        bus = await box.bus()
        asked = asyncio.create_task(bus.call(subjects.lease(bus.unit, "n1", ME), request, LeaseAck, timeout=60))
        await eventually(lambda: edge.leases.held[lease].expires > before + 1_000)
        assert not asked.done()
        read.set()
        assert (await asked).unknown == (ulid,)
