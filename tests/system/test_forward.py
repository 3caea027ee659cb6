"""Connections from here to what listens inside containers whose network is closed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dsec.actors.up import Cluster
from libdsec import Busy, Client, InvalidRequest, NotFound, Sandbox, SandboxError, SandboxGone
from tests.system.small_cluster import ROOMY, client, cluster, sandbox

__all__ = ["client", "cluster", "sandbox"]
pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]

# One server for all: 7000 echoes and closes its side after ours, 7001 speaks first and ends its side at once but goes on reading, 7002 is
# an upgrade as WebSocket has it, 7003 listens on ::1 only, 7004 never reads, 7005 resets; /tmp/sock echoes too.
SERVER = """
import base64, hashlib, os, socket, struct, threading, time
def echo(c):
    while data := c.recv(65536):
        c.sendall(data)
    c.shutdown(socket.SHUT_WR)
    c.close()
def first(c):
    c.sendall(b"first")
    c.shutdown(socket.SHUT_WR)
    data = b""
    while piece := c.recv(65536):
        data += piece
    open("/tmp/first", "wb").write(data)
    c.close()
def upgrade(c):
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += c.recv(4096)
    key = [line.split(b": ")[1] for line in head.split(b"\\r\\n") if line.lower().startswith(b"sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + accept]
    c.sendall(b"\\r\\n".join([*lines, b"", b""]))
    for n in range(3):
        frame = c.recv(6)
        size = frame[1] & 127
        mask = frame[2:6]
        text = bytes(b ^ mask[i % 4] for i, b in enumerate(c.recv(size)))
        c.sendall(bytes((0x81, size)) + text[::-1])
    c.close()
def silent(c):
    time.sleep(1000)
def reset(c):
    c.recv(1)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    c.close()
def serve(s, what):
    while True:
        c, _ = s.accept()
        threading.Thread(target=what, args=(c,), daemon=True).start()
unix = socket.socket(socket.AF_UNIX)
unix.bind("/tmp/sock")
unix.listen(50)
threading.stack_size(256 * 1024)
for s, what in [
    (socket.create_server(("127.0.0.1", 7000), backlog=300), echo),
    (socket.create_server(("0.0.0.0", 7001), backlog=300), first),
    (socket.create_server(("127.0.0.1", 7002)), upgrade),
    (socket.create_server(("::1", 7003), family=socket.AF_INET6), echo),
    (socket.create_server(("127.0.0.1", 7004)), silent),
    (socket.create_server(("127.0.0.1", 7005)), reset),
    (unix, echo),
]:
    threading.Thread(target=serve, args=(s, what), daemon=True).start()
print("ready", flush=True)
time.sleep(10000)
"""


@contextlib.asynccontextmanager
async def serving(sandbox: Sandbox) -> AsyncIterator[None]:
    await sandbox.files.write("/tmp/server.py", SERVER)
    async with sandbox.start(["python3", "/tmp/server.py"]) as process:
        async for event in process:
            assert event.text == "ready\n", event.text
            break
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(cluster: Cluster) -> AsyncIterator[Sandbox]:
    import libdsec

    async with libdsec.connect(cluster.url) as client, client.sandbox("small", **ROOMY) as sandbox, serving(sandbox):
        yield sandbox
        assert await connections(sandbox) == []


async def connections(sandbox: Sandbox) -> list[str]:
    """Connections that the sandbox still has: operations without a process that run."""
    return [op.op for op in await sandbox.ops() if op.running and op.pid == 0]


async def test_http_through_a_closed_network(served: Sandbox) -> None:
    """Any HTTP client works on the local address; a body of 64 MiB streams and is whole."""
    code = "import hashlib; f = open('/tmp/body', 'wb'); b = bytes(range(256)) * 4096; [f.write(b) for _ in range(64)]"
    await served.exec(["python3", "-c", code], check=True)
    async with served.start(["python3", "-m", "http.server", "8000", "--directory", "/tmp"]), served.expose(8000) as address:
        assert address.url == f"http://127.0.0.1:{address.port}"

        def fetch() -> str:
            for _ in range(50):
                try:
                    with urllib.request.urlopen(f"{address.url}/body", timeout=20) as answer:
                        return hashlib.sha256(answer.read()).hexdigest()
                except OSError:
                    time.sleep(0.1)  # it does not listen yet: refused as inside
            raise AssertionError("it never listened")

        assert await asyncio.to_thread(fetch) == hashlib.sha256(bytes(range(256)) * 4096 * 64).hexdigest()


async def test_a_protocol_upgrade(served: Sandbox) -> None:
    """A WebSocket handshake and frames both ways."""
    key = base64.b64encode(os.urandom(16))
    async with served.expose(7002) as address, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*address)
        head = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: " + key + b"\r\n\r\n"
        writer.write(head)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in answer
        assert base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()) in answer
        for word in (b"abc", b"hello", b"x"):
            writer.write(bytes((0x81, 0x80 | len(word), 0, 0, 0, 0)) + word)
            assert await reader.readexactly(2 + len(word)) == bytes((0x81, len(word))) + word[::-1]
        assert await reader.read() == b""
        writer.close()


async def test_a_hundred_connections_at_once(served: Sandbox) -> None:
    """Each gets its own bytes back, all within seconds, and none is left."""
    async with served.expose(7000) as address, asyncio.timeout(30):
        pairs = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(100)))

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = os.urandom(20_000)
            for at in range(0, len(data), 5000):
                writer.write(data[at : at + 5000])
                await asyncio.sleep(0)
            assert await reader.readexactly(len(data)) == data
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()

        await asyncio.gather(*(speak(*pair) for pair in pairs))
    assert await connections(served) == []


async def test_either_side_may_end_first(served: Sandbox) -> None:
    """Half-close passes both ways: the far end's while we go on writing, ours while it goes on answering."""
    async with served.expose(7001) as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        assert await reader.read() == b"first"
        data = os.urandom(3_000_000)
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        for _ in range(100):
            if await served.files.exists("/tmp/first") and (await served.files.stat("/tmp/first")).size == len(data):
                break
            await asyncio.sleep(0.05)
        assert await served.files.read("/tmp/first") == data
        writer.close()
    async with served.connect(7000) as connection, asyncio.timeout(20):
        await connection.send(data[:500_000])
        await connection.send_eof()
        got = b""
        while piece := await connection.receive():
            got += piece
        assert got == data[:500_000]


@pytest.mark.parametrize("port", [7003, "/tmp/sock", "7000"])
async def test_where_it_may_listen(served: Sandbox, port: int | str) -> None:
    """On ::1 alone, on a Unix socket's path, and a port given as text."""
    async with served.connect(port) as connection, asyncio.timeout(10):
        await connection.send(b"x" * 300_000)
        await connection.send_eof()
        got = b""
        while piece := await connection.receive():
            got += piece
        assert got == b"x" * 300_000


async def test_nobody_listens(served: Sandbox) -> None:
    """A raw connection gets a typed error at once, a local client a reset; wrong ports are the caller's errors."""
    began = time.monotonic()
    with pytest.raises(SandboxError) as caught:
        async with served.connect(9):
            pass
    assert caught.value.reason == "ECONNREFUSED"
    assert time.monotonic() - began < 0.5
    with pytest.raises(NotFound):
        async with served.connect("/tmp/absent") as connection:
            await connection.finish()
    async with served.expose(9) as address:
        reader, writer = await asyncio.open_connection(*address)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 5)
        writer.close()
    for port in (0, 65_536, "relative/path", "http"):
        with pytest.raises(InvalidRequest):
            served.connect(port)
    async with served.expose(7000) as address:
        with pytest.raises(Busy):
            async with served.expose(7000, address.port):
                pass


async def test_a_connection_that_breaks_off(served: Sandbox) -> None:
    """The server's reset and the local client's both end the other side and leave nothing."""
    async with served.expose(7005) as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"x")
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    async with served.expose(7004) as address, asyncio.timeout(20):
        _, writer = await asyncio.open_connection(*address)
        writer.write(bytes(1 << 20))
        await asyncio.sleep(0.3)
        assert await connections(served) != []
        writer.transport.abort()
        _, writer = await asyncio.open_connection(*address)
        await asyncio.sleep(0.1)  # left open: the listener's end ends it
    for _ in range(60):
        if await connections(served) == []:
            break
        await asyncio.sleep(0.05)
    assert await connections(served) == []


