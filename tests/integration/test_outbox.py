"""Events of an Edge that died before it could tell them: the next one does, under the same number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.backends.base import PackOrder
from dsec.bus.messages import Event
from dsec.bus.server import NatsServer
from dsec.errors import NodeError
from dsec.model import new_ulid
from tests.integration.actors_box import SPEC, Box, Feed, eventually


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    await made.edge(unclaimed_ms=300)
    await made.watcher()
    await made.scheduler()
    yield made
    await made.close()


def told(box: Box, sandbox: str) -> list[tuple[str, str, int]]:
    return [(event.kind, event.incarnation, event.n) for event in box.events.events if event.sb == sandbox]


async def test_what_was_done_and_not_told_is_told_by_the_next_edge(box: Box) -> None:
    """Created, running, a step, paused, stopped: each once, in order, though the stream has taken none of them before the crash."""
    async with box.client() as dsec:
        edge = box.edges["n1"]
        feed = edge.outbox._sink
        assert isinstance(feed, Feed)
        lost: list[Event] = []
        feed.post = lambda *events: lost.extend(events)  # type: ignore[method-assign] - on its way, and dies with the process
        sb = await dsec.create(SPEC)
        await sb.exec("echo x", step="s")
        await sb.pause()
        await eventually(lambda: lost and lost[-1].kind == "paused")
        await sb.stop()
        await eventually(lambda: lost[-1].kind == "stopped")
        await asyncio.sleep(0.2)  # sweeps come and go: what is not told is not forgotten
        await box.crash("n1")
        assert not told(box, sb.id)
        again = await box.edge()
        await eventually(lambda: len(told(box, sb.id)) == 5)
        assert told(box, sb.id) == [(event.kind, event.incarnation, event.n) for event in lost if event.sb == sb.id]
        assert [kind for kind, _, _ in told(box, sb.id)] == ["created", "running", "step", "paused", "stopped"]
        new = await dsec.create(SPEC)
        await eventually(lambda: len(told(box, new.id)) == 2)
        assert {incarnation for _, incarnation, _ in told(box, new.id)} == {again.store.incarnation}
        await new.stop()


async def test_what_is_told_is_forgotten(box: Box) -> None:
    """The table of events empties, and a restart tells nothing twice."""
    async with box.client() as dsec:
        sb = await dsec.create(SPEC)
        await sb.stop()
        await eventually(lambda: len(told(box, sb.id)) == 3)
        edge = box.edges["n1"]
        async with asyncio.timeout(20):
            while await edge.store.untold():  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0.05)
        await box.crash("n1")
        await box.edge()
        assert len(told(box, sb.id)) == 3


async def test_one_that_is_given_up_while_it_is_recorded_is_told_in_order(box: Box) -> None:
    """Its creation comes before its end, by number: a cancelled create that its Edge had begun to write down."""
    async with box.client(lease_ttl=1.0) as dsec:
        for moment in range(20):
            task = asyncio.create_task(dsec.create(SPEC))
            await asyncio.sleep(moment * 0.001)
            task.cancel()
            made = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(made, BaseException):
                await made.stop()
        await eventually(lambda: not box.edges["n1"].sandboxes)
        await asyncio.sleep(0.2)
    for sandbox in {event.sb for event in box.events.events if event.sb}:
        kinds = [kind for kind, _, _ in sorted(told(box, sandbox), key=lambda each: each[2])]
        assert kinds[0] == "created"
        assert kinds.count("stopped") <= 1


async def test_what_could_not_be_written_is_not_told(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture whose record the disk refuses has not happened: no event says so, and none waits for it to be told."""
    async with box.client() as dsec:
        edge = box.edges["n1"]
        sb = await dsec.create(SPEC)
        sandbox = edge.sandboxes[sb._id.ulid]
        await eventually(lambda: len(told(box, sb.id)) == 2)

        async def full(*_: object) -> None:
            raise NodeError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(edge.store, "update", full)
            with pytest.raises(NodeError, match="the disk is full"):
                await sandbox.pack_diff(new_ulid(), PackOrder(name="packed/x"))
        assert sandbox.telling is None
        await eventually(lambda: not edge.outbox._open)
        await sb.stop()
        await eventually(lambda: [kind for kind, _, _ in told(box, sb.id)][-1] == "stopped")
        assert "packed" not in [kind for kind, _, _ in told(box, sb.id)]
