"""The actors together over a real nats-server: create, burst, exec, pause, stop, placement, limits, leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import libdsec
from dsec.backends.fake import Faults
from dsec.bus import subjects
from dsec.bus.messages import ClusterView, DrainRequest, EdgeInfo, Empty
from dsec.bus.server import NatsServer
from dsec.errors import BurstError, Conflict, DeadlineExceeded, DsecError, NotFound, SandboxGone
from dsec.model import ExitReason, Resources, State, new_ulid
from tests.integration.actors_box import ME, SMALL, SPEC, Asker, Box, but, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


async def test_create_exec_stop(box: Box) -> None:
    """A sandbox is made, answers a command and ends; its Edge gives everything back."""
    await box.watcher()
    edge = await box.edge()
    await box.scheduler()
    async with box.client() as dsec:
        async with dsec.sandbox(SPEC) as sb:
            assert (await sb.exec("echo hello")).stdout == b"hello\n"
            assert len(edge.ledger.held) == 1
    await eventually(lambda: not edge.sandboxes)
    assert not edge.ledger.held
    assert not box.nodes["n1"].guests
    kinds = [event.kind for event in box.events.events]
    assert kinds == ["node_up", "created", "running", "stopped"]


async def test_a_burst_over_two_edges_is_spread(box: Box) -> None:
    """40 sandboxes on two Edges: all ready, both used, ids name their Edge."""
    await box.edge("n1")
    await box.edge("n2")
    await box.watcher()
    scheduler = await box.scheduler()
    await eventually(lambda: len(scheduler.picture) == 2)
    async with box.client() as dsec, dsec.burst(SPEC, 40) as burst:
        ids = [sb.id async for sb in burst]
        assert len(set(ids)) == 40
        assert not burst.failed
        assert {i.rpartition("-")[0] for i in ids} == {"n1", "n2"}
    await eventually(lambda: not box.edges["n1"].sandboxes and not box.edges["n2"].sandboxes)


async def test_a_refusal_leads_to_another_edge(box: Box) -> None:
    """The view is stale, the first Edge refuses for lack of slots, and all are ready elsewhere."""
    await box.watcher()
    scheduler = await box.scheduler()
    small = await box.edge("small", slots=2, heartbeat_ms=5_000)
    await box.edge("large")
    await eventually(lambda: len(scheduler.picture) == 2)
    filler = await Asker(await box.bus()).open()
    # Fill the small one behind the Scheduler's back: its next heartbeat is far away.
    small.ledger.reserve("x", small_demand())
    small.ledger.reserve("y", small_demand())
    await filler.create(10)
    await filler.until(lambda a: len(a.ready) == 10)
    assert {ids[0].rpartition("-")[0] for ids in filler.ready.values()} == {"large"}
    assert not filler.failed


def small_demand() -> object:
    from dsec.actors.capacity import Demand

    return Demand(1, 0.1, 1)


async def test_c35_what_finds_no_room_fails_at_the_deadline_with_its_reason(box: Box) -> None:
    """One budget for the whole create: the error says what refused last."""
    await box.edge("n1", slots=3)
    await box.watcher()
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    began = time.monotonic()
    await asker.create(5, deadline=1.0)
    await asker.until(lambda a: len(a.ready) == 3 and len(a.failed) == 2)
    assert 0.8 < time.monotonic() - began < 3.0
    for error in asker.failed.values():
        assert error.code == DeadlineExceeded.code
        assert error.reason == "slots"


async def test_room_that_comes_in_time_is_used(box: Box) -> None:
    """What was refused is placed when a sandbox ends before the deadline."""
    await box.edge("n1", slots=1)
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        first = await dsec.create(SPEC)
        second = asyncio.create_task(dsec.create(SPEC, timeout=10))
        await asyncio.sleep(0.3)
        assert not second.done()
        await first.stop()
        assert (await (await second).exec("echo x")).stdout == b"x\n"


async def test_a_heartbeat_counts_the_layers_that_are_stood_on(box: Box) -> None:
    """Distinct ones of live sandboxes; none is left when they have ended."""
    edge = await box.edge("n1")
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        assert edge.heartbeat().layers == 0
        await dsec.create_many(SPEC, 3)
        one = edge.heartbeat().layers
        assert one == len({layer.digest for sandbox in edge.sandboxes.values() for layer in sandbox.record.layers}) > 0
        await dsec.create(but(image="another"))
        assert edge.heartbeat().layers == one + 1
        await dsec.stop(everything=True)
        assert edge.heartbeat().layers == 0


async def test_who_waits_for_room_hears_what_for(box: Box) -> None:
    """While nothing is free the caller is told how many wait and for what, and gets its sandbox once there is room."""
    await box.edge("n1", slots=1)
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        told: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        dsec.on_wait = lambda count, why: told.put_nowait((count, why.reason if why else ""))
        first = await dsec.create(SPEC)
        others = asyncio.create_task(dsec.create_many(SPEC, 2, min_ready=1, timeout=20))
        async with asyncio.timeout(10):
            assert await told.get() == (2, "slots")
        await first.stop()
        others.cancel()


async def test_c35_the_cap_on_starting_holds(box: Box) -> None:
    """Of 60 that wait never more than the cap are being launched."""
    edge = await box.edge("n1", faults=Faults(launch_delay=0.01), starting_max=3)
    await box.watcher()
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    await asker.create(60)
    most = 0
    while len(asker.ready) < 60:
        most = max(most, sum(sandbox.state is State.CREATING for sandbox in edge.sandboxes.values()))
        await asyncio.sleep(0.002)
    assert 2 <= most <= 3


async def test_c34_256_at_once(box: Box) -> None:
    """256 creates at one time, each its own request: no time-out, p99 reported."""
    await box.edge("n1", faults=Faults(launch_delay=0.002), starting_max=16)
    await box.watcher()
    await box.scheduler()
    took = []
    async with box.client() as dsec:

        async def one() -> None:
            began = time.monotonic()
            sb = await dsec.create(SPEC, timeout=30)
            took.append(time.monotonic() - began)
            await sb.stop()

        await asyncio.gather(*(one() for _ in range(256)))
    took.sort()
    print(f"256 creates at once: p50 {took[128] * 1000:.0f} ms, p99 {took[253] * 1000:.0f} ms")
    assert took[253] < 10


async def test_c38_a_spike_from_many_clients_loses_nothing(box: Box) -> None:
    """20 clients ask for 20 each at the same moment on a node with room for 100: every request is answered, none twice."""
    edge = await box.edge("n1", slots=100)
    await box.watcher()
    await box.scheduler()
    askers = [await Asker(await box.bus(f"client {n}")).open() for n in range(20)]
    await asyncio.gather(*(asker.create(20, deadline=1.5) for asker in askers))
    await asyncio.gather(*(asker.until(lambda a: len(a.ready) + len(a.failed) == 20) for asker in askers))
    ids = [sandbox for asker in askers for found in asker.ready.values() for sandbox in found]
    assert len(ids) == len(set(ids)) == 100 == len(edge.ledger.held)


async def test_c36_limits_hold_across_clients(box: Box) -> None:
    """Two clients and two Schedulers together never get more than the node has, at any instant."""
    edge = await box.edge("n1", slots=7)
    await box.watcher()
    await box.scheduler()
    await box.scheduler()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(edge.sandboxes), len(edge.ledger.held))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    async with box.client() as a, box.client() as b:

        async def use(client: libdsec.client.Client) -> None:
            sb = await client.create(SPEC, timeout=30)
            await sb.stop()

        await asyncio.gather(*(use(client) for client in (a, b) for _ in range(20)))
    watching.cancel()
    assert 1 < most <= 7


async def test_the_same_request_gives_the_same_sandboxes(box: Box) -> None:
    """A slice that is sent again, even through another Scheduler's memory, is answered with the ids of the first time."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    asker = await Asker(await box.bus()).open()
    burst = new_ulid()
    await asker.create(5, burst=burst)
    await asker.until(lambda a: len(a.ready) == 5)
    first = {index: ids[0] for index, ids in asker.ready.items()}
    again = await Asker(await box.bus()).open()
    assert (await again.create(5, burst=burst)).known
    await again.until(lambda a: len(a.ready) == 5)
    assert {index: ids[0] for index, ids in again.ready.items()} == first
    assert len(edge.sandboxes) == 5
    with pytest.raises(Conflict) as caught:
        await asker.create(6, burst=burst)
    assert caught.value.reason == "request_id_conflict"


