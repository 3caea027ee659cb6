"""One connection to a guest: the handshake that proves who answers, framing, and answers handed to whoever asked."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Callable

from dsec.backends.base import Chunk
from dsec.backends.guest import wire
from dsec.errors import NodeError, SandboxError, SandboxGone

_UCRED = struct.Struct("iII")
_FIRST_BUFFER = 16 << 10
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

Feed = Callable[[int, object], bool]  # (frame type, decoded body) -> whether it was the last answer; type 0: the connection is lost


class ChannelLost(Exception):
    """The connection ended before the answer; ``refusal`` is the guest's reason where it gave one."""

    def __init__(self, refusal: wire.Error | None = None) -> None:
        super().__init__("connection lost")
        self.refusal = refusal


class Channel:
    """Frames over a connected socket, read and written by itself: a transport of the loop's would be one more thing to make before a new
    sandbox can be told of, and would write a round of the loop later. A broken frame closes it: what comes from a guest is a stranger's
    word."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, on_lost: Callable[[Channel], None]) -> None:
        self.loop = loop
        self.closed = False
        self.heard = loop.time()  # when anything came last
        self._on_lost = on_lost
        self._sock = sock
        self._unsent = bytearray()
        self._buffer = bytearray(_FIRST_BUFFER)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._next = 1
        self._feeds: dict[int, Feed] = {}
        loop.add_reader(sock.fileno(), self._readable)

    @property
    def busy(self) -> bool:
        """Whether answers are outstanding."""
        return bool(self._feeds)

    def send(self, kind: int, body: bytes, feed: Feed) -> int:
        """Send a request whose answers go to ``feed``; its number. On a closed channel ``feed`` is told the loss soon."""
        request = self._next
        self._next = request % 0xFFFFFFFF + 1
        if self.closed:
            self.loop.call_soon(feed, 0, None)
            return request
        self._feeds[request] = feed
        self._write(wire.frame(kind, request, body))
        return request

    def write(self, kind: int, request: int, body: bytes = b"") -> None:
        """A frame that belongs to an earlier request, or needs no answer."""
        if not self.closed:
            self._write(wire.frame(kind, request, body))

    def forget(self, request: int) -> None:
        """Nobody waits for the answers of ``request`` any more."""
        self._feeds.pop(request, None)

    def close(self) -> None:
        """What the socket does not take is lost, as are the answers that are still to come: their feeds hear it."""
        if self.closed:
            return
        self.closed = True
        self.loop.remove_reader(self._sock.fileno())
        if self._unsent:
            self.loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._on_lost(self)
        feeds, self._feeds = self._feeds, {}
        for feed in feeds.values():
            feed(0, None)

    # ---- the socket

    def _readable(self) -> None:
        try:
            size = self._sock.recv_into(self._view[self._filled :])
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self.close()
            return
        self._filled += size
        self.heard = self.loop.time()
        try:
            self._parse()
        except wire.WireError:
            self.close()

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # its end is read
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self.loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self.loop.remove_writer(self._sock.fileno())

    def _parse(self) -> None:
        at, filled, view = 0, self._filled, self._view
        while filled - at >= 12:
            length, kind, request = wire.header(view, at)
            end = at + 12 + length
            if end > filled:
                if length + 12 > len(view):
                    self._grow(at, max(length + 12, min(4 * len(view), 1 << 20)))
                    return
                break
            feed = self._feeds.get(request)
            if feed is not None:
                if kind == wire.Type.CHUNK:
                    if length < 16:
                        raise wire.WireError("a CHUNK without its head")
                    stream, offset = wire.CHUNK.unpack_from(view, at + 12)
                    if stream not in (1, 2):
                        raise wire.WireError("a CHUNK of no stream")
                    value: object = Chunk(stream, offset, bytes(view[at + 28 : end]))
                else:
                    value = wire.decode(kind, bytes(view[at + 12 : end]))
                if feed(kind, value):
                    self._feeds.pop(request, None)
                if self.closed:
                    return
            at = end
        if at:
            rest = filled - at
            if rest:
                view[:rest] = bytes(view[at:filled])
            self._filled = rest
        elif filled == len(view):
            self._grow(0, min(4 * len(view), (1 << 20) + 12))

    def _grow(self, at: int, size: int) -> None:
        # A new buffer: the old one may not be resized while views of it are about.
        fresh = bytearray(size)
        rest = self._filled - at
        fresh[:rest] = self._view[at : self._filled]
        self._buffer, self._view, self._filled = fresh, memoryview(fresh), rest


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(sock.fileno(), ready)
    try:
        await future
    finally:
        loop.remove_reader(sock.fileno())


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int, pids: set[int]) -> bytes:
    """Exactly ``size`` bytes; adds the pids of those who sent them."""
    data = b""
    while len(data) < size:
        try:
            part, ancillary, _, _ = sock.recvmsg(size - len(data), socket.CMSG_SPACE(_UCRED.size))
        except BlockingIOError:
            await _readable(loop, sock)
            continue
        if not part:
            raise ChannelLost
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pids.add(_UCRED.unpack(raw[: _UCRED.size])[0])
        data += part
    return data


async def _dial(sock: socket.socket, path: str, sandbox_id: str) -> None:
    folder = -1
    try:
        if len(os.fsencode(path)) > 100:  # sun_path holds 107 bytes; a descriptor of the folder makes any path short
            folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{folder}/{os.path.basename(path)}"
        while True:
            try:
                sock.connect(path)
                return
            except BlockingIOError:  # its queue of new connections is full
                await asyncio.sleep(0.005)
    except (ConnectionRefusedError, FileNotFoundError):
        raise SandboxGone("nobody listens in the sandbox any more", sandbox=sandbox_id, reason="exited") from None
    except OSError as error:
        raise _no_way(error, sandbox_id) from None
    finally:
        if folder >= 0:
            os.close(folder)


def _no_way(error: OSError, sandbox_id: str) -> NodeError | SandboxError:
    """Whose fault it is that there is no connection."""
    if error.errno in _SHORT:
        return NodeError(f"the node is short of something for now: {error}", sandbox=sandbox_id, reason="descriptors")
    return SandboxError(f"cannot connect to the guest: {error}", sandbox=sandbox_id)


Expected = Callable[[], int] | int | None


async def open_channel(
    path: str,
    generation: int,
    expect_pid: Expected,
    sandbox_id: str,
    on_lost: Callable[[Channel], None],
) -> Channel:
    """Connect, say HELLO, check who answered. Raises `SandboxGone`, `SandboxError`, `ChannelLost` (refused), `WireError`.

    The kernel vouches for the pid that sent
    the first message: a process that got hold of the listener without being the sandbox's init is found out here.
    """
    loop = asyncio.get_running_loop()
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise _no_way(error, sandbox_id) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        await _dial(sock, path, sandbox_id)
        try:
            sock.send(wire.frame(wire.Type.HELLO, 0, wire.hello(generation)))
            pids: set[int] = set()
            length, kind, _ = wire.header(await _receive(loop, sock, 12, pids))
            if length > 1024:
                raise wire.WireError("a HELLO that is too long")
            answer = wire.decode(kind, await _receive(loop, sock, length, pids))
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelLost from None
        if isinstance(answer, wire.Error):
            raise ChannelLost(answer)
        if kind != wire.Type.HELLO:
            raise wire.WireError("the first frame is not a HELLO")
        init = expect_pid() if callable(expect_pid) else expect_pid
        if init is not None and pids != {init}:
            raise SandboxError("somebody else than the sandbox's init answered", sandbox=sandbox_id, reason="impostor")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        return Channel(loop, sock, on_lost)
    except BaseException:
        sock.close()
        raise
