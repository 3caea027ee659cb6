"""A command whose output is followed while it runs.

Output is published by the Edge under credit and carries absolute offsets. Whatever is lost on the way (a reconnection, an Edge that
restarted) is asked for again from the offset that was reached: nothing is missing and nothing comes twice. Only what the sandbox
itself no longer keeps is told as a gap.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import random
import re
import signal as signals
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from dsec.bus import codec, subjects
from dsec.bus.messages import (
    CreditRequest,
    Empty,
    ExecReply,
    ExecRequest,
    InputReply,
    InputRequest,
    OutputChunk,
    OutputRequest,
    ResizeRequest,
)
from dsec.bus.transport import Msg, Subscription, Transport
from dsec.errors import DeadlineExceeded, DsecError, InvalidRequest, SandboxError, from_body
from dsec.model import ExecSpec, OpStatus, State
from libdsec.results import ExecResult
from libdsec.spec import whole
from libdsec.wire import is_silence

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

CREDIT = 8 << 20  # bytes that may be on the way to us or wait to be read
TELL = 1 << 20  # bytes read after which the Edge is told at once
TICK = 1.0  # seconds between repeats of the credit
QUIET = 5.0  # seconds without output after which we ask again, in case the Edge has forgotten us; doubles up to a minute
LONGEST_LINE = 1 << 20
BEYOND = 1 << 62  # no stdin is that long
EXPECTED = 64 << 10  # bytes of output that `expect` looks for a match in
UNREAD = 1 << 20  # bytes kept of a stream that nobody reads while the other one is read


class OutputEvent(msgspec.Struct, frozen=True):
    """A piece of output. ``offset`` is absolute in its stream; ``gap`` counts bytes before it that the sandbox no longer had."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    offset: int
    gap: int = 0

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Process:
    """Made by `Sandbox.start` and `Sandbox.process`; an async context manager.

    Iterate it for `OutputEvent`s of both streams, or iterate ``stdout`` / ``stderr`` for bytes. While nobody reads, the command
    blocks on its full pipe; `wait` reads the rest and throws it away (`ExecResult` keeps the beginning and the end of it).
    """

    prompt = False  # whether small pieces of output come one by one, at once
    patience = 60.0  # seconds after which an Edge that hears nothing of us takes us for gone

    def __init__(self, sandbox: Sandbox, op: str, spec: ExecSpec | None, *, offsets: tuple[int, int] = (0, 0), view: bool = False) -> None:
        self.op = op
        self._sandbox = sandbox
        self._wire = sandbox._wire
        self._spec = spec
        self._bulk: Transport | None = None
        self._subscription: Subscription | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._reader = ""
        self._names: list[str] = []
        self._next = list(offsets)  # offset reached, by stream
        self._view = view  # only look on: the command does not wait for us
        self._size = (spec.rows, spec.cols) if spec is not None and spec.tty else (0, 0)  # of our terminal
        self._expected = bytearray()  # what `expect` has read and not given away
        self._fresh = [True, True]  # nothing came yet since we asked: a jump is a gap then, not a loss
        self._queues: tuple[deque[OutputEvent], deque[OutputEvent]] = (deque(), deque())
        self._order: deque[int] = deque()
        self._queued = [0, 0]
        self._short_at: tuple[int, int] | None = None
        self._streams_over = False
        self._received = 0  # bytes since we asked, as the Edge counts credit
        self._acked = 0  # of them those before the first loss: these are never asked for again
        self._intact = True
        self._told = 0
        self._heard = 0.0
        self._quiet = QUIET
        self._again = asyncio.Event()
        self._news = asyncio.Event()
        self._readers = 0
        self._draining = False
        self._status: OpStatus | None = None
        self._error: DsecError | None = None
        self._written = 0
        self._writing = asyncio.Lock()
        self._detached = False

    # ------------------------------------------------------------------ begin and end
    async def __aenter__(self) -> Self:
        if self._bulk is not None:
            raise InvalidRequest("this process was entered before", fix="call sandbox.start() for each run")
        try:
            self._bulk = await self._wire.bulk()
            sid = self._sandbox._id
            subject = subjects.output(self._wire.unit, sid, self.op, self._wire.caller)
            self._subscription = await self._wire.listen(subject, self._on_chunk, transport=self._bulk)
            self._wire.on_reconnect.append(self._ask_again)
            await self._bulk.flush()
            if self._spec is not None:
                request = ExecRequest(op=self.op, spec=self._spec, wait_ms=0)
                await self._sandbox._request("exec", request, ExecReply, timeout=30.0, each=5.0)
            await self._attach()
            self._keeper = asyncio.create_task(self._keep(), name=f"dsec-process-{self.op[:8]}")
        except BaseException as error:
            refused = isinstance(error, DsecError) and not is_silence(error)  # then nothing runs
            await self._leave(kill=self._spec is not None and not refused)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._leave(kill=not self.ended and not self._detached)

    async def _leave(self, kill: bool) -> None:
        keeper, self._keeper = self._keeper, None
        subscription, self._subscription = self._subscription, None
        if self._ask_again in self._wire.on_reconnect:
            self._wire.on_reconnect.remove(self._ask_again)
        try:
            if keeper is not None:
                keeper.cancel()
            if kill and self._sandbox._gone is None:
                await self._sandbox._kill_quietly(self.op)
        finally:
            if self._bulk is not None and self._reader and self._sandbox._gone is None:
                message = CreditRequest(op=self.op, reader=self._reader, credit=0, close=True)
                try:
                    self._bulk.post(self._sandbox._subject("credit"), codec.encode(message))
                except DsecError as failure:  # the Edge notices the missing credit by itself
                    self._wire.log.debug("client.reader_left_silently", op=self.op, error=str(failure))
            if subscription is not None:
                await subscription.unsubscribe()

    @property
    def ended(self) -> bool:
        """Whether the command has ended and all its output has arrived here."""
        return self._status is not None

    def detach(self) -> Process:
        """Let it run on after the block; `Sandbox.process` with `op` finds it again."""
        self._detached = True
        return self

    # ------------------------------------------------------------------ output
    def __aiter__(self) -> AsyncGenerator[OutputEvent]:
        return self._events((0, 1))

    @property
    def stdout(self) -> AsyncGenerator[bytes]:
        """Standard output as bytes. While only one stream is read, the last MiB of the other is kept."""
        return self._bytes(0)

    @property
    def stderr(self) -> AsyncGenerator[bytes]:
        """Standard error as bytes."""
        return self._bytes(1)

    async def texts(self, stream: Literal["stdout", "stderr"] = "stdout") -> AsyncGenerator[str]:
        """One stream as text while it comes: UTF-8 with replacement, no character cut at a piece's end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async with aclosing(self._bytes(0 if stream == "stdout" else 1)) as pieces:
            async for data in pieces:
                if piece := decoder.decode(data):
                    yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece

    async def lines(self, stream: Literal["stdout", "stderr"] = "stdout") -> AsyncGenerator[str]:
        """Lines of one stream without their ends, decoded as UTF-8 with replacement; one longer than a MiB comes in parts."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        held = ""
        async with aclosing(self._bytes(0 if stream == "stdout" else 1)) as pieces:
            async for data in pieces:
                *whole_lines, held = (held + decoder.decode(data)).split("\n")
                for line in whole_lines:
                    yield line
                if len(held) > LONGEST_LINE:
                    yield held
                    held = ""
        held += decoder.decode(b"", final=True)
        if held:
            yield held

    async def expect(self, pattern: str | bytes | re.Pattern[bytes], timeout: float | None = 30.0) -> re.Match[bytes]:
        """Read standard output until ``pattern`` (a regular expression) matches; what follows the match stays for the next call.

        The match's ``string`` holds what came since the former match, its last 64 KiB where more did. Not to be mixed with
        iterating. Raises `DeadlineExceeded` after ``timeout`` seconds and `SandboxError` when the output ends before; the error's
        text ends with what came last.
        """
        wanted = pattern if isinstance(pattern, re.Pattern) else re.compile(pattern.encode() if isinstance(pattern, str) else pattern)
        try:
            async with asyncio.timeout(timeout):
                stream = self._bytes(0)
                try:
                    while (found := wanted.search(bytes(self._expected))) is None:
                        try:
                            self._expected += await anext(stream)
                        except StopAsyncIteration:
                            last = bytes(self._expected[-200:])
                            raise SandboxError(
                                f"the output ended before {wanted.pattern!r} came", sandbox=self._sandbox.id, value=last
                            ) from None
                        del self._expected[:-EXPECTED]
                finally:
                    await stream.aclose()
        except TimeoutError:
            last = bytes(self._expected[-200:])
            raise DeadlineExceeded(f"{wanted.pattern!r} did not come within {timeout} s", sandbox=self._sandbox.id, value=last) from None
        del self._expected[: found.end()]
        return found

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """Its result. Output that nobody reads meanwhile is read and thrown away. Raises `TimeoutError` after ``timeout`` seconds."""
        self._entered()
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while not self.ended:
                    self._discard()
                    self._raise()
                    self._news.clear()
                    await self._news.wait()
        finally:
            self._draining = False
        self._raise()
        assert self._status is not None
        return ExecResult.of(self._status)

    async def _bytes(self, stream: int) -> AsyncGenerator[bytes]:
        async with aclosing(self._events((stream,))) as events:
            async for event in events:
                yield event.data

    async def _events(self, wanted: tuple[int, ...]) -> AsyncGenerator[OutputEvent]:
        self._entered()
        self._readers += 1
        try:
            while True:
                event = self._take(wanted)
                if event is not None:
                    yield event
                    continue
                self._raise()
                if self.ended:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            self._readers -= 1

    def _take(self, wanted: tuple[int, ...]) -> OutputEvent | None:
        if len(wanted) == 2:
            while self._order:
                stream = self._order.popleft()
                if self._queues[stream]:
                    return self._pop(stream)
            return None
        stream = wanted[0]
        if self._queues[stream]:
            return self._pop(stream)
        other = 1 - stream
        while self._queued[other] > UNREAD and self._readers == 1:  # nobody reads it: it must not stop the one that is read
            self._pop(other)
        return None

    def _pop(self, stream: int) -> OutputEvent:
        event = self._queues[stream].popleft()
        self._queued[stream] -= len(event.data)
        if self._credit() - self._told >= TELL:
            self._tell()
        self._order_trim()
        return event

    def _order_trim(self) -> None:
        while self._order and not self._queues[self._order[0]]:
            self._order.popleft()

    def _discard(self) -> None:
        if self._draining and not self._readers:
            for stream in (0, 1):
                while self._queues[stream]:
                    self._pop(stream)

    def _on_chunk(self, msg: Msg) -> None:
        try:
            chunk = codec.decode(msg.data, OutputChunk)
        except DsecError as error:
            self._wire.log.error("client.bad_output", op=self.op, error=str(error))
            return
        if chunk.reader != self._reader or self.ended:
            return
        self._heard = asyncio.get_running_loop().time()
        self._quiet = QUIET
        if chunk.error is not None:
            self._fail(from_body(chunk.error))
            return
        if chunk.data:
            self._received += len(chunk.data)
            if not self._place(chunk):
                self._intact = False
                return
            if self._intact:
                self._acked += len(chunk.data)
        if chunk.end:
            if chunk.status is None:
                self._ask_again()
                return
            reached = (self._next[0], self._next[1])
            short = reached[0] < chunk.status.stdout.total or reached[1] < chunk.status.stderr.total
            if short and self._short_at != reached:
                self._short_at = reached  # lost on the way, or no longer kept: asking once more tells which
                self._ask_again()
                return
            if chunk.status.running:
                self._streams_over = True  # it closed its output and goes on
                self._ask_again()
                return
            self._status = chunk.status
            self._tell()
        self._news.set()
        self._discard()

    def _place(self, chunk: OutputChunk) -> bool:
        """Queue what is new of it; False when something before it was lost and has been asked for again."""
        stream = 0 if chunk.stream == 1 else 1
        expected, data, gap = self._next[stream], chunk.data, 0
        if chunk.offset > expected:
            if not self._fresh[stream]:
                self._ask_again()
                return False
            gap = chunk.offset - expected
        elif chunk.offset < expected:
            data = data[expected - chunk.offset :]
        self._fresh[stream] = False
        if data:
            offset = max(chunk.offset, expected)
            self._next[stream] = offset + len(data)
            self._queues[stream].append(OutputEvent("stderr" if stream else "stdout", data, offset, gap))
            self._order.append(stream)
            self._queued[stream] += len(data)
        return True

    # ------------------------------------------------------------------ credit and replay
    def _credit(self) -> int:
        return self._received - sum(self._queued) + CREDIT

    def _tell(self) -> None:
        self._told = self._credit()
        if self._bulk is not None:
            message = CreditRequest(op=self.op, reader=self._reader, credit=self._told, received=self._acked)
            self._bulk.post(self._sandbox._subject("credit"), codec.encode(message))

    def _ask_again(self) -> None:
        self._again.set()

    async def _attach(self) -> None:
        """Become the reader, from the offsets reached. A new name each time: pieces of the former asking are told apart by it."""
        self._again.clear()
        self._reader = os.urandom(6).hex()
        self._names = [*self._names[-7:], self._reader]  # nobody knows which of those that were not answered have arrived
        self._fresh = [True, True]
        self._received = self._acked = 0
        self._intact = True
        self._told = max(TELL, self._credit())  # what waits here counts against the new credit as well
        self._heard = asyncio.get_running_loop().time()
        request = OutputRequest(
            op=self.op,
            reader=self._reader,
            replaces=tuple(self._names[:-1]),
            acks=True,
            view=self._view,
            stdout=self._next[0],
            stderr=self._next[1],
            credit=self._told,
            rows=self._size[0],
            cols=self._size[1],
            prompt=self.prompt,
            patience_ms=int(self.patience * 1000),
        )
        await self._sandbox._request("output", request, Empty, timeout=60.0, each=5.0, repeat=False)
        self._names = [self._reader]

    async def _keep(self) -> None:
        """Repeats the credit each second, and asks again when something is missing or it is quiet for long."""
        loop = asyncio.get_running_loop()
        pause = 0.05
        while not self.ended and self._error is None:
            try:
                async with asyncio.timeout(TICK):
                    await self._again.wait()
            except TimeoutError:
                pass
            try:
                if self._streams_over:
                    self._status = await self._sandbox._run(self.op, None)
                    self._news.set()
                elif self._again.is_set() or loop.time() - self._heard > self._quiet:
                    asked = self._again.is_set()
                    self._quiet = QUIET if asked else min(self._quiet * 2, 60.0)
                    if asked or (await self._sandbox.info()).state is not State.PAUSED:  # asking would wake it
                        await self._attach()
                    else:
                        self._heard = loop.time()
                        self._tell()
                    pause = 0.05
                else:
                    self._tell()
            except DsecError as error:
                if not is_silence(error):
                    self._fail(error)
                    return
                self._again.set()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0)

    def _fail(self, error: DsecError) -> None:
        self._error = error
        self._news.set()

    def _raise(self) -> None:
        if self._error is not None and not self.ended:
            raise self._error

    def _entered(self) -> None:
        if self._bulk is None:
            raise InvalidRequest("this process was not started", fix="use `async with sandbox.start(…) as process`")

    # ------------------------------------------------------------------ input and signals
    async def write(self, data: bytes | str) -> None:
        """Write to its stdin; returns when the sandbox has taken it (so a command that does not read makes this wait)."""
        self._entered()
        raw = data.encode() if isinstance(data, str) else bytes(data)
        async with self._writing:
            await self._meet_others()
            self._written = await self._sandbox._feed(self.op, raw, self._written, eof=False, unread=self._ask_again)

    async def _meet_others(self) -> None:
        """Where several may type, offsets are whoever's was last: ask where it stands. An offset far beyond is answered with that."""
        if self._spec is None or self._spec.tty:
            request = InputRequest(op=self.op, offset=BEYOND)
            self._written = (await self._sandbox._request("input", request, InputReply, bulk=True)).accepted

    async def close_stdin(self) -> None:
        """It reads end of file. Idempotent."""
        self._entered()
        async with self._writing:
            await self._meet_others()
            await self._sandbox._feed(self.op, b"", self._written, eof=True, unread=self._ask_again)

    async def signal(self, signum: int | str | signals.Signals, *, tree: bool = True) -> None:
        """Signal it by number or name (``"INT"``); ``tree``: with all its descendants."""
        await self._sandbox._signal(self.op, signal_number(signum), tree)

    async def kill(self) -> None:
        """SIGKILL to it and all its descendants."""
        await self.signal(signals.SIGKILL)

    async def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal; returns when it is set. Of several who look at it the last who resized decides while it lives."""
        self._size = whole(rows, "rows", 1, 10_000), whole(cols, "cols", 1, 10_000)
        message = ResizeRequest(op=self.op, rows=rows, cols=cols, reader=self._reader)
        await self._sandbox._request("resize", message, Empty)

    async def status(self) -> OpStatus:
        """Where it stands now, without output."""
        for op in await self._sandbox.ops():
            if op.op == self.op:
                return op
        raise SandboxError("the sandbox does not remember this operation", field="op", value=self.op, sandbox=self._sandbox.id)


def signal_number(value: int | str | signals.Signals) -> int:
    """1…64 from a number or a name, with or without SIG. Raises `InvalidRequest`."""
    if isinstance(value, str) and not value.isdigit():
        name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
        if name not in signals.Signals.__members__:
            raise InvalidRequest("is not a signal", field="signal", value=value, fix='use a number or a name such as "TERM"')
        return int(signals.Signals[name])
    return whole(int(value), "signal", 1, 64)
