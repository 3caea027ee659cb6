"""Connections from here to what listens inside a sandbox. Bytes travel over the bus; the sandbox's network stays as closed as it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from dsec.errors import Busy, DsecError, InvalidRequest
from libdsec.channel import PIECE, Channel
from libdsec.spec import text, whole

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

MOST = 256  # connections of one listener at one time; more wait in the kernel's queue


class Address(NamedTuple):
    """Where a local listener listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class Connection(Channel):
    """A raw stream: ``async with sandbox.connect(8000) as c: await c.send(b"…"); data = await c.receive()``.

    ``receive`` gives b"" once the far side has said its end; ``send_eof`` says ours, and either may go on sending after the other's end.
    """


class Forward:
    """A listener on this machine whose connections end inside the sandbox: ``async with sandbox.expose(8000) as address``."""

    def __init__(self, sandbox: Sandbox, port: int | str, local_port: int, host: str) -> None:
        self._sandbox = sandbox
        self._argv = target(port)
        self._local = (text(host, "host"), whole(local_port, "local_port", 0, 65_535))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(MOST)
        self.connections = 0  # so far
        self.refused = 0  # of them, that nobody inside took

    async def __aenter__(self) -> Address:
        if self._server is not None:
            raise InvalidRequest("this listener was entered before", fix="call sandbox.expose() for each block")
        self._sandbox._wire.guard()
        host, port = self._local
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=PIECE, backlog=512)
        except OSError as error:
            raise Busy(f"cannot listen here: {error.strerror}", field="local_port", value=port, fix="use another port, or 0") from error
        bound = self._server.sockets[0].getsockname()
        return Address(bound[0], bound[1])

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        whole_story = False
        try:
            async with self._gate, Channel(self._sandbox, self._argv) as channel:
                whole_story = await relay(reader, writer, channel)
        except DsecError as error:
            if error.reason == "ECONNREFUSED":
                self.refused += 1
            self._sandbox._wire.log.info("client.forward_ended", sandbox=self._sandbox.id, error=str(error))
        finally:
            if not whole_story:  # what listens inside did not end it in order: neither do we
                with contextlib.suppress(OSError, AttributeError):
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            writer.close()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: Channel) -> bool:
    """Copy both ways until both sides have said their end. False: one of them broke off."""

    async def there() -> bool:
        try:
            while data := await reader.read(PIECE):
                await channel.send(data)
            await channel.send_eof()
        except ConnectionError:
            return False
        return True

    async def back() -> bool:
        try:
            while data := await channel.receive():
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except (ConnectionError, OSError):
            return False
        return True

    ways = {asyncio.ensure_future(there()), asyncio.ensure_future(back())}
    try:
        waiting = ways
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(way.result() is False for way in done):
                return False
        return True
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


def target(port: int | str) -> tuple[str, str, str]:
    """A TCP port on the sandbox's loopback, or the path of a Unix socket inside."""
    if isinstance(port, str) and not port.isdigit():
        if not port.startswith("/"):
            raise InvalidRequest("is neither a port nor an absolute path", field="port", value=port)
        return ("dsec:connect", "unix", text(port, "port"))
    return ("dsec:connect", "tcp", str(whole(int(port), "port", 1, 65_535)))
