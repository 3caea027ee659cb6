"""Services of the real guest binary: what runs instead of a command, its frames taken apart, and root inside against it."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.guest.link import Link
from dsec.errors import Conflict, DsecError, InvalidRequest, NotFound, SandboxError
from dsec.model import ExecSpec, OpStatus
from tests.system.aether_box import Box, new_op, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    state_dir.chmod(0o755)
    box = Box(state_dir)
    yield box
    await box.close()


@pytest.fixture
def link(box: Box) -> Link:
    return box.link()


async def begin(link: Link, *argv: str, user: str = "") -> str:
    op = new_op()
    await link.start(op, ExecSpec(argv=argv, service=True, stdin=True, background=True, stream=True, head=0, tail=0, user=user))
    return op


async def read(link: Link, op: str) -> tuple[bytes, bytes]:
    out = [b"", b""]
    async for chunk in link.output(op):
        assert chunk.offset == len(out[chunk.stream - 1])
        out[chunk.stream - 1] += chunk.data
    return out[0], out[1]


async def ended(link: Link, op: str, seconds: float = 10) -> OpStatus:
    status = await link.wait(op, seconds)
    assert not status.running
    return status


async def listening() -> tuple[asyncio.Server, int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=600)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("/bin/sh", "-c", "echo"), InvalidRequest),
        (("dsec:connect", "tcp", "0"), InvalidRequest),
        (("dsec:connect", "tcp", "65536"), InvalidRequest),
        (("dsec:connect", "tcp", "80x"), InvalidRequest),
        (("dsec:connect", "tcp", ""), InvalidRequest),
        (("dsec:connect", "tcp"), InvalidRequest),
        (("dsec:connect", "tcp", "1", "2"), InvalidRequest),
        (("dsec:connect", "tcp", "99999999999999999999"), InvalidRequest),
        (("dsec:connect", "tcp", "1"), SandboxError),
    ],
)
async def test_what_cannot_start_is_told(link: Link, argv: tuple[str, ...], error: type[DsecError]) -> None:
    """A service that is none, a port that is none, nobody at the port: a typed error and no operation (or one that fails)."""
    with pytest.raises(error):
        await begin(link, *argv)
    assert await link.ops() == ()


async def test_a_service_that_is_none_fails(link: Link) -> None:
    """It starts as a service and says so."""
    op = await begin(link, "dsec:nothing")
    assert (await ended(link, op)).exit_code == 1


async def test_a_service_without_its_flag_is_no_program(link: Link) -> None:
    """The names mean nothing to a command."""
    with pytest.raises(NotFound):
        await run(link, "dsec:pack", "", "", "/etc")
    with pytest.raises(NotFound):
        await begin(link, "dsec:watch", "/tmp", "", user="no-such-user")


async def test_a_connection_needs_no_process_and_little_memory(box: Box, link: Link) -> None:
    """Two hundred at once: no process, and after their end the agent is as small as before."""
    server, port = await listening()
    async with server:
        before = box.rss()
        ops = [await begin(link, "dsec:connect", "tcp", str(port)) for _ in range(200)]
        assert box.processes() == []
        for op in ops:
            await link.input(op, 0, b"x" * 1000)
        for op in ops:
            await link.input(op, 1000, b"", eof=True)
        for op in ops:
            assert await read(link, op) == (b"x" * 1000, b"")
            assert (await ended(link, op)).exit_code == 0
        await asyncio.sleep(3.5)
        await link.ops()
        assert box.rss() < before + (300 << 10)


async def test_many_connections_do_not_displace_results(link: Link) -> None:
    """The result of a command is still there after four hundred connections."""
    kept = new_op()
    await link.start(kept, ExecSpec(argv=("/bin/echo", "kept")))
    await link.wait(kept, 5)
    server, port = await listening()
    async with server:
        for _ in range(400):
            op = await begin(link, "dsec:connect", "tcp", str(port))
            await link.input(op, 0, b"", eof=True)
            await read(link, op)
        assert (await link.wait(kept, 1)).stdout.data() == b"kept\n"
        assert len(await link.ops()) <= 256


async def test_a_signal_ends_any_service(box: Box, link: Link, state_dir: Path) -> None:
    """Also one that waits for input, for a change, or for the far side."""
    server, port = await listening()
    async with server:
        for argv in (("dsec:unpack", str(state_dir), ""), ("dsec:watch", str(state_dir), "r"), ("dsec:connect", "tcp", str(port))):
            op = await begin(link, *argv)
            await link.signal(op, 9)
            status = await ended(link, op)
            assert status.signal == 9, argv
            with pytest.raises(Conflict):
                await link.input(op, 0, b"x")
    assert box.alive("aether") == []


async def test_a_service_without_a_reader_is_ended(box: Box, link: Link, state_dir: Path) -> None:
    """Ten seconds after its reader left (here: never came), whatever it waits for."""
    op = await begin(link, "dsec:watch", str(state_dir), "")
    assert len(box.processes()) == 1
    assert (await ended(link, op, 14)).signal == 9
    assert box.alive("aether") == []


async def test_root_inside_kills_a_service(box: Box, link: Link, state_dir: Path) -> None:
    """It counts as killed, and nothing else is harmed."""
    op = await begin(link, "dsec:watch", str(state_dir), "")
    assert (await run(link, "/bin/sh", "-c", "kill -9 -1; true", seconds=5)) is not None
    assert (await ended(link, op)).signal == 9
    assert (await run(link, "/bin/echo", "well")).stdout.data() == b"well\n"


async def test_root_inside_cannot_look_into_a_service(box: Box, link: Link, state_dir: Path) -> None:
    """Its memory and its descriptors are those of the agent: not readable, not traceable."""
    await begin(link, "dsec:watch", str(state_dir), "")
    code = "for p in /proc/[0-9]*; do grep -q aether-serv $p/comm && { cat $p/environ; cat $p/fd/3; head -c 1 $p/mem; }; done 2>&1"
    said = (await run(link, "/bin/sh", "-c", code)).stdout.data().decode()
    assert said.lower().count("permission denied") == 3, said


async def test_packing_what_changes_meanwhile(link: Link, state_dir: Path) -> None:
    """A tree in which files appear, vanish and shrink while it is packed is still one whole archive."""
    tree = state_dir / "tree"
    tree.mkdir()
    for n in range(300):
        (tree / f"f{n}").write_bytes(bytes(20_000))
    stop = False

    async def disturb() -> None:
        n = 0
        while not stop:
            (tree / f"f{n % 300}").unlink(missing_ok=True)
            (tree / f"g{n}").write_bytes(bytes(n % 50_000))
            os.truncate(tree / f"g{n}", n % 1000)
            n += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(disturb())
    for _ in range(3):
        op = await begin(link, "dsec:pack", "t", "", str(tree))
        out, said = await read(link, op)
        assert (await ended(link, op)).exit_code == 0, said
        with tarfile.open(fileobj=io.BytesIO(out)) as archive:
            for member in archive:
                if member.isreg():
                    content = archive.extractfile(member)
                    assert content is not None
                    assert len(content.read()) == member.size
    stop = True
    await task


async def test_a_deep_tree_is_bounded(link: Link, state_dir: Path) -> None:
    """What lies deeper than 400 levels is left out with a note; nothing crashes."""
    tree = state_dir / "deep"
    tree.mkdir()
    at = os.open(tree, os.O_RDONLY)
    for _ in range(500):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    op = await begin(link, "dsec:pack", ".", "", str(tree))
    out, said = await read(link, op)
    assert (await ended(link, op)).exit_code == 0
    assert b"too deep" in said
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert len(archive.getmembers()) == 400
    await run(link, "/bin/rm", "-rf", str(tree))


async def test_input_beyond_the_pipe_arrives_once(link: Link, state_dir: Path) -> None:
    """Pieces larger than the pipe, repeated offsets and an early end of file change nothing of what arrives."""
    data = os.urandom(3_000_000)
    info = tarfile.TarInfo("f")
    info.size = len(data)
    archive = info.tobuf() + data + bytes(-len(data) % 512) + bytes(1024)
    op = await begin(link, "dsec:unpack", str(state_dir / "new/target"), "")
    at = 0
    while at < len(archive):
        sent = await link.input(op, at, archive[at : at + 262_144])
        again = max(0, at - 1000)
        assert await link.input(op, again, archive[again:at] or archive[:1]) >= at
        at = sent
    await link.input(op, len(archive), b"", eof=True)
    out, said = await read(link, op)
    assert (out, said) == (b"1 3000000", b"")
    assert (state_dir / "new/target/f").read_bytes() == data
