"""What the actors do when something of them dies: Edge, Scheduler, Watcher, client, nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import libdsec.burst
from dsec.actors.fence import Fences
from dsec.backends.fake import Faults
from dsec.bus import subjects
from dsec.bus.messages import Lease, LeaseAck, LeaseRenew
from dsec.bus.server import NatsServer
from dsec.errors import DsecError
from dsec.model import Exit, ExitReason, State, new_ulid
from tests.integration.actors_box import ME, SPEC, Asker, Box, but, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


async def test_c03_a_restarted_edge_adopts_what_lives(box: Box) -> None:
    """20 sandboxes, one of them paused, one dead meanwhile: after the restart 19 answer under their ids, and the count is right."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        handles = await dsec.create_many(SPEC, 20)
        await handles[0].pause()
        first = box.edges["n1"].store.incarnation
        await box.crash("n1")
        dead = handles[1].id.rpartition("-")[2]
        box.nodes["n1"].guests[dead].end(Exit(reason=ExitReason.OOM, signal=9))
        edge = await box.edge()
        assert edge.store.incarnation != first
        await eventually(lambda: len(edge.sandboxes) == 19)
        assert len(box.nodes["n1"].guests) == 19
        assert len(edge.ledger.held) == 18  # the paused one holds nothing
        assert (await handles[0].info()).state is State.PAUSED
        for sb in [handles[0], *handles[2:]]:
            assert (await sb.exec("echo here")).stdout == b"here\n"
        assert (await handles[1].wait(5)).reason is ExitReason.OOM
    await eventually(lambda: not edge.sandboxes)
    assert not box.nodes["n1"].guests


async def test_an_edge_that_dies_in_a_burst_leaves_nothing_half_made(box: Box) -> None:
    """Killed while it launches: after its restart what was ready lives, what was half made is gone, nothing is unknown."""
    edge = await box.edge(faults=Faults(launch_delay=0.05), starting_max=4)
    await box.watcher()
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    await asker.create(40)
    await asker.until(lambda a: len(a.ready) >= 8)
    await box.crash("n1")
    edge = await box.edge()
    await eventually(lambda: all(s.state is State.RUNNING for s in edge.sandboxes.values()))
    alive = {f"n1-{ulid}" for ulid in edge.sandboxes}
    assert {ids[0] for ids in asker.ready.values()} <= alive
    assert set(edge.sandboxes) == set(box.nodes["n1"].guests)
    assert len(edge.sandboxes) + len(edge.ended) == 40  # every id that was acknowledged is still known


async def test_a_watcher_that_has_just_begun_hides_no_node(box: Box) -> None:
    """Before the first heartbeat reaches it, lists and stops of many still ask the nodes that the records name."""
    await box.edge()
    watcher = await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        handles = await dsec.create_many(SPEC, 3)
        watcher.cluster.nodes["n1"].beat = None  # as it is after its start
        watcher._tell()
        await asyncio.sleep(0.02)
        assert {info.id for info in await dsec.list()} == {sb.id for sb in handles}
        watcher.cluster.nodes["n1"].beat = None
        watcher._tell()
        await asyncio.sleep(0.02)
        assert len(await dsec.stop(everything=True)) == 3
        assert await dsec.list() == []


async def test_a_watcher_without_records_asks_who_is_there(box: Box) -> None:
    """Its first view names every node that lives, though none of them has sent a heartbeat since it began."""
    for name in ("n1", "n2", "n3"):
        await box.edge(name, heartbeat_ms=3_600_000)
    await box.watcher(records=False)
    async with box.client() as dsec:
        assert {node.edge for node in (await dsec.nodes()).nodes} == {"n1", "n2", "n3"}


async def test_a_fenced_edge_reaps_instead_of_adopting(box: Box) -> None:
    """Declared lost while it was away: on its return everything is freed and told as node_lost."""
    await box.edge("n1")
    await box.edge("n2")
    await box.watcher(lost_after_ms=1_000)
    scheduler = await box.scheduler()
    await eventually(lambda: len(scheduler.picture) == 2)
    async with box.client() as dsec:
        handles = await dsec.create_many(but(node_labels={}), 6)
        on_n1 = [sb for sb in handles if sb.id.startswith("n1-")]
        assert on_n1
        await box.crash("n1")
        await eventually(lambda: any(event.kind == "node_lost" for event in box.events.events), timeout=5)
        lost = [event for event in box.events.events if event.kind == "node_lost"]
        assert [event.edge for event in lost] == ["n1"]
        edge = await box.edge("n1")
        await eventually(lambda: not edge.sandboxes)
        assert not box.nodes["n1"].guests
        assert {record.exit.reason for record, _ in edge.ended.values() if record.exit} == {ExitReason.NODE_LOST}
        bus = await box.bus()
        assert not await (await Fences.open(bus)).enter("n1", edge.store.incarnation)  # told once