async def test_a_failed_launch_is_told_and_frees_its_place(box: Box) -> None:
    """The caller hears why, nothing is kept."""
    edge = await box.edge(faults=Faults(launch_fail_rate=1.0))
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        with pytest.raises(DsecError, match="told to fail"):
            await dsec.create(SPEC, timeout=5)
    await eventually(lambda: not edge.sandboxes)
    assert not edge.ledger.held


async def test_bad_specs_fail_at_once_with_the_field(box: Box) -> None:
    """Unknown layer, backend, label, user and too little memory: typed, named, quick."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    cases = [
        (but(image="missing-image"), "not_found", "image"),
        (but(backend="microvm"), "unsupported", "backend"),
        (but(node_labels={"zone": "moon"}), "unsupported", "node_labels"),
        (but(user="no such user!"), "invalid", "user"),
        (but(workdir="/a/../b"), "invalid", "workdir"),
        (but(on_idle="explode"), "invalid", "on_idle"),
        (but(ttl_ms=-1), "invalid", "ttl_ms"),
        (but(resources=Resources(memory=20 << 20)), "invalid", "resources.memory"),
        (but(resources=Resources(memory=1 << 50)), "invalid", "resources.memory"),
    ]
    for spec, code, field in cases:
        asker = await Asker(await box.bus()).open()
        await asker.create(1, spec, deadline=20.0)
        await asker.until(lambda a: len(a.failed) == 1, timeout=5)
        assert (asker.failed[0].code, asker.failed[0].field) == (code, field)


async def test_a_burst_below_its_minimum_is_an_error(box: Box) -> None:
    """Three slots for five with min_ready=4."""
    edge = await box.edge(slots=3)
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        with pytest.raises(BurstError):  # noqa: PT012 - it is raised at some step of the iteration
            async with dsec.burst(SPEC, 5, min_ready=4, deadline=1.0) as burst:
                async for _ in burst:
                    pass
        await eventually(lambda: not edge.sandboxes)


async def test_pause_frees_the_place_and_any_request_resumes(box: Box) -> None:
    """c33: a handle to a paused sandbox works; while it is paused another one may use its room."""
    edge = await box.edge(slots=1)
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.pause()
        await sb.pause()
        assert (await sb.info()).state is State.PAUSED
        assert not edge.ledger.held
        other = await dsec.create(SPEC, timeout=5)
        waiting = asyncio.create_task(sb.exec("echo again"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await other.stop()
        assert (await waiting).stdout == b"again\n"
        await sb.resume()
        assert (await sb.info()).state is State.RUNNING


async def test_idle_pauses_and_idle_stops(box: Box) -> None:
    """An idle sandbox is paused, or stopped where the spec says so, with its own reason; a running command keeps it awake."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        pausing = await dsec.create(but(idle_timeout_ms=200))
        stopping = await dsec.create(but(idle_timeout_ms=200, on_idle="stop"))
        busy = await dsec.create(but(idle_timeout_ms=200))
        command = asyncio.create_task(busy.exec("sleep 60"))
        while (await pausing.info()).state is not State.PAUSED:  # noqa: ASYNC110 - the test's own time-out ends it
            await asyncio.sleep(0.05)
        assert (await stopping.wait(30)).reason is ExitReason.IDLE
        assert (await busy.info()).state is State.RUNNING
        command.cancel()