@pytest.mark.slow
async def test_a_server_that_does_not_read_is_waited_for(served: Sandbox) -> None:
    """A minute without progress is no error, and takes no memory here: the sender is held back."""
    async with served.connect(7004) as connection:
        sending = asyncio.ensure_future(connection.send(bytes(64 << 20)))
        await asyncio.sleep(60)
        assert not sending.done()
        assert connection._written < 16 << 20
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_paused_sandbox_stays_paused(served: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle connection does not wake it; a byte does, and arrives."""
    monkeypatch.setattr("libdsec.process.QUIET", 0.1)
    async with served.connect(7000) as connection, asyncio.timeout(20):
        await connection.send(b"x")
        assert await connection.receive() == b"x"
        await served.pause()
        await asyncio.sleep(3)
        assert (await served.info()).state == "paused"
        await connection.send(b"y")
        assert await connection.receive() == b"y"
        assert (await served.info()).state == "running"


async def test_the_sandboxs_death_ends_its_connections(client: Client) -> None:
    """In the middle of a stream: local clients see the end at once, new ones are refused, and `connect` says why."""
    async with client.sandbox("small", **ROOMY) as sandbox:
        async with serving(sandbox), sandbox.expose(7000) as address, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            await sandbox.stop()
            writer.write(b"y")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            with pytest.raises(SandboxGone):
                async with sandbox.connect(7000):
                    pass


async def test_connections_survive_a_killed_edge(client: Client, cluster: Cluster) -> None:
    """The Edge is killed with -9 and started: an idle connection goes on, and nothing is lost or doubled."""
    (edge,) = cluster.edges.values()
    async with client.sandbox("small", **ROOMY) as sandbox, serving(sandbox):
        async with sandbox.expose(7000) as address, asyncio.timeout(40):
            reader, writer = await asyncio.open_connection(*address)
            for n in range(3):
                word = f"word {n}\n".encode() * 1000
                writer.write(word)
                assert await reader.readexactly(len(word)) == word
                if n < 2:
                    await edge.kill()
                    await asyncio.sleep(0.2)
                    await edge.start()
            writer.close()


HOLDER = """
import asyncio, sys, libdsec
async def main():
    async with libdsec.connect(sys.argv[1]) as client:
        sandbox = await client.attach(sys.argv[2])
        async with sandbox.expose(7000) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"x")
            await reader.readexactly(1)
            async with sandbox.connect("/tmp/sock") as connection:
                print("open", flush=True)
                await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_client_leaves_nothing(served: Sandbox, cluster: Cluster) -> None:
    """kill -9 of a client with open connections: within half a minute the sandbox has none of them."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, cluster.url, served.id, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    before = len([op for op in await served.ops() if op.running])
    process.send_signal(signal.SIGKILL)
    await process.wait()
    for _ in range(80):
        if len([op for op in await served.ops() if op.running]) <= before - 2:
            break
        await asyncio.sleep(0.5)
    assert len([op for op in await served.ops() if op.running]) <= before - 2
    assert await connections(served) == []


async def test_the_command(served: Sandbox, cluster: Cluster) -> None:
    """`dsec port-forward` says where it listens, and Ctrl+C ends it."""
    environ = os.environ | {"DSEC_URL": cluster.url}
    words = [sys.executable, "-m", "dsec.cli", "port-forward", served.id, ":7000", ":/tmp/sock"]
    process = await asyncio.create_subprocess_exec(*words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    async with asyncio.timeout(20):
        for inside in ("7000", "/tmp/sock"):
            local, arrow, remote = (await process.stdout.readline()).decode().split()
            assert (arrow, remote) == ("->", f"{served.id}:{inside}")
            host, _, port = local.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"hello")
            writer.write_eof()
            assert await reader.read() == b"hello"
            writer.close()
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
