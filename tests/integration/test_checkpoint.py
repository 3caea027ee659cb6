"""Checkpoints as the actors see them: states that branch, what keeps them and what ends them (fake backend, real bus and disk)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dsec.backends.fake import Faults
from dsec.bus.messages import CheckpointReply, CheckpointRequest
from dsec.bus.server import NatsServer
from dsec.errors import (
    BurstError,
    Busy,
    Conflict,
    DeadlineExceeded,
    DsecError,
    InvalidRequest,
    NodeError,
    NotFound,
    SandboxGone,
    Unsupported,
)
from dsec.model import State, new_ulid
from tests.integration.actors_box import SPEC, Box, but, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    await made.watcher()
    await made.scheduler()
    yield made
    await made.close()


async def read(sandbox: Any) -> str:
    return (await sandbox.exec("cat /root/a")).stdout.text


async def test_states_branch_and_nothing_stays(box: Box) -> None:
    """Three generations: each begins as its parent was, goes its own way, and leaves the others alone; nothing is left at the end."""
    await box.edge()
    node = box.nodes["n1"]
    async with box.client() as dsec:
        async with dsec.sandbox(but(SPEC, hostname="first", labels={"job": "j"})) as first:
            await first.files.write("/root/a", b"0")
            async with await first.fork(3, labels={"branch": "x"}) as children:
                assert len(children) == 3
                assert not children.failed
                assert len({child.id for child in children} | {first.id}) == 4
                for number, child in enumerate(children):
                    assert await read(child) == "0"
                    await child.files.write("/root/a", f"0{number}".encode())
                    assert (await child.info()).labels == {"job": "j", "branch": "x"}
                assert not (await dsec.checkpoints([children.checkpoint.id]))[0].kept
                async with await children.sandboxes[1].fork() as grandchildren:
                    (grandchild,) = grandchildren
                    assert await read(grandchild) == "01"
                    assert grandchildren.checkpoint.parent == children.checkpoint.id
                    assert (await grandchild.info()).checkpoint == grandchildren.checkpoint.id
                    assert len(grandchildren.checkpoint.layers) == len(children.checkpoint.layers) + 1
                    hosts = {guest.plan.hostname for guest in node.guests.values()}
                    assert len(hosts) == 5
                assert await read(first) == "0"
            await eventually(lambda: not node.packed and not node.names)
            assert await dsec.checkpoints() == []


async def test_what_stands_on_a_checkpoint_keeps_it(box: Box) -> None:
    """A dropped checkpoint lives while a sandbox or a kept descendant stands on it, through a restart of the Edge, and not longer."""
    await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.files.write("/root/a", b"1")
        one = await sb.checkpoint("one")
        assert one.kept
        (child,) = await dsec.restore(one)
        await child.files.write("/root/a", b"2")
        two = await child.checkpoint("two")
        for each in (sb, child):
            await each.stop()
        assert [outcome.ok for outcome in await dsec.drop_checkpoints([one.id])] == [True]
        await box.crash("n1")
        edge = await box.edge()
        await edge.checkpoints.sweep()
        assert {row.name for row in await dsec.checkpoints()} == {"one", "two"}
        (other,) = await dsec.restore(two.id)
        assert await read(other) == "2"
        assert other.layers == two.layers
        await dsec.drop_checkpoints([two.id])
        assert len(await dsec.checkpoints()) == 2
        await other.stop()
        await edge.checkpoints.sweep()
        assert await dsec.checkpoints() == []
        assert not box.nodes["n1"].packed
        with pytest.raises(NotFound):
            await dsec.restore(two, timeout=5)
        assert isinstance((await dsec.drop_checkpoints([two.id]))[0].error, NotFound)


async def test_a_capture_without_its_record_is_freed(box: Box) -> None:
    """A crash between the layer and its record leaves a name that the next start takes away."""
    edge = await box.edge()
    node = box.nodes["n1"]
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        cp = await sb.checkpoint()
        await edge.store.drop_checkpoints([cp.id.rpartition("-")[2]])
        await box.crash("n1")
        edge = await box.edge()
        await edge.checkpoints.sweep()
        assert not node.names
        await sb.stop()


async def test_repeated_capture_is_one(box: Box) -> None:
    """The same id asked for again, also after a restart, is the same checkpoint; of another sandbox it is a conflict."""
    await box.edge()
    async with box.client() as dsec:
        one, two = await dsec.create_many(but(SPEC, on_client_loss="keep"), 2)
        request = CheckpointRequest(ulid=new_ulid())
        made = (await one._request("checkpoint", request, CheckpointReply)).checkpoint
        await box.crash("n1")
        await box.edge()
        assert (await one._request("checkpoint", request, CheckpointReply)).checkpoint == made
        with pytest.raises(Conflict):
            await two._request("checkpoint", request, CheckpointReply)
        assert len(await dsec.checkpoints()) == 1
        await dsec.drop_checkpoints([made.id])
        await dsec.stop(everything=True)


async def test_errors_are_typed_and_leave_nothing(box: Box) -> None:
    """Memory, unknown kinds, failing captures and ended sandboxes are refused by type; the sandbox runs on and nothing is kept."""
    faults = Faults()
    await box.edge(faults=faults)
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        with pytest.raises(Unsupported) as caught:
            await sb.checkpoint(kind="memory")
        assert (caught.value.reason, caught.value.field) == ("snapshot", "kind")
        with pytest.raises(InvalidRequest):
            await sb.checkpoint(kind="tape")
        faults.pack_fails = True
        with pytest.raises(NodeError):
            await sb.fork(2)
        assert (await sb.info()).state is State.RUNNING
        assert await dsec.checkpoints() == []
        with pytest.raises(InvalidRequest):
            await dsec.restore("nonsense")
        with pytest.raises(NotFound):
            await dsec.restore(f"n1-{new_ulid()}")
        await sb.stop()
        with pytest.raises(SandboxGone):
            await sb.checkpoint()
        assert len(await dsec.list()) == 0


async def test_a_full_node_is_an_error_for_each(box: Box) -> None:
    """Children that find no room on the parent's node each have their error; too few are none at all."""
    await box.edge(slots=3)
    await box.edge("n2")  # has room, and not the checkpoint
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        while not sb.id.startswith("n1-"):
            await sb.stop()
            sb = await dsec.create(SPEC)
        async with await sb.fork(4, timeout=2.0, min_ready=0) as children:
            assert len(children) <= 2
            assert len(children.results) == 4
            assert all(child.id.startswith("n1-") for child in children)
            assert all(isinstance(error, DeadlineExceeded) for _, error in children.failed)
        with pytest.raises(BurstError) as caught:
            await sb.fork(4, min_ready=4, timeout=2.0)
        assert caught.value.reason == "min_ready"
        await eventually(lambda: set(box.nodes["n1"].guests) == {sb.id.rpartition("-")[2]})
        await eventually(lambda: not box.nodes["n1"].packed)
        await sb.stop()


