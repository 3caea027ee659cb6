"""A node whose disk takes nothing for a while: what is told says so, and all of it is there once the disk takes something again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.actors import store as stores
from dsec.actors.edge import Edge
from dsec.actors.store import SqliteStore
from dsec.actors.up import Child
from dsec.backends.fake import FakeInstance
from dsec.backends.guest.channel import open_channel
from dsec.bus.bus import Bus
from dsec.bus.events import EventPublisher
from dsec.bus.events import events as read_events
from dsec.bus.server import NatsServer
from dsec.bus.spool import Spool
from dsec.bus.streams import EVENTS_STREAM, Record, ask, ensure_events_stream
from dsec.config import Config, EdgeConfig
from dsec.errors import DeadlineExceeded, NodeError, SandboxGone, Unavailable
from tests.integration.actors_box import SPEC, Box, eventually
from tests.integration.test_bus_events import Source


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    made = Box(nats_server.url, nats_server.dir.parent)
    yield made
    await made.close()


class Disk:
    """Of one Edge: while it is ``full`` no transaction is committed."""

    def __init__(self, edge: Edge, patch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.refused = 0
        commit = edge.store._commit  # type: ignore[attr-defined]

        def perhaps(db: Any, loop: asyncio.AbstractEventLoop, batch: list[Any]) -> None:
            if not self.full:
                commit(db, loop, batch)
                return
            self.refused += len(batch)
            for _, future, _ in batch:
                stores._tell(loop, future, error=NodeError("record not written: database or disk is full", reason="store"))

        patch.setattr(edge.store, "_commit", perhaps)


async def test_a_stop_says_why_its_end_is_not_told(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox is freed at once; who waits for its end hears that the disk is full, and its end is on disk soon after it is not."""
    edge = await box.edge()
    await box.scheduler()
    disk = Disk(edge, monkeypatch)
    async with box.client() as dsec:
        sandbox = await dsec.create(SPEC)
        mine = edge.sandboxes[sandbox.id.rpartition("-")[2]]
        disk.full = True
        stopping = asyncio.ensure_future(sandbox.stop())
        await eventually(lambda: mine.life.release_error != "")
        assert not box.nodes["n1"].guests
        assert "its end is not on disk" in (await sandbox.info()).stuck
        with pytest.raises(DeadlineExceeded, match="is full"):
            await mine.stop(deadline=asyncio.get_running_loop().time())
        disk.full = False
        await stopping
        assert not edge.sandboxes
        assert [event.kind for event in box.events.events if event.sb == sandbox.id] == ["created", "running", "stopped"]


