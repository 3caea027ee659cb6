"""The guest binary as a listener for the node: connections from inside that become operations."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.guest.link import Link
from dsec.errors import Conflict, InvalidRequest
from dsec.model import ExecSpec
from tests.system.aether_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")
DOOR = "0123456789abcdef" + "0" * 16
MOST = 32


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    state_dir.chmod(0o755)
    box = Box(state_dir)
    yield box
    await box.close()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listen(link: Link, port: int | str, op: str = DOOR) -> None:
    await link.start(op, ExecSpec(argv=("dsec:listen", "tcp", str(port)), service=True, background=True, head=0, tail=0))


class Guests:
    """Ids of connections as the listener tells them."""

    def __init__(self, link: Link, at: int = 0) -> None:
        self._output = link.output(DOOR, (at, 0))
        self._told = b""

    async def next(self, timeout: float = 10.0) -> str:
        while len(self._told) < 16:
            self._told += (await asyncio.wait_for(anext(self._output), timeout)).data
        found, self._told = self._told[:16].hex(), self._told[16:]
        return found

    async def close(self) -> None:
        await self._output.aclose()  # type: ignore[attr-defined]


async def test_a_connection_from_inside_is_an_operation(box: Box, port: int) -> None:
    """Its id is the listener's with a number; bytes go both ways, each side says its end, and many at one time do not mix."""
    link = box.link()
    await listen(link, port)
    guests = Guests(link)
    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
    ops = [await guests.next() for _ in ends]
    assert all(op.startswith(DOOR[:16]) for op in ops)
    assert len(set(ops)) == 20
    for number, (op, (reader, writer)) in enumerate(zip(ops, ends, strict=True)):
        writer.write(b"from %d\n" % number * 20_000)
        writer.write_eof()
        got = b""
        async for chunk in link.output(op):
            got += chunk.data
        assert got == b"from %d\n" % number * 20_000
        assert await link.input(op, 0, b"to %d" % number, eof=True) == len(b"to %d" % number)
        assert await reader.read() == b"to %d" % number
        writer.close()
    await guests.close()


async def test_so_many_at_one_time(box: Box, port: int) -> None:
    """More than 32 wait outside; when one ends the next is let in; commands go on meanwhile."""
    link = box.link()
    await listen(link, port)
    guests = Guests(link)
    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST + 3)]
    ops = [await guests.next() for _ in range(MOST)]
    with pytest.raises(TimeoutError):
        await guests.next(timeout=0.5)
    assert len([op for op in await link.ops() if op.running]) == MOST + 1
    await guests.close()
    guests = Guests(link, MOST * 16)
    await link.signal(ops[0], 9)
    await guests.next()
    ends[5][1].close()
    await link.input(ops[5], 0, b"", eof=True)
    await guests.next()
    await guests.close()
    for _, writer in ends:
        writer.close()


async def test_it_outlives_the_node_that_asked_for_it(box: Box, port: int) -> None:
    """A node that comes back finds the same listener: the same order starts none, and what came meanwhile is told from where it was."""
    first = box.link()
    await listen(first, port)
    await first.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    second = box.link(2)
    await listen(second, port)
    door = next(op for op in await second.ops() if op.op == DOOR)
    assert (door.running, door.stdout.total) == (True, 16)
    guests = Guests(second)
    op = await guests.next()
    await second.input(op, 0, b"served")
    assert await reader.readexactly(6) == b"served"
    await second.signal(DOOR, 9)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    writer.close()


async def test_only_a_free_port_of_its_own_loopback(box: Box, port: int) -> None:
    """A port that is taken is a conflict and leaves nothing; what is no port is refused; nothing listens beyond the loopback."""
    link = box.link()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(Conflict):
            await listen(link, port)
    for bad in ("0", "65536", "", "x", "-1"):
        with pytest.raises(InvalidRequest):
            await listen(link, bad)
    assert await link.ops() == ()
    await listen(link, port)
    with pytest.raises(Conflict):
        await listen(link, port, "f" * 32)
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # free there: it is not every address


@pytest.mark.slow
async def test_whom_nobody_serves_is_let_go(box: Box, port: int) -> None:
    """A connection without a reader on the node's side ends after ten seconds; the listener, which has none either, stays."""
    link = box.link()
    await listen(link, port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    await asyncio.sleep(1)
    assert [op.op for op in await link.ops() if op.running] == [DOOR]
    writer.close()
