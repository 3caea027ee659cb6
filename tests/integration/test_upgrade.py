"""Another version of the Edge takes over what one has left: records, holder, guests; what it cannot take over it refuses."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec.actors.store import MIGRATIONS, SqliteStore
from dsec.backends.guest import wire
from dsec.backends.guest.link import Link
from dsec.backends.holder_client import HolderClient, agree
from dsec.backends.holder_parts import PROTO, PROTO_MIN
from dsec.bus.server import NatsServer
from dsec.errors import Conflict, DsecError
from dsec.model import ExitReason, new_ulid
from libdsec import SandboxGone
from tests.integration.actors_box import SPEC, Box, eventually, serving


@pytest_asyncio.fixture
async def box(nats_server: NatsServer) -> AsyncIterator[Box]:
    async with serving(nats_server) as made:
        yield made


Table = dict[str, Any]


def rewrite(box: Box, change: Callable[[str, Table, Table], None], *statements: str) -> None:
    """Records and plans as another version would have written them; ``change`` gets each sandbox's as maps."""
    with sqlite3.connect(box.dir / "n1" / "edge.db") as db:
        for ulid, record, plan in db.execute("SELECT ulid, record, plan FROM sandbox").fetchall():
            maps = (msgspec.msgpack.decode(record), msgspec.msgpack.decode(plan))
            change(ulid, *maps)
            encoded = [msgspec.msgpack.encode(each) for each in maps]
            db.execute("UPDATE sandbox SET record = ?, plan = ? WHERE ulid = ?", (*encoded, ulid))
        for statement in statements:
            db.execute(statement)


async def test_records_of_the_version_before_are_taken_over(box: Box) -> None:
    """Its format of the database, records without what came since and with what is gone: the sandboxes are adopted, and a step that it
    recorded is answered."""
    async with box.client() as dsec:
        running, paused = await dsec.create_many(SPEC, 2)
        assert (await running.exec("echo once", step="s")).stdout == b"once\n"
        await paused.pause()
        await box.crash("n1")

        def older(_ulid: str, record: Table, _plan: Table) -> None:
            for name in ("stood_ms", "still_at", "paused", "degraded"):
                record.pop(name, None)
            record["still_ts"] = 1.0

        rewrite(box, older, "DROP TABLE checkpoint", "DROP TABLE event", "DELETE FROM meta WHERE key = 'boot'", "PRAGMA user_version=2")
        edge = await box.edge()
        assert len(edge.sandboxes) == 2
        assert (await running.exec("echo once", step="s")).stdout == b"once\n"
        assert (await paused.exec("echo up")).stdout == b"up\n"
        kids = await running.fork(1)
        assert not kids.failed


async def test_what_a_later_version_adds_is_no_obstacle(box: Box) -> None:
    """Within one format of the database an earlier version reads a later one's records."""
    async with box.client() as dsec:
        (running,) = await dsec.create_many(SPEC, 1)
        await box.crash("n1")

        def later(_ulid: str, record: Table, plan: Table) -> None:
            record["of_tomorrow"] = plan["of_tomorrow"] = {"a": [1, 2]}

        rewrite(box, later)
        await box.edge()
        assert (await running.exec("echo here")).stdout == b"here\n"


async def test_a_later_format_is_refused_and_left_alone(box: Box) -> None:
    """An Edge that meets the records of a later version says so and changes nothing: that version takes its sandboxes up again."""
    async with box.client() as dsec:
        (running,) = await dsec.create_many(SPEC, 1)
        await box.crash("n1")
        rewrite(box, lambda *_: None, f"PRAGMA user_version={len(MIGRATIONS) + 1}")
        before = (box.dir / "n1" / "edge.db").read_bytes()
        store = SqliteStore(box.dir / "n1")
        with pytest.raises(Conflict) as caught:
            await store.open()
        await store.close()
        assert (caught.value.reason, caught.value.field) == ("version", "edge.state_dir")
        assert "newer version" in str(caught.value)
        assert (box.dir / "n1" / "edge.db").read_bytes() == before
        assert len(box.nodes["n1"].guests) == 1
        rewrite(box, lambda *_: None, f"PRAGMA user_version={len(MIGRATIONS)}")
        await box.edge()
        assert (await running.exec("echo again")).stdout == b"again\n"