async def test_an_absolute_life_ends(box: Box) -> None:
    """ttl is told as deadline."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        sb = await dsec.create(but(ttl_ms=300))
        assert (await sb.wait(5)).reason is ExitReason.DEADLINE


async def test_c14_a_dead_sandbox_says_why(box: Box) -> None:
    """exec after an OOM: SandboxGone with the reason, not a time-out; and c25: reasons differ."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        stopped = await dsec.create(SPEC)
        from dsec.model import Exit

        next(g for u, g in box.nodes["n1"].guests.items() if sb.id.endswith(u)).end(Exit(reason=ExitReason.OOM, signal=9))
        await eventually(lambda: len(edge.sandboxes) == 1)
        with pytest.raises(SandboxGone) as caught:
            await (await _raw(dsec, sb.id)).exec("true")
        assert caught.value.reason == "oom"
        await stopped.stop()
        with pytest.raises(SandboxGone) as caught:
            await (await _raw(dsec, stopped.id)).exec("true")
        assert caught.value.reason == "requested"
        with pytest.raises(NotFound):
            await dsec.attach(f"n1-{new_ulid()}")


async def _raw(dsec: libdsec.client.Client, sandbox_id: str) -> libdsec.Sandbox:
    """A handle that has not heard of its end yet."""
    from dsec.model import SandboxId

    return libdsec.Sandbox(dsec, SandboxId.parse(sandbox_id), labels={}, layers=(), degraded=(), exec_timeout=5.0)


async def test_c07_bulk_stop_is_parallel(box: Box) -> None:
    """64 stops of 50 ms each take far less than 3.2 s."""
    await box.edge(faults=Faults(stop_delay=0.05))
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        async with dsec.burst(but(labels={"job": "j"}), 64) as burst:
            async for _ in burst:
                pass
            began = time.monotonic()
            results = await dsec.stop({"job": "j"})
            assert len(results) == 64
            assert time.monotonic() - began < 1.5


