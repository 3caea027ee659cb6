"""Creates go ahead of their records: launched while these are written, told once they are, found again or gone whatever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.actors.edge import Edge
from dsec.actors.store import SqliteStore
from dsec.backends.fake import Faults
from dsec.bus.messages import LaunchItem, LaunchRequest
from dsec.bus.server import NatsServer
from dsec.errors import DeadlineExceeded, NodeError
from dsec.model import State, new_ulid
from tests.integration.actors_box import SPEC, Asker, Box, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


async def rewrite(edge: Edge, state: State) -> None:
    """The records of a dead Edge as if it had died before it had written how they went on."""
    store = SqliteStore(edge.config.state_dir)
    for record in await store.open():
        record.state = state
        await store.update(record)
    await store.close()


@pytest.mark.parametrize("state", [State.PENDING, State.CREATING])
async def test_what_was_told_and_not_yet_written_is_adopted(box: Box, state: State) -> None:
    """An Edge that dies after it told that they run, and before that was on disk: the next one finds them running, one of them paused."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        handles = await dsec.create_many(SPEC, 3)
        await handles[0].pause()
        await box.crash("n1")
        await rewrite(edge, state)
        edge = await box.edge()
        assert [sandbox.state for sandbox in edge.sandboxes.values()].count(State.RUNNING) == 2
        assert (await handles[0].info()).state is State.PAUSED
        for sandbox in handles:
            assert (await sandbox.exec("echo here")).stdout == b"here\n"


async def test_what_had_not_begun_is_no_sandbox(box: Box) -> None:
    """A record without a living sandbox has failed, as before."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        (handle,) = await dsec.create_many(SPEC, 1)
        ulid = handle.id.rpartition("-")[2]
        await box.crash("n1")
        await rewrite(edge, State.PENDING)
        box.nodes["n1"].guests.clear()
        edge = await box.edge()
        await eventually(lambda: ulid in edge.ended)
        how = edge.ended[ulid][0].exit
        assert how is not None
        assert how.reason == "launch_failed"


async def test_one_whose_agent_does_not_answer_is_ended(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Being alive is not enough for one that was being started: its agent must answer."""
    edge = await box.edge()
    await box.watcher()
    await box.scheduler()
    async with box.client() as dsec:
        await dsec.create_many(SPEC, 1)
        await box.crash("n1")
        await rewrite(edge, State.PENDING)

        async def silent(_: object) -> None:
            raise NodeError("it does not answer")

        monkeypatch.setattr("dsec.backends.fake_guest.FakeLink.ops", silent)
        edge = await box.edge()
        await eventually(lambda: not edge.sandboxes)
        assert not box.nodes["n1"].guests


async def test_nobody_is_told_before_the_record_is_on_disk(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, and its caller hears of nothing until then."""
    edge = await box.edge()
    await box.scheduler()
    written = asyncio.Event()
    insert = edge.store.insert

    async def late(*change: Any) -> None:
        await written.wait()
        await insert(*change)

    monkeypatch.setattr(edge.store, "insert", late)
    asker = await Asker(await box.bus()).open()
    await asker.create(2)
    await eventually(lambda: len(box.nodes["n1"].guests) == 2)
    await asyncio.sleep(0.1)
    assert not asker.accepted
    assert not asker.ready
    written.set()
    await asker.until(lambda a: len(a.ready) == 2)
    assert len(asker.accepted) == 2


async def test_what_cannot_be_recorded_is_undone(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: whatever was launched meanwhile is ended, nothing is held, and the next creates wait for their records until one
    could be written."""
    edge = await box.edge(faults=Faults(launch_delay=0.02))
    insert = edge.store.insert
    full = True
    launched_early = 0

    async def sometimes(*change: Any) -> None:
        nonlocal launched_early
        await asyncio.sleep(0.05)
        launched_early += len(box.nodes["n1"].guests)
        if full:
            raise NodeError("record not written: no space left", reason="store")
        await insert(*change)

    monkeypatch.setattr(edge.store, "insert", sometimes)

    def request() -> LaunchRequest:
        items = tuple(LaunchItem(index=number, spec=0) for number in range(12))  # more than are started at once
        return LaunchRequest(
            burst=new_ulid(), principal="local", project="default", specs=(SPEC,), items=items, inbox="_INBOX.nobody.x", deadline_ms=60_000
        )

    for _ in range(3):
        with pytest.raises(NodeError, match="no space"):
            await edge.intake.launch(request())
        await eventually(lambda: not edge.sandboxes)
        assert not edge.ledger.held
        assert not edge.ended
        assert not edge.requests
        assert not box.nodes["n1"].guests
        assert not edge.intake.inboxes
    assert launched_early == edge.ledger.limits.starting  # by the first request only
    full = False
    reply = await edge.intake.launch(msgspec.structs.replace(request()))
    assert len(reply.accepted) == 12
    await eventually(lambda: all(sandbox.state is State.RUNNING for sandbox in edge.sandboxes.values()))
    assert max(sandbox.slot for sandbox in edge.sandboxes.values()) == 11  # every slot was given back
    assert edge.intake._ahead


async def test_a_full_disk_is_told_as_what_it_is(box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Asked again until the deadline, and then nothing is asked any more: the caller gets the node's words. None is ended twice."""
    edge = await box.edge()
    await box.watcher()
    scheduler = await box.scheduler()

    async def never(*_: Any) -> None:
        raise NodeError("record not written: no space left", reason="store")

    monkeypatch.setattr(edge.store, "insert", never)
    monkeypatch.setattr(scheduler.picture, "forget", lambda _: None)  # it is asked at each turn, also at the last one
    async with box.client() as dsec:
        with pytest.raises(DeadlineExceeded, match="no space left"):
            await dsec.create(SPEC, timeout=3)
    await eventually(lambda: not edge.sandboxes)
    assert "task_failed" not in caplog.text
