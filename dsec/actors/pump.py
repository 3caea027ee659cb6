"""Output of one operation to its reader: chunks on the bulk connection, under the reader's credit.

Credit is an absolute count of bytes since the request, resent each second by the reader, so that a lost message delays and never
blocks for ever. A reader that has been silent for `SILENT` seconds while it owes credit, or for its own ``patience_ms`` in any case,
has left: the stream is let go, and the sandbox no longer waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import structlog

from dsec.backends.base import GuestLink
from dsec.bus import codec
from dsec.bus.bus import Bus
from dsec.bus.messages import OutputChunk, OutputRequest
from dsec.errors import DsecError, to_body
from dsec.model import Captured, OpStatus

log = structlog.get_logger("dsec.edge")
SILENT = 10.0
LAST_WAIT = 10.0
SMALL = 64 * 1024  # bytes of a message that is worth waiting for more
GATHER = 0.002  # seconds between messages smaller than that, while output flows; the first one never waits
RETIRE = 1.0
TERMINAL = 6.0  # seconds of silence after which a terminal's reader no longer decides its size
REPLY_BYTES = 900_000  # a reply stays below the server's max_payload


class Pump:
    """One reader on one operation. The newest that does not only view holds the streams: the command waits for it and for no other."""

    def __init__(self, bulk: Bus, subject: str, link: GuestLink, request: OutputRequest) -> None:
        self.reader = request.reader
        self.op = request.op
        self._bulk = bulk
        self._subject = subject
        self._link = link
        self._from = (request.stdout, request.stderr)
        self._credit = request.credit
        self._wake = asyncio.Event()
        self._heard = asyncio.get_running_loop().time()
        self._closed = self._muted = False
        self._view, self._prompt = request.view, request.prompt
        self.size = (request.rows, request.cols)  # of its terminal; 0 by 0: it has none
        self.sized = 0  # of the readers with a size the one with the highest number decides
        self._patience = max(1.0, request.patience_ms / 1000)
        self._copying: asyncio.Task[bool] | None = None
        self._silence: asyncio.TimerHandle | None = None

    def credit(self, upto: int) -> None:
        self._heard = asyncio.get_running_loop().time()
        if upto > self._credit:
            self._credit = upto
            self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._copying is not None:
            self._copying.cancel()  # it may wait for output that does not come

    def decides(self, rows: int, cols: int, number: int) -> None:
        """Its terminal's size counts: then its silence is noticed soon."""
        self.size, self.sized = (rows, cols), number
        self._patience = min(self._patience, TERMINAL)
        if self._silence is not None:
            self._silence.cancel()
            self._listen()

    def retire(self) -> None:
        """Another reader of the same client takes its place. It is let go a moment later, so that the streams are held meanwhile."""
        self._muted = True
        asyncio.get_running_loop().call_later(RETIRE, self.close)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._heard >= self._patience:
            log.info("edge.reader_left", op=self.op, reader=self.reader)
            self.close()
            return
        self._silence = loop.call_at(self._heard + self._patience, self._listen)

    async def run(self) -> None:
        """Until both streams end, the reader leaves or the sandbox is gone."""
        try:
            self._listen()
            if await self._copied():
                status = await self._link.wait(self.op, 0)
                if status.running:
                    await self._send(OutputChunk(reader=self.reader, eof=True, offset=status.stdout.total))
                while status.running and not self._closed:  # it has closed its output and goes on, or is being reaped just now
                    status = await self._link.wait(self.op, LAST_WAIT)
                await self._send(OutputChunk(reader=self.reader, end=True, status=bounded(status)))
        except Exception as error:  # whatever it is, the reader hears of it
            with contextlib.suppress(DsecError):
                await self._send(OutputChunk(reader=self.reader, end=True, error=to_body(error)))
            if not isinstance(error, DsecError):
                raise
        finally:
            if self._silence is not None:
                self._silence.cancel()

    async def _copied(self) -> bool:
        copying = self._copying = asyncio.ensure_future(self._copy())
        try:
            return await copying
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                return False
            raise
        finally:
            copying.cancel()

    async def _copy(self) -> bool:
        """True when both streams ended."""
        sent = 0
        loop = asyncio.get_running_loop()
        last = 0.0
        stream = self._link.output(self.op, self._from, self._view)
        try:
            async for chunk in stream:
                view = memoryview(chunk.data)
                at = 0
                while at < len(view):
                    if self._closed or (sent >= self._credit and not await self._more(sent + 1)):
                        return False
                    part = view[at : at + min(codec.CHUNK, self._credit - sent)]
                    await self._send(OutputChunk(reader=self.reader, stream=chunk.stream, offset=chunk.offset + at, data=part))  # type: ignore[arg-type]
                    at += len(part)
                    sent += len(part)
                if len(view) < SMALL and not self._prompt:
                    if loop.time() - last < GATHER:
                        await asyncio.sleep(GATHER)  # what comes meanwhile is taken as one
                    last = loop.time()
        finally:
            close = getattr(stream, "aclose", None)  # an async generator has it, the protocol's iterator need not
            if close is not None:
                await close()
        return not self._closed

    async def _more(self, needed: int) -> bool:
        """Wait until ``needed`` bytes are allowed; False when the reader has left."""
        loop = asyncio.get_running_loop()
        while needed > self._credit and not self._closed:
            self._wake.clear()
            try:
                async with asyncio.timeout_at(self._heard + SILENT):
                    await self._wake.wait()
            except TimeoutError:
                if loop.time() - self._heard >= SILENT:
                    log.info("edge.reader_left", op=self.op, reader=self.reader)
                    return False
        return not self._closed

    async def _send(self, chunk: OutputChunk) -> None:
        if not self._muted:
            await self._bulk.publish(self._subject, chunk)


