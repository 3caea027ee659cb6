"""Output of one operation to its reader: chunks on the bulk connection, under the reader's credit.

Credit is an absolute count of bytes since the request, resent each second by the reader, so that a lost message delays and never
blocks for ever. A reader that has been silent for `SILENT` seconds while it owes credit, or for its own ``patience_ms`` in any case,
has left: the stream is let go, and the sandbox no longer waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec
import structlog

from dsec.backends.base import GuestLink
from dsec.bus import codec
from dsec.bus.bus import Bus
from dsec.bus.messages import OutputChunk, OutputRequest
from dsec.errors import DsecError, Unavailable, to_body
from dsec.model import Captured, OpStatus

log = structlog.get_logger("dsec.edge")
SILENT = 10.0
LAST_WAIT = 10.0
SMALL = 64 * 1024  # bytes of a message that is worth waiting for more
GATHER = 0.002  # seconds between messages smaller than that, while output flows; the first one never waits
RETIRE = 1.0
AWAY = 0.1  # seconds between attempts to send while the bus is away
TERMINAL = 6.0  # seconds of silence after which a terminal's reader no longer decides its size
REPLY_BYTES = 900_000  # a reply stays below the server's max_payload


class Piece(NamedTuple):
    stream: int
    offset: int
    data: memoryview
    sent: int = 0  # bytes sent with it, since the reader asked


class Pump:
    """One reader on one operation. The newest that does not only view holds the streams: the command waits for it and for no other.

    ``ended`` hears how the operation ended, before the reader does; ``surely`` is awaited before that, and may raise instead."""

    def __init__(
        self,
        bulk: Bus,
        subject: str,
        link: GuestLink,
        request: OutputRequest,
        ended: Callable[[OpStatus], object] = lambda _status: None,
        surely: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.reader = request.reader
        self.op = request.op
        self._bulk = bulk
        self._subject = subject
        self._link = link
        self._ended = ended
        self._surely = surely
        self._from = (request.stdout, request.stderr)
        self._credit = request.credit
        self._acks = request.acks
        self._todo: deque[Piece] = deque()
        self._kept: deque[Piece] = deque()  # sent, and not known to have arrived
        self._sent = self._received = self._turn = 0
        self._sending = asyncio.Lock()
        self._again: asyncio.Future[bool] | None = None
        self._wake = asyncio.Event()
        self._heard = asyncio.get_running_loop().time()
        self._closed = self._muted = False
        self._view, self._prompt = request.view, request.prompt
        self.size = (request.rows, request.cols)  # of its terminal; 0 by 0: it has none
        self.sized = 0  # of the readers with a size the one with the highest number decides
        self._patience = max(1.0, request.patience_ms / 1000)
        self._copying: asyncio.Task[bool] | None = None
        self._silence: asyncio.TimerHandle | None = None

    def credit(self, upto: int, received: int = 0) -> None:
        self._heard = asyncio.get_running_loop().time()
        if received > self._received:
            self._received = received
            while self._kept and self._kept[0].sent <= received:
                self._kept.popleft()
            self._wake.set()
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

    def _silent(self) -> float:
        """Seconds since the reader was heard. While the bus is away nobody can be."""
        now = asyncio.get_running_loop().time()
        if not self._bulk.transport.connected:
            self._heard = now
        return now - self._heard

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self._silent() >= self._patience:
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
                    await self._send_surely(OutputChunk(reader="", eof=True, offset=status.stdout.total))
                while status.running and not self._closed:  # it has closed its output and goes on, or is being reaped just now
                    status = await self._link.wait(self.op, LAST_WAIT)
                if self._surely is not None:
                    await self._surely()
                self._ended(status)
                end = OutputChunk(reader="", end=True, status=bounded(status))
                await self._send_surely(end)
                await self._linger(end)
        except Exception as error:  # whatever it is, the reader hears of it
            with contextlib.suppress(DsecError):
                await self._send(OutputChunk(reader=self.reader, end=True, error=to_body(error)))
            if not isinstance(error, DsecError):
                raise
        finally:
            if self._silence is not None:
                self._silence.cancel()
            if self._again is not None:
                self._again.cancel()

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
        loop = asyncio.get_running_loop()
        last = 0.0
        stream = self._link.output(self.op, self._from, self._view)
        try:
            async for chunk in stream:
                self._todo.append(Piece(chunk.stream, chunk.offset, memoryview(chunk.data)))
                if not await self._drain():
                    return False
                if len(chunk.data) < SMALL and not self._prompt:
                    if loop.time() - last < GATHER:
                        await asyncio.sleep(GATHER)  # what comes meanwhile is taken as one
                    last = loop.time()
        finally:
            close = getattr(stream, "aclose", None)  # an async generator has it, the protocol's iterator need not
            if close is not None:
                await close()
        return not self._closed

    async def _drain(self) -> bool:
        """Send what is to be sent, as credit allows; False when the reader has left. A bus that is away is waited for: were the stream
        let go, the sandbox would drop what nobody reads."""
        async with self._sending:
            while self._todo and not self._closed:
                if self._sent >= self._credit:
                    if not await self._more(self._sent + 1):
                        return False
                    continue
                piece, turn = self._todo[0], self._turn
                part = piece.data[: min(codec.CHUNK, self._credit - self._sent)]
                chunk = OutputChunk(reader=self.reader, stream=piece.stream, offset=piece.offset, data=part)  # type: ignore[arg-type]
                try:
                    await self._send(chunk)
                except Unavailable:
                    await asyncio.sleep(AWAY)
                    continue
                if turn != self._turn:  # asked for again from an earlier offset meanwhile: all of it is to be sent once more
                    continue
                self._sent += len(part)
                if self._acks:
                    self._kept.append(Piece(piece.stream, piece.offset, part, self._sent))
                if len(part) == len(piece.data):
                    self._todo.popleft()
                else:
                    self._todo[0] = Piece(piece.stream, piece.offset + len(part), piece.data[len(part) :])
        return not self._closed

    def restart(self, request: OutputRequest) -> bool:
        """The same client asks again, from offsets that it has reached: what was on its way may be lost, and is sent once more from
        here, for the sandbox may not keep it any more. False where that cannot be done: then it needs a reader of its own."""
        if self._closed or not self._acks or request.view != self._view:
            return False
        reached = {1: request.stdout, 2: request.stderr}
        again: deque[Piece] = deque()
        for piece in (*self._kept, *self._todo):
            at = reached[piece.stream]
            if piece.offset > at and not any(other.stream == piece.stream for other in again):
                return False  # it was told that this had arrived
            if piece.offset + len(piece.data) > at:
                cut = max(0, at - piece.offset)
                again.append(Piece(piece.stream, piece.offset + cut, piece.data[cut:]))
        self.reader, self._credit, self._sent, self._received = request.reader, request.credit, 0, 0
        self._heard = asyncio.get_running_loop().time()
        self._kept.clear()
        self._todo = again
        self._turn += 1
        self._wake.set()
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.ensure_future(self._drain())
        return True

    async def _linger(self, end: OutputChunk) -> None:
        """Until the reader has all, says that it leaves, or is silent: before that what was sent may be asked for again."""
        while self._acks and not self._closed and self._received < self._sent:
            turn = self._turn
            self._wake.clear()
            try:
                async with asyncio.timeout_at(self._heard + SILENT):
                    await self._wake.wait()
            except TimeoutError:
                if self._silent() >= SILENT:
                    return
            if turn != self._turn and await self._drain():
                await self._send_surely(end)

    async def _more(self, needed: int) -> bool:
        """Wait until ``needed`` bytes are allowed; False when the reader has left."""
        turn = self._turn
        while needed > self._credit and not self._closed and turn == self._turn:
            self._wake.clear()
            try:
                async with asyncio.timeout_at(self._heard + SILENT):
                    await self._wake.wait()
            except TimeoutError:
                if self._silent() >= SILENT:
                    log.info("edge.reader_left", op=self.op, reader=self.reader)
                    return False
        return not self._closed

    async def _send_surely(self, chunk: OutputChunk) -> None:
        while not self._closed:
            try:
                await self._send(msgspec.structs.replace(chunk, reader=self.reader))
                return
            except Unavailable:
                await asyncio.sleep(AWAY)

    async def _send(self, chunk: OutputChunk) -> None:
        if not self._muted:
            await self._bulk.publish(self._subject, chunk)


Key = tuple[str, str]  # (ulid, op)


class Readers:
    """Who reads which operation, and whose terminal's size counts: that of the live reader that set one last."""

    def __init__(self) -> None:
        self._pumps: dict[Key, dict[str, Pump]] = {}
        self._sized = 0

    def add(self, key: Key, pump: Pump, replaces: tuple[str, ...]) -> bool:
        """True when its terminal's size is to be set now."""
        pumps = self._pumps.setdefault(key, {})
        formers = [pumps.pop(name) for name in replaces if name in pumps]
        pumps[pump.reader] = pump
        for former in formers:
            former.retire()
            if former.sized:
                pump.decides(*(pump.size if any(pump.size) else former.size), former.sized)
        if formers:
            return False
        return self.resized(key, pump.reader, *pump.size) if any(pump.size) else False

    def again(self, key: Key, request: OutputRequest) -> bool:
        """True when the reader that this one replaces goes on in its name."""
        pumps = self._pumps.get(key, {})
        for name in request.replaces:
            if name in pumps and pumps[name].restart(request):
                pumps[request.reader] = pumps.pop(name)
                return True
        return False

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

    def any(self, key: Key) -> bool:
        return key in self._pumps

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