async def test_a_release_that_fails_is_retried_and_shown_as_stuck(box: Box) -> None:
    """The reservation is kept until nothing is left."""
    edge = await box.edge(faults=Faults(stop_failures=2))
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        stopping = asyncio.create_task(sb.stop())
        await eventually(lambda: any(s.life.release_error for s in edge.sandboxes.values()))
        assert len(edge.ledger.held) == 1
        await stopping
        assert not edge.ledger.held
        assert await dsec.list(stuck=True, stopped=True) == []
        assert [info.id for info in await dsec.list(stopped=True)] == [info.id for info in await dsec.list(states=["stopped"])] == [sb.id]
        assert await dsec.list(states=["running"], stopped=True) == []


async def test_isolation_by_user(box: Box) -> None:
    """Two principals who ask for isolation get different nodes."""
    await box.edge("n1")
    await box.edge("n2")
    await box.watcher()
    scheduler = await box.scheduler()
    await eventually(lambda: len(scheduler.picture) == 2)
    mine = but(isolation="user")
    async with box.client(principal="alice") as alice, box.client(principal="bob") as bob:
        a, b = await alice.create(mine), await bob.create(mine)
        assert a.id.rpartition("-")[0] != b.id.rpartition("-")[0]
        with pytest.raises(DsecError):
            async with box.client(principal="carol") as carol:
                await carol.create(SPEC, timeout=0.6)


async def test_somebody_elses_sandbox_is_not_found(box: Box) -> None:
    """Neither principal nor project may be another one."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec, box.client(principal="eve") as eve, box.client(project="other") as other:
        sb = await dsec.create(SPEC)
        for stranger in (eve, other):
            with pytest.raises(NotFound):
                await stranger.attach(sb.id)
            assert await stranger.list() == []
            assert await stranger.stop(everything=True) == []
        assert (await sb.exec("echo mine")).stdout == b"mine\n"


async def test_drain_takes_no_more_and_stops_on_demand(box: Box) -> None:
    """A draining node refuses creates; with mode stop its sandboxes end as drained."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    bus = await box.bus()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        info = await bus.call(subjects.edge("main", "n1", "drain"), DrainRequest(mode="stop"), EdgeInfo, timeout=5)
        assert info.heartbeat.draining
        assert (await sb.wait(5)).reason is ExitReason.DRAINED
        for timeout in (0.5, 2.0, 8.0, 30.0):  # the news of why it waits takes a moment on a busy machine
            with pytest.raises(DsecError) as caught:
                await dsec.create(SPEC, timeout=timeout)
            if "draining" in str(caught.value):
                break
        assert "draining" in str(caught.value)
        await bus.call(subjects.edge("main", "n1", "drain"), DrainRequest(undo=True), EdgeInfo, timeout=5)
        await dsec.create(SPEC, timeout=5)


async def test_the_view_names_nodes_and_their_load(box: Box) -> None:
    """Anybody may ask the Watcher."""
    await box.watcher()
    await box.edge("n1", labels={"zone": "a"})
    bus = await box.bus()
    await asyncio.sleep(0.1)
    view = await bus.call(subjects.api("main", "view", ME), Empty(), ClusterView, timeout=2)
    assert [node.edge for node in view.nodes] == ["n1"]
    assert view.nodes[0].labels == {"zone": "a"}
    assert view.nodes[0].load.slots_total == 4000


async def test_output_streams_under_credit(box: Box) -> None:
    """A followed command's output arrives whole and in order."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        async with sb.start("echo one; echo two") as process:
            got = b"".join([event.data async for event in process])
        assert got == b"one\ntwo\n"


async def test_resources_of_a_listed_sandbox(box: Box) -> None:
    """list shows labels, state and resources; ended ones only when asked for."""
    await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        sb = await dsec.create(but(labels={"job": "j1"}))
        rows = await dsec.list(labels={"job": "j1"})
        assert [(row.id, row.state, row.resources) for row in rows] == [(sb.id, State.RUNNING, SMALL)]
        assert await dsec.list(labels={"job": "j2"}) == []
        assert any("ready" in line for line in await sb.log())


async def test_an_idle_sandbox_costs_no_task(box: Box) -> None:
    """50 sandboxes that nobody speaks to: the Edge has as many tasks as with none, and no timer of theirs."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    await asyncio.sleep(0.2)
    before = len(edge._tasks)
    asker = await Asker(await box.bus()).open()
    await asker.create(50)
    await asker.until(lambda a: len(a.ready) == 50)
    await eventually(lambda: len(edge._tasks) == before)
    assert len(edge.sandboxes) == 50