@pytest.mark.parametrize("what", ["record", "plan"])
async def test_an_unreadable_record_is_an_end_that_is_told(box: Box, what: str) -> None:
    """It does not keep the node from serving: its sandbox ends as `broken`, is told so, and is freed; the others are adopted."""
    async with box.client() as dsec:
        good, bad = await dsec.create_many(SPEC, 2)
        await box.crash("n1")
        with sqlite3.connect(box.dir / "n1" / "edge.db") as db:
            db.execute(f"UPDATE sandbox SET {what} = ? WHERE ulid = ?", (b"\xc1 half", bad._id.ulid))
        edge = await box.edge()
        assert (await good.exec("echo here")).stdout == b"here\n"
        assert set(box.nodes["n1"].guests) == set(edge.sandboxes) == {good._id.ulid}
        with pytest.raises(SandboxGone) as caught:
            await type(bad)(dsec, bad._id).exec("true")
        assert caught.value.reason == ExitReason.BROKEN
        await eventually(lambda: any(event.kind == "stopped" and event.sb == bad.id for event in box.events.events))
        told = [event for event in box.events.events if event.kind == "stopped" and event.sb == bad.id]
        assert [event.detail["reason"] for event in told] == ["broken"]
        await box.crash("n1")
        again = await box.edge()
        assert set(again.ended) == {bad._id.ulid}


def test_two_versions_agree_on_a_protocol_or_say_that_they_cannot() -> None:
    """An Edge speaks N and N-1 with a holder, which lives as long as its sandboxes."""
    assert agree(PROTO, PROTO_MIN) == PROTO
    assert agree(PROTO - 1, PROTO - 1) == PROTO - 1
    assert agree(PROTO + 1, PROTO) == PROTO
    for theirs, whose in (((PROTO_MIN - 1, PROTO_MIN - 1), "an older"), ((PROTO + 2, PROTO + 1), "a newer")):
        with pytest.raises(Conflict, match=whose) as caught:
            agree(*theirs)
        assert caught.value.reason == "version"
        assert "drain" in caught.value.fix


class OtherHolder:
    """A holder of another version: it answers `hello` as that one does."""

    def __init__(self, path: Path, **said: int) -> None:
        self._said = said
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(self._listener)
        with sock:
            while data := await loop.sock_recv(sock, 65536):
                answer = {"id": json.loads(data)["id"], "ok": {"pid": 1, "root": "/", "prefix": "/", "by_paths": False} | self._said}
                await loop.sock_sendall(sock, json.dumps(answer).encode())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()


@pytest.mark.parametrize(("said", "refused"), [({}, False), ({"proto": 9, "proto_min": 2}, False), ({"proto": 9, "proto_min": 9}, True)])
async def test_a_holder_of_another_version(state_dir: Path, said: dict[str, int], refused: bool) -> None:
    """One that says nothing of its protocol (it was started before there was a number) and a later one are spoken to where they can be."""
    path = state_dir / "holder"
    other = OtherHolder(path, **said)
    client = HolderClient(str(path), on_exit=lambda *_: None, on_lost=lambda: None)
    try:
        assert await client.connect()
        if refused:
            with pytest.raises(Conflict) as caught:
                await client.hello()
            assert caught.value.reason == "version"
        else:
            assert (await client.hello())["pid"] == 1
    finally:
        client.close()
        await other.close()


@pytest.mark.parametrize("proto", [wire.PROTO, wire.PROTO + 1])
async def test_a_guest_of_a_later_version(state_dir: Path, proto: int) -> None:
    """A guest that still speaks ours is used; one that does not says so, and the request ends with that."""
    path = state_dir / "guest"
    speaks_ours = proto == wire.PROTO

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length, _, request = wire.header(memoryview(await reader.readexactly(12)), 0)
        theirs, least, _, generation = wire.HELLO.unpack(await reader.readexactly(length))
        assert (theirs, least) == (wire.PROTO, wire.PROTO_MIN)
        if speaks_ours:
            writer.write(wire.frame(wire.Type.HELLO, request, wire.HELLO_REPLY.pack(wire.PROTO + 1, wire.PROTO, 0, generation, 1)))
            length, _, request = wire.header(memoryview(await reader.readexactly(12)), 0)
            writer.write(wire.frame(wire.Type.OPS, request, b"\0\0\0\0"))
        else:
            texts = b"".join(struct.pack("<I", len(text)) + text + b"\0" for text in (b"proto", b"this guest speaks protocol 2"))
            body = struct.pack("<HI", wire.Code.UNSUPPORTED, 0) + texts
            writer.write(wire.frame(wire.Type.ERROR, request, body))
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, str(path)):
        link = Link(str(path), generation=1, sandbox_id=f"t-{new_ulid()}")
        try:
            if speaks_ours:
                assert await link.ops() == ()
            else:
                with pytest.raises(DsecError, match="protocol 2"):
                    await link.ops()
        finally:
            await link.close()