async def test_a_scheduler_that_dies_mid_burst_loses_and_doubles_nothing(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two Schedulers, one dies holding what no node has room for yet; the client repeats (accelerated), the other one finishes."""
    monkeypatch.setattr(libdsec.burst, "LOOK_AFTER", 0.5)
    monkeypatch.setattr(libdsec.burst, "RESEND_AFTER", 1.0)
    edge = await box.edge(slots=10)
    await box.watcher()
    first = await box.scheduler()
    async with box.client() as dsec:
        fillers = await dsec.create_many(SPEC, 10)
        making = asyncio.create_task(dsec.create_many(SPEC, 8, timeout=40))
        await eventually(lambda: bool(first._slices) and len(first._wakes) == 1)
        second = await box.scheduler()
        await first.stop()
        await first.bus.close(0)
        await asyncio.gather(*(sb.stop() for sb in fillers))
        handles = await asyncio.wait_for(making, 40)
        assert len({sb.id for sb in handles}) == 8
        await eventually(lambda: len(edge.sandboxes) == 8)
        assert second.name != first.name


async def test_a_doubled_create_is_resolved_by_the_lease(box: Box) -> None:
    """Two Schedulers place the same index on two Edges; the client keeps one, and the other goes."""
    await box.edge("n1", unclaimed_ms=500)
    await box.edge("n2", unclaimed_ms=500)
    await box.watcher()
    for edge, other in (("n1", "n2"), ("n2", "n1")):
        scheduler = await box.scheduler()
        await eventually(lambda: len(scheduler.picture) == 2)  # noqa: B023 - it is awaited here
        scheduler.picture.forget(other)
        scheduler.picture.see = lambda *_, **__: None  # type: ignore[method-assign] - each goes on seeing only its own node
        assert scheduler.picture.knows(edge)
    bus = await box.bus()
    asker = await Asker(bus).open()
    lease = Lease(id=new_ulid(), ttl_ms=1_500)
    burst = new_ulid()

    async def renew() -> str:
        kept = asker.accepted[0][0]
        edge, _, ulid = kept.rpartition("-")
        message = LeaseRenew(lease=lease.id, ttl_ms=1_500, claims=(ulid,))
        await bus.call(subjects.lease("main", edge, ME), message, LeaseAck, timeout=2)
        return kept

    while len(set(asker.accepted.get(0, []))) < 2:  # the queue group sends repeats to either
        await asker.create(1, burst=burst, lease=lease)
        await asker.until(lambda a: bool(a.accepted))
        await renew()
    assert sum(len(edge.sandboxes) for edge in box.edges.values()) == 2
    for _ in range(25):
        kept = await renew()
        await asyncio.sleep(0.1)
    assert [f"{name}-{ulid}" for name, edge in box.edges.items() for ulid in edge.sandboxes] == [kept]


async def test_c01_a_lease_that_lapses_takes_its_sandboxes(box: Box) -> None:
    """The client vanishes without a word, in the middle of an exec: all is reclaimed within the lease and a sweep."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    client = box.client(lease_ttl=1.0)
    dsec = await client
    handles = await dsec.create_many(SPEC, 5)
    kept = await dsec.create(but(on_client_loss="keep"))
    paused = await dsec.create(but(on_client_loss="pause"))
    running = asyncio.create_task(handles[0].exec("sleep 60"))
    await asyncio.sleep(0.2)
    await client._wire._transport.close(0)  # type: ignore[union-attr]
    began = asyncio.get_running_loop().time()
    await eventually(lambda: len(edge.sandboxes) == 2)
    await eventually(lambda: paused.id.rpartition("-")[2] in edge.sandboxes and _state(box, paused.id) is State.PAUSED)
    assert asyncio.get_running_loop().time() - began < 2.5
    assert _state(box, kept.id) is State.RUNNING
    reasons = {record.exit.reason for record, _ in edge.ended.values() if record.exit}
    assert reasons == {ExitReason.LEASE}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    dsec._leases._closed = True


def _state(box: Box, sandbox: str) -> State:
    edge, _, ulid = sandbox.rpartition("-")
    return box.edges[edge].sandboxes[ulid].state


async def test_nats_killed_and_started_again_costs_no_sandbox(box: Box, nats_server: NatsServer) -> None:
    """Killed with -9 for longer than the lease: sandboxes live on, the cluster works again, leases got a whole period of grace."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client(lease_ttl=1.5) as dsec:
        handles = await dsec.create_many(SPEC, 5)
        nats_server.kill()
        await asyncio.sleep(2.5)
        assert len(edge.sandboxes) == 5
        await nats_server.start()
        for sb in handles:
            assert (await sb.exec("echo still", timeout=20)).stdout == b"still\n"
        await asyncio.sleep(1.8)
        assert len(edge.sandboxes) == 5
        new = await dsec.create(SPEC, timeout=20)
        assert (await new.exec("echo new")).stdout == b"new\n"


async def test_a_watcher_that_restarts_knows_the_nodes_again(box: Box) -> None:
    """From heartbeats within one period; Schedulers place on meanwhile."""
    await box.edge()
    watcher = await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        await dsec.create(SPEC)
        await watcher.stop()
        await watcher.bus.close(0)
        await dsec.create(SPEC, timeout=5)
        again = await box.watcher()
        await eventually(lambda: "n1" in again.cluster.nodes and again.cluster.nodes["n1"].beat is not None)


async def test_no_edge_at_all_is_told(box: Box) -> None:
    """A create without any node fails at its deadline and says so."""
    await box.watcher()
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    await asker.create(2, deadline=0.6)
    await asker.until(lambda a: len(a.failed) == 2)
    assert {error.reason for error in asker.failed.values()} == {"nodes"}


async def test_an_edge_nobody_serves_is_passed_over(box: Box) -> None:
    """Crashed a moment ago, still in the view: no responders, so the sandbox is placed elsewhere at once."""
    await box.edge("n1")
    await box.edge("n2")
    await box.watcher()
    await box.scheduler()
    await asyncio.sleep(0.2)
    await box.crash("n1")
    asker = await Asker(await box.bus()).open()
    await asker.create(10)
    await asker.until(lambda a: len(a.ready) == 10, timeout=5)
    assert {ids[0].rpartition("-")[0] for ids in asker.ready.values()} == {"n2"}


async def test_two_edges_cannot_share_a_directory(box: Box) -> None:
    """The second one says who holds it."""
    await box.edge("n1")
    with pytest.raises(DsecError, match="another Edge holds"):
        await box.edge("n1")


async def test_c06_a_cancelled_create_leaves_nothing(box: Box) -> None:
    """Cancelled at many different moments: zero left."""
    edge = await box.edge(faults=Faults(launch_delay=0.01), unclaimed_ms=300)
    await box.watcher()
    await box.scheduler()
    async with box.client(lease_ttl=1.0) as dsec:
        for n in range(25):
            task = asyncio.create_task(dsec.create(SPEC))
            await asyncio.sleep(n * 0.001)
            task.cancel()
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(done, BaseException):
                await done.stop()
        await eventually(lambda: not edge.sandboxes)
        assert not box.nodes["n1"].guests
        assert not edge.ledger.held


async def test_a_fence_and_a_return_in_the_same_moment_cannot_both_win(box: Box) -> None:
    """Whatever the order: a node that another incarnation serves is not lost, and one that read its fence reaps."""
    bus = await box.bus()
    fences = await Fences.open(bus)
    assert not await fences.enter("n", "u.1")
    assert await fences.lose("n", "u.1") == "won"
    assert await fences.lose("n", "u.1") == "known"
    assert await fences.enter("n", "u.2")
    await fences.told("n")
    assert not await fences.enter("n", "u.3")
    assert await fences.lose("n", "u.2") == "other"
    assert not await fences.enter("n", "u.4")
    for n in range(20):
        edge = f"r{n}"
        await fences.enter(edge, "u.1")
        outcome, fenced = await asyncio.gather(fences.lose(edge, "u.1"), fences.enter(edge, "u.2"))
        if outcome == "won":
            assert fenced  # it was declared lost, so it must not adopt