Key = tuple[str, str]  # (ulid, op)


class Readers:
    """Who reads which operation, and whose terminal's size counts: that of the live reader that set one last."""

    def __init__(self) -> None:
        self._pumps: dict[Key, dict[str, Pump]] = {}
        self._sized = 0

    def add(self, key: Key, pump: Pump, replaces: str) -> bool:
        """True when its terminal's size is to be set now."""
        pumps = self._pumps.setdefault(key, {})
        former = pumps.pop(replaces, None)
        pumps[pump.reader] = pump
        if former is not None:
            former.retire()
            if former.sized:
                pump.decides(*(pump.size if any(pump.size) else former.size), former.sized)
            return False
        return self.resized(key, pump.reader, *pump.size) if any(pump.size) else False

    def resized(self, key: Key, reader: str, rows: int, cols: int) -> bool:
        pump = self.get(key, reader)
        if pump is not None:
            self._sized += 1
            pump.decides(rows, cols, self._sized)
        return True

    def remove(self, key: Key, pump: Pump) -> tuple[int, int] | None:
        """The size that counts from now on, when it was this reader's that did and others are there."""
        pumps = self._pumps.get(key, {})
        if pumps.get(pump.reader) is not pump:
            return None
        del pumps[pump.reader]
        if not pumps:
            self._pumps.pop(key, None)
        last = max(pumps.values(), key=lambda other: other.sized, default=None)
        return last.size if last is not None and 0 < last.sized < pump.sized else None

    def get(self, key: Key, reader: str) -> Pump | None:
        return self._pumps.get(key, {}).get(reader)


def bounded(status: OpStatus) -> OpStatus:
    """A status whose captured output fits one message: the largest parts are cut, and `total` goes on telling the truth."""
    parts = (status.stdout, status.stderr)
    if sum(len(part.head) + len(part.tail) for part in parts) <= REPLY_BYTES:
        return status
    room = REPLY_BYTES // 4
    cut = [Captured(head=part.head[:room], tail=part.tail[-room:], total=part.total) for part in parts]
    return msgspec.structs.replace(status, stdout=cut[0], stderr=cut[1])