async def test_other_projects_do_not_see_it(box: Box) -> None:
    """A checkpoint belongs to its project: elsewhere it is neither listed, dropped nor begun from."""
    await box.edge()
    async with box.client() as mine, box.client(project="other") as theirs:
        sb = await mine.create(SPEC)
        cp = await sb.checkpoint()
        assert await theirs.checkpoints() == []
        assert isinstance((await theirs.drop_checkpoints([cp.id]))[0].error, NotFound)
        with pytest.raises(NotFound):
            await theirs.restore(cp, timeout=5)
        assert (await mine.checkpoints()) == [cp]
        await mine.drop_checkpoints([cp.id])
        await sb.stop()


async def test_an_edge_that_dies_in_the_middle_of_a_capture(box: Box) -> None:
    """The client asks again and gets one checkpoint; the sandbox runs on."""
    await box.edge(faults=Faults(pack_delay=30.0))
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.files.write("/root/a", b"1")
        asked = asyncio.create_task(sb.checkpoint("again"))
        ulid = sb.id.rpartition("-")[2]
        await eventually(lambda: box.edges["n1"].sandboxes[ulid].state is State.CAPTURING)
        await box.crash("n1")
        await box.edge()
        cp = await asked
        assert [row.id for row in await dsec.checkpoints()] == [cp.id]
        assert len(box.nodes["n1"].packed) == 1
        assert await read(sb) == "1"
        await dsec.drop_checkpoints([cp.id])
        await sb.stop()


async def test_a_fork_whose_client_died_expires(box: Box) -> None:
    """A capture that nobody let go of goes by itself when its time is over, and an Edge that ends in order frees what nothing stands on."""
    edge = await box.edge()
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb._request("checkpoint", CheckpointRequest(ulid=new_ulid(), keep_ms=1), CheckpointReply)
        await eventually(lambda: not edge.checkpoints.known and not box.nodes["n1"].packed)
        await sb._request("checkpoint", CheckpointRequest(ulid=new_ulid(), keep_ms=60_000), CheckpointReply)
        kept = await sb.checkpoint()
        await edge.checkpoints.sweep()
        assert len(edge.checkpoints.known) == 2
        loose = next(row for row in edge.checkpoints.known.values() if not row.kept)
        await edge.checkpoints.drop(loose)
        await sb.stop()
        await edge.checkpoints.sweep(last=True)
        assert list(edge.checkpoints.known) == [kept.id]
        assert len(box.nodes["n1"].packed) == 1


async def test_what_an_earlier_try_left_is_freed_or_stays_known(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture begins only when what a former one left under its name is gone; where that fails it is tried again."""
    edge = await box.edge()
    planner, free = edge.host.planners["fake"], type(edge.host.planners["fake"]).forget
    trouble: list[DsecError | None] = [NodeError("the disk is gone")]

    async def forget(name: str, prefix: str) -> bool:
        if trouble and trouble[0] is not None:
            raise trouble[0]
        return False if trouble else await free(planner, name, prefix)

    monkeypatch.setattr(planner, "forget", forget)
    async with box.client() as dsec:
        sandbox = edge.sandboxes[(await dsec.create(SPEC)).id.rpartition("-")[2]]
        request = CheckpointRequest(ulid=new_ulid(), name="again")
        left = f"{edge.checkpoints._prefix}{request.ulid}"
        edge.checkpoints._freeing[left] = planner
        with pytest.raises(NodeError):
            await edge.checkpoints.make(sandbox, request, None)
        trouble[0] = None  # it is still in use
        with pytest.raises(Busy):
            await edge.checkpoints.make(sandbox, request, None)
        assert left in edge.checkpoints._freeing
        trouble.clear()
        made = await edge.checkpoints.make(sandbox, request, None)
        assert left not in edge.checkpoints._freeing
        await edge.checkpoints.sweep()
        assert [row.id for row in await dsec.checkpoints()] == [made.id]
