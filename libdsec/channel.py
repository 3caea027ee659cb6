"""A byte stream in both directions with a service of the guest: a connection to a port, a tar on its way, changes of files.

It is an operation as any command is (an id, absolute offsets, credit), so restarts of the Edge and of the bus lose nothing; its reader
gone for good, the guest ends it.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsec.bus import codec
from dsec.bus.messages import OutputChunk
from dsec.bus.transport import Msg
from dsec.errors import Denied, DsecError, InvalidRequest, NotFound, SandboxError
from dsec.model import ExecSpec
from libdsec.process import Process

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

PIECE = 256 * 1024  # what the guest takes at once
SAID = 64 * 1024  # bytes kept of what a service says beside its stream
MARK = 512  # a message that may be the mark of the end is no longer


class Channel(Process):
    """``async with Channel(sandbox, ("dsec:pack", …)) as channel``; leaving the block ends the service."""

    prompt = True
    patience = 15.0  # seconds after which an Edge that hears nothing takes us for gone; the guest then ends the service 10 s later

    def __init__(self, sandbox: Sandbox, argv: Iterable[str], *, user: str = "") -> None:
        from libdsec.sandbox import new_op

        spec = ExecSpec(argv=tuple(argv), user=user, background=True, stream=True, stdin=True, service=True, head=0, tail=0)
        super().__init__(sandbox, new_op(), spec)
        self._ends_at: int | None = None
        self._said = b""
        self._readers = 1  # never discarded: whoever holds a channel reads it
        self.notes: tuple[str, ...] = ()  # what the service left out on purpose

    def _on_chunk(self, msg: Msg) -> None:
        if len(msg.data) < MARK:
            try:
                chunk = codec.decode(msg.data, OutputChunk)
            except DsecError:
                chunk = OutputChunk(reader="")  # told below
            if chunk.eof and chunk.reader == self._reader:
                self._heard = asyncio.get_running_loop().time()
                if self._next[0] < chunk.offset:
                    self._ask_again()
                    return
                self._ends_at = chunk.offset
                self._news.set()
                return
        super()._on_chunk(msg)

    async def receive(self) -> bytes:
        """The next piece; b"" at the end of the stream, which may come before the service's own end."""
        self._entered()
        while True:
            event = self._take((0, 1))
            if event is not None:
                if event.stream == "stderr":
                    self._said = (self._said + event.data)[:SAID]
                    continue
                if event.gap:
                    raise SandboxError(f"{event.gap} bytes were lost", sandbox=self._sandbox.id, reason="gap")
                return event.data
            self._raise()
            if self.ended or (self._ends_at is not None and self._next[0] >= self._ends_at):
                return b""
            self._news.clear()
            await self._news.wait()

    async def send(self, data: bytes | memoryview) -> None:
        """Returns when the guest has taken it."""
        self._entered()
        view = memoryview(data)
        async with self._writing:
            for at in range(0, len(view), PIECE):
                piece = bytes(view[at : at + PIECE])
                self._written = await self._sandbox._feed(
                    self.op, piece, self._written, eof=False, verb="feed", most=PIECE, unread=self._ask_again
                )

    async def send_eof(self) -> None:
        self._entered()
        async with self._writing:
            await self._sandbox._feed(self.op, b"", self._written, eof=True, verb="feed", unread=self._ask_again)

    async def finish(self) -> None:
        """Wait for the service's end. Raises what it failed with."""
        while await self.receive():
            pass
        while not self.ended:
            self._raise()
            self._news.clear()
            await self._news.wait()
        assert self._status is not None
        records = [record.split("\t") for record in self._said.decode("utf-8", "replace").split("\0") if record]
        self.notes = tuple(record[1] for record in records if record[0] == "note" and len(record) == 2)
        for record in records:
            if record[0] == "error" and len(record) == 4:
                raise service_error(record[1], record[2], record[3], self._sandbox.id)
        if self._status.exit_code != 0:
            raise SandboxError("the transfer was ended inside the sandbox", sandbox=self._sandbox.id, reason="killed")


def service_error(number: str, about: str, message: str, sandbox: str) -> DsecError:
    """The error that a service told: the caller's, or the sandbox's."""
    code = int(number) if number.isdigit() else errno.EIO
    name = errno.errorcode.get(code, "")
    if code and os.strerror(code).lower() not in message.lower():
        message = f"{message}: {os.strerror(code)}"
    kind: type[DsecError] = SandboxError
    if code == 0:
        kind = InvalidRequest
    elif code in (errno.ENOENT, errno.ENOTDIR):
        kind = NotFound
    elif code in (errno.EACCES, errno.EPERM, errno.EROFS):
        kind = Denied
    return kind(message, field="path", value=about, sandbox=sandbox, reason=name)