async def test_what_has_happened_is_told_though_it_is_not_on_disk(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause and a resume need no disk: their events do not go with the rows that could not be written."""
    edge = await box.edge()
    await box.scheduler()
    disk = Disk(edge, monkeypatch)
    async with box.client() as dsec:
        sandbox = await dsec.create(SPEC)
        disk.full = True
        await sandbox.pause()
        await sandbox.resume()
        await eventually(lambda: [event.kind for event in box.events.events][-2:] == ["paused", "resumed"])
        disk.full = False
        await sandbox.stop()


async def test_commands_of_that_time_are_in_the_log(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run, and are written down once that can be done; a step that was refused has not run."""
    edge = await box.edge()
    await box.scheduler()
    disk = Disk(edge, monkeypatch)
    async with box.client() as dsec:
        sandbox = await dsec.create(SPEC)
        disk.full = True
        for number in range(3):
            assert (await sandbox.exec(f"echo {number}")).exit_code == 0
        with pytest.raises(NodeError, match="is full"):
            await sandbox.exec("echo step", step="one")
        await eventually(lambda: disk.refused >= 4)
        disk.full = False
        assert (await sandbox.exec("echo step", step="one")).stdout.text == "step\n"
        told = [command.argv[-1] for command in await sandbox.commands()]
        assert told == ["echo 0", "echo 1", "echo 2", "echo step"]
        await sandbox.stop()


async def test_a_spool_that_cannot_be_read_or_emptied_ends_no_publisher(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that became read-only: events wait, and all of them go out when it is writable again."""
    async with Bus.connect(nats_server.url) as bus, EventPublisher(bus, "n1", tmp_path, ack_timeout=0.5) as publisher:
        source = Source()
        publisher.post(source.event())  # nobody takes it: there is no stream yet
        await eventually(lambda: publisher.spooled > 0)
        with monkeypatch.context() as patch:
            refused = asyncio.Event()

            async def read_only(*_: Any) -> None:
                refused.set()
                raise OSError(30, "Read-only file system")

            for step in ("_append", "_drop_head", "_read"):
                patch.setattr(Spool, step, read_only)
            publisher.post(source.event())
            await refused.wait()
            await ensure_events_stream(bus)
            publisher.post(source.event())
        await publisher.drained(20)
        assert {event.n async for event in read_events(bus, since="all", follow=False)} == {1, 2, 3}


async def test_what_neither_stream_nor_disk_takes_is_bounded(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in memory up to the spool's bound; beyond that the oldest go, and are counted."""
    async with Bus.connect(nats_server.url) as bus:
        publisher = EventPublisher(bus, "n1", tmp_path, spool_limit=1000)
        publisher._spool = await Spool.open(tmp_path)

        async def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        async def at_once(_: float) -> None:
            return None

        monkeypatch.setattr(Spool, "append", full)
        monkeypatch.setattr("dsec.bus.events.asyncio.sleep", at_once)
        records = [Record(str(number), "subject", bytes(100)) for number in range(25)]
        for record in records:
            waiting, publisher._failed = publisher._failed, []
            await publisher._store([*waiting, record])
        assert publisher.lost == 15
        assert sorted(int(record.id) for record in publisher._failed) == list(range(15, 25))


async def test_a_step_whose_end_cannot_be_asked_for_is_asked_for_again(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while an Edge waits for a step's end (it has no descriptor left): who waits is told, and the next one who asks
    gets the result of the one run."""
    edge = await box.edge()
    await box.scheduler()
    async with box.client() as dsec:
        sandbox = await dsec.create(SPEC)
        mine = edge.sandboxes[sandbox.id.rpartition("-")[2]]
        with monkeypatch.context() as patch:

            async def none_left(*_: Any) -> None:
                raise OSError(24, "Too many open files")

            patch.setattr(mine, "outcome", none_left)
            with pytest.raises(NodeError, match="Too many open files"):
                await sandbox.exec("echo once", step="one")
        assert (await sandbox.exec("echo once", step="one")).stdout.text == "once\n"
        assert [command.seq for command in await sandbox.commands()] == [1]
        await sandbox.stop()


async def test_a_checkpoint_that_cannot_be_recorded_keeps_no_name(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up after its layer is there: the layer goes again, by itself."""
    edge = await box.edge()
    await box.scheduler()
    disk = Disk(edge, monkeypatch)
    async with box.client() as dsec:
        sandbox = await dsec.create(SPEC)
        pack = FakeInstance.pack_diff

        async def and_then_full(*order: Any) -> Any:
            packed = await pack(*order)
            disk.full = True
            return packed

        monkeypatch.setattr(FakeInstance, "pack_diff", and_then_full)
        with pytest.raises(NodeError, match="is full"):
            await sandbox.checkpoint()
        disk.full = False
        (name,) = edge.checkpoints._freeing
        await eventually(lambda: name not in edge.checkpoints._freeing)
        assert not await dsec.checkpoints()
        await sandbox.stop()


async def test_a_node_without_descriptors_is_the_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """And may be tried again; it says nothing of the sandbox."""

    def none_left(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("dsec.backends.guest.channel.socket.socket", none_left)
    with pytest.raises(NodeError, match="Too many open files") as caught:
        await open_channel("/nowhere", 1, None, "n-1", lambda _: None)
    assert (caught.value.reason, caught.value.retryable) == ("descriptors", True)


async def test_a_stream_that_was_lost_is_made_anew(nats_server: NatsServer, tmp_path: Path) -> None:
    """JetStream came back without what it had stored: what waits for the stream goes to a new one."""
    async with Bus.connect(nats_server.url) as bus, EventPublisher(bus, "n1", tmp_path, ack_timeout=0.5) as publisher:
        publisher.ensure = functools.partial(ensure_events_stream, bus)
        await ensure_events_stream(bus)
        source = Source()
        publisher.post(source.event())
        await publisher.drained(20)
        await ask(bus, f"STREAM.DELETE.{EVENTS_STREAM}")
        publisher.post(source.event())
        await publisher.drained(20)
        assert [event.n async for event in read_events(bus, since="all", follow=False)] == [2]


async def test_a_sandbox_whose_socket_is_gone_has_not_ended(box: Box) -> None:
    """A state directory that vanished: what is asked of its sandboxes may be asked again, and is answered when it is back."""
    edge = await box.edge()
    await box.scheduler()
    async with box.client() as dsec:
        sandbox = await dsec.create(SPEC)
        mine = edge.sandboxes[sandbox.id.rpartition("-")[2]]
        with pytest.raises(Unavailable, match="has not ended") as caught:
            async with mine.in_use():
                raise SandboxGone("nobody listens in the sandbox any more", sandbox=sandbox.id, reason="exited")
        assert (caught.value.reason, caught.value.retryable) == ("agent_unreachable", True)
        assert (await sandbox.exec("echo here")).stdout.text == "here\n"
        await sandbox.stop()


async def test_an_actor_that_cannot_start_says_why_without_a_log(tmp_path: Path) -> None:
    """Its log takes nothing, and its configuration is what it was: the error is the actor's own."""
    (tmp_path / "n1.log").symlink_to("/dev/full")
    held = SqliteStore(tmp_path / "n1")
    await held.open()
    config = Config(edge=EdgeConfig(name="n1", state_dir=str(tmp_path / "n1"), backends=("fake",)))
    child = Child("edge", "n1", config, tmp_path)
    with pytest.raises(NodeError, match="another Edge holds this state directory"):
        await child.start()
    before = child.config_path.read_text()
    child.config_path.with_suffix(".new").symlink_to("/dev/full")
    child.config = Config()
    with pytest.raises(NodeError, match="No space left on device") as caught:
        await child.start()
    assert (caught.value.reason, child.config_path.read_text()) == ("disk", before)
    await held.close()


async def test_an_actor_whose_place_is_no_directory_says_so_in_a_line(tmp_path: Path) -> None:
    """What the disk says, and no traceback."""
    (tmp_path / "n1").write_text("")
    config = Config(edge=EdgeConfig(name="n1", state_dir=str(tmp_path / "n1" / "below"), backends=("fake",)))
    with pytest.raises(NodeError, match="Not a directory") as caught:
        await Child("edge", "n1", config, tmp_path).start()
    assert "Traceback" not in str(caught.value)
