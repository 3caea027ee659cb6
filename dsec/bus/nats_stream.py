"""What nats-server sends, cut into messages and handed on by the transport's own callback.

nats-py reads through a stream and a task, and parses in coroutines: two more rounds of the loop for each message, of which a create
takes six one after the other. Here a message that has a plain callback reaches it in the round in which it came; all else (pings,
errors, subscriptions of JetStream's) goes to nats-py's own parser as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

TURN = 0.001  # seconds that a reader may hold the loop: a buffer of small messages holds thousands of them
MAX_LINE = 64 * 1024  # bytes of a control line; the server's own limit is 4 KiB, but for its INFO
_NOW = 16 * 1024  # bytes that are cut without a look at the clock

Take = Callable[[int, bytes, bytes, bytes, bytes | None], bool]
"""(number of the subscription, subject, reply, payload, headers) -> whether it had somebody who takes it."""


class Over(Exception):
    """The connection has ended, or what came over it is not NATS."""


class Splitter:
    """Pure. ``take`` gets each message; ``other`` the bytes of whatever else comes, one control line or message at a time."""

    def __init__(self, take: Take, other: Callable[[bytes], None]) -> None:
        self._take, self._other = take, other
        self._rest = bytearray()
        self._want = 0  # bytes of the rest with which it can go on

    def feed(self, data: bytes) -> bool:
        """False when it held the loop for long enough: call it again, with nothing, before more comes. Raises `Over`."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._want:
                return True
            data = bytes(self._rest)
            self._rest.clear()
        at, size, self._want = 0, len(data), 0
        until = time.monotonic() + TURN if size > _NOW else 0.0
        while at < size:
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > MAX_LINE:
                    raise Over(f"a control line of more than {MAX_LINE} bytes")
                self._want = size - at + 1
                break
            begin = end + 2
            if data.startswith((b"MSG ", b"HMSG "), at):
                words = data[at:end].split()
                has_headers = words[0] == b"HMSG"
                try:
                    sid, stop = int(words[2]), begin + int(words[-1])
                    body = begin + int(words[-2]) if has_headers else begin
                except (ValueError, IndexError):
                    body = stop = -1
                if not begin <= body <= stop:
                    raise Over(f"not a message: {data[at:end][:200]!r}")
                if stop + 2 > size:
                    self._want = stop + 2 - at
                    break
                reply = words[3] if len(words) == 5 + has_headers else b""
                if not self._take(sid, words[1], reply, data[body:stop], data[begin:body] if has_headers else None):
                    self._other(data[at : stop + 2])
                at = stop + 2
            else:
                self._other(data[at:begin])
                at = begin
            if until and time.monotonic() > until:
                break
        if at < size:
            self._rest += data[at:]
        return at == size or bool(self._want)


class Reader(asyncio.Protocol):
    """Takes the place of nats-py's stream on a connection that is set up. `others` is to be asked until the connection is over."""

    def __init__(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader, take: Take) -> None:
        self._transport = cast(asyncio.Transport, writer.transport)
        self._splitter = Splitter(take, self._other)
        self._others: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over: Exception | None = None
        self._stopped = self._full = False
        self._stream = cast(asyncio.StreamReaderProtocol, self._transport.get_protocol())  # nats-py waits in it for writes and the end
        self._transport.set_protocol(self)
        state = vars(reader)  # what came with the last words of the handshake
        if state["_paused"]:
            self._transport.resume_reading()
        if state["_buffer"]:
            self.data_received(bytes(state["_buffer"]))
        if state["_eof"]:
            self._end(Over("nats-server closed the connection"))

    async def others(self) -> bytes:
        """The next of what is nats-py's to read. Raises what ended the connection."""
        while not self._others:
            if self._over is not None:
                raise self._over
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._others.popleft()

    def stop(self) -> None:
        """What still comes is dropped."""
        self._stopped = True

    def write(self, *pieces: bytes) -> bool:
        """To the server, behind all that was written before. False, and nothing is: the transport holds as much as it should, or ends."""
        if self._full or self._transport.is_closing():
            return False
        self._transport.writelines(pieces)
        return True

    # ---- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if self._stopped:
            return
        try:
            done = self._splitter.feed(data)
        except Over as error:
            self._end(error)
            return
        if not done and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self.data_received(b"")

    def eof_received(self) -> bool | None:
        self._end(Over("nats-server closed the connection"))
        return self._stream.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or Over("the connection broke"))
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        self._full = True
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        self._full = False
        self._stream.resume_writing()

    # ---- inside

    def _other(self, data: bytes) -> None:
        self._others.append(data)
        self._wake()

    def _end(self, why: Exception) -> None:
        self._over = self._over or why
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
