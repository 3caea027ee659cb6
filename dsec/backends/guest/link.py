"""The node's side of the guest wire: `Link` is the `GuestLink` of one sandbox over a Unix socket.

A link connects when it is first used and closes when it has been idle; neither says anything about the sandbox's life. While
it is closed it holds no descriptor, task or timer: one timer a loop looks after all open links, and only while there are any.
Requests that may be repeated (start under its op, wait, input at its offset, reads) survive a lost connection unnoticed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec

from dsec.backends.base import Chunk
from dsec.backends.guest import wire
from dsec.backends.guest.channel import Channel, ChannelLost, open_channel
from dsec.errors import (
    Busy,
    Conflict,
    DeadlineExceeded,
    Denied,
    DsecError,
    InvalidRequest,
    NotFound,
    SandboxError,
    Unavailable,
    Unsupported,
)
from dsec.model import Captured, ExecSpec, FileReply, FileRequest, OpStatus, Stat

T = TypeVar("T")
MERGED = 128 * 1024  # bytes of neighbouring pieces of output that are handed on as one
WINDOW = 1 << 20  # bytes of each stream that may be under way to a reader
LISTING = 1000  # entries of one answer when the request gives no number
FILE_REQUESTS = 6  # at one time; the guest has eight workers
REPEATABLE_VERBS = frozenset({"read", "write", "stat", "list", "chmod", "chown", "touch"})
UNCLAIMED = 64  # results that came before anybody waited for them

_FIXES = {"user": "name a user of the image, or a number", "cwd": "name a directory that is there and that the user may enter"}
_BY_CODE: dict[int, type[DsecError]] = {
    wire.Code.INVALID: InvalidRequest,
    wire.Code.NOT_FOUND: NotFound,
    wire.Code.CONFLICT: Conflict,
    wire.Code.DENIED: Denied,
    wire.Code.BUSY: Busy,
    wire.Code.SANDBOX: SandboxError,
    wire.Code.STALE: Conflict,
    wire.Code.UNSUPPORTED: Unsupported,
}


class _Result:
    """The end of one operation as this connection will tell it; None in `future` means that the connection was lost."""

    __slots__ = ("future", "parts")

    def __init__(self, future: asyncio.Future[wire.Done | wire.Error | None]) -> None:
        self.future = future
        self.parts: list[list[bytes]] = [[], [], [], []]

    def feed(self, kind: int, value: object) -> bool:
        """A frame of the answer; True when it was the last."""
        if isinstance(value, wire.Done):
            if any(self.parts):
                value = wire.Done(value.status, tuple(b"".join(p) + v for p, v in zip(self.parts, value.parts, strict=True)))  # type: ignore[arg-type]
            self._set(value)
        elif kind == wire.Type.CAPTURE:
            index, data = cast(tuple[int, bytes], value)
            self.parts[index].append(data)
            return False
        elif isinstance(value, wire.Error) or value is None:
            self._set(value)
        else:
            return False
        return True

    def _set(self, value: wire.Done | wire.Error | None) -> None:
        if not self.future.done():
            self.future.set_result(value)


class _Reader:
    """What `output` holds: chunks that arrived, and whoever waits for the next."""

    __slots__ = ("chunks", "ended", "error", "lost", "waiter")

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.waiter: asyncio.Future[None] | None = None
        self.ended = self.lost = False
        self.error: wire.Error | None = None

    def take(self) -> Chunk:
        """The oldest chunk, with those that follow it in its stream: a message to the caller costs more than a copy."""
        chunk = self.chunks.popleft()
        end = chunk.offset + len(chunk.data)
        parts = [chunk.data]
        while self.chunks:
            more = self.chunks[0]
            if more.stream != chunk.stream or more.offset != end or end + len(more.data) - chunk.offset > MERGED:
                break
            parts.append(more.data)
            end += len(more.data)
            self.chunks.popleft()
        return chunk if len(parts) == 1 else Chunk(chunk.stream, chunk.offset, b"".join(parts))

    def feed(self, kind: int, value: object) -> bool:
        last = True
        if isinstance(value, Chunk):
            self.chunks.append(value)
            last = False
        elif kind == wire.Type.END:
            self.ended = True
        elif isinstance(value, wire.Error):
            self.error = value
        else:
            self.lost = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        return last


class _Reaper:
    """Closes idle links of one loop; its timer exists only while links are open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.links: set[Link] = set()
        self.timer: asyncio.TimerHandle | None = None

    def add(self, link: Link) -> None:
        self.links.add(link)
        if self.timer is None:
            self.timer = self.loop.call_later(min(link.idle_seconds, 5.0), self.look)

    def look(self) -> None:
        self.timer = None
        now = self.loop.time()
        for link in [link for link in self.links if link.idle_since(now)]:
            link.hang_up()
        if self.links:
            soonest = min(link.idle_seconds for link in self.links)
            self.timer = self.loop.call_later(min(soonest, 5.0), self.look)

    def drop(self, link: Link) -> None:
        self.links.discard(link)
        if not self.links and self.timer is not None:
            self.timer.cancel()
            self.timer = None


_reapers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Reaper] = WeakKeyDictionary()


class Link:
    """The way into one sandbox; implements `dsec.backends.base.GuestLink`.

    Args:
        path: the Unix socket that Aether listens on; any length.
        generation: the Edge's; connections of lower generations are closed by the guest.
        expect_pid: what must be the pid (as this process sees it) of whoever answers: the sandbox's init. None checks nothing.
        idle_seconds: closes the connection after so long without a request under way.
        sandbox_id: named in errors.
        request_timeout: seconds for any answer but `wait`'s; then `DeadlineExceeded`.
        oom_kills: the sandbox's count of OOM kills so far (blocking, called in a thread): the guest cannot see its own cgroup, so
            a failed operation during which the count rose is the one that was killed.
        memory: its memory limit in bytes, named in the status of what was killed.

    Raises (all methods): `SandboxGone` when nobody listens any more, `Unavailable` when the connection breaks in a request that
    must not be repeated, `Conflict` with reason ``stale_generation`` when a newer Edge has taken over.
    """

    def __init__(
        self,
        path: str,
        *,
        generation: int,
        expect_pid: Callable[[], int] | int | None = None,
        idle_seconds: float = 30.0,
        sandbox_id: str = "",
        request_timeout: float = 30.0,
        oom_kills: Callable[[], int] | None = None,
        defaults: Mapping[str, str] | None = None,
        memory: int = 0,
    ) -> None:
        self.path = path
        self._defaults = defaults or {}  # what the guest takes for a field that an order leaves out: an error about it names the value
        self.generation = generation
        self.expect_pid = expect_pid
        self.idle_seconds = idle_seconds
        self.sandbox_id = sandbox_id
        self.request_timeout = request_timeout
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[Channel] | None = None
        self._results: dict[str, _Result] = {}
        self._file_slots = asyncio.Semaphore(FILE_REQUESTS)
        self._used = 0.0
        self._oom_kills = oom_kills
        self.oom_seen = 0  # kills that were told as the end of an operation
        self._memory = memory
        self._oom_ops: deque[str] = deque(maxlen=64)  # a repeated question gets the same answer

    # ---- the contract

    async def start(self, op: str, spec: ExecSpec) -> OpStatus:
        flags = (
            (wire.Start.STDIN if spec.stdin else 0)
            | (wire.Start.TTY if spec.tty else 0)
            | (wire.Start.BACKGROUND if spec.background else wire.Start.NOTIFY)
            | (wire.Start.STREAM if spec.stream else 0)
            | (wire.Start.SERVICE if spec.service else 0)
            | (wire.Start.SESSION if spec.session else 0)
            | (wire.Start.RUN if spec.run_in else 0)
        )
        argv, cwd = spec.argv, spec.cwd
        if spec.run_in:
            # `command eval`: an error of syntax or of a special builtin is the command's exit code and does not end the shell.
            argv, cwd = (f"command eval {shlex.quote(spec.argv[0])} </dev/null\n",), spec.run_in
        with _OwnFrames(self.sandbox_id):
            body = wire.start(
                op,
                argv,
                env=spec.env,
                cwd=cwd,
                user=spec.user,
                timeout_ms=spec.timeout_ms or 0,
                flags=flags,
                head=spec.head,
                tail=spec.tail,
                rows=spec.rows,
                cols=spec.cols,
            )
        values = {"argv": spec.argv[0] if spec.argv else "", "user": spec.user, "cwd": spec.cwd, "session": spec.run_in}
        loop = asyncio.get_running_loop()
        for attempt in range(3):
            channel = await self._open()
            started: asyncio.Future[object] = loop.create_future()
            result = None if spec.background else _Result(loop.create_future())

            def feed(kind: int, value: object, started: asyncio.Future[object] = started, result: _Result | None = result) -> bool:
                if not started.done():
                    started.set_result(value)
                    if kind == wire.Type.STATUS and result is not None:
                        return False
                    if result is None:
                        return True
                return result is None or result.feed(kind, value)

            request = channel.send(wire.Type.START, body, feed)
            try:
                value = await self._answer(channel, request, started)
            except ChannelLost:
                if attempt == 2:
                    raise self._lost() from None
                continue
            status = self._expect(value, wire.Status, values)
            if result is not None and not status.ended:  # of one that had ended nothing more comes by itself
                self._remember(op, result)
            return _op_status(status)
        raise self._lost()

    async def wait(self, op: str, timeout: float) -> OpStatus:
        until = time.monotonic() + timeout
        for _ in range(8):
            result = self._results.get(op)
            if result is None:
                with _OwnFrames(self.sandbox_id):
                    body = wire.op_bytes(op)
                channel = await self._open()
                result = _Result(asyncio.get_running_loop().create_future())
                channel.send(wire.Type.WAIT, body, result.feed)
                self._remember(op, result)
            if not result.future.done():
                try:
                    async with asyncio.timeout(max(0.0, until - time.monotonic())):
                        await asyncio.shield(result.future)
                except TimeoutError:
                    status = await self._running(op)
                    if status.running:
                        return status
                    until = time.monotonic() + self.request_timeout  # it ended just now: its output is on the way
                    continue
            value = result.future.result()
            if self._results.get(op) is result:
                del self._results[op]
            if value is None:
                continue  # the connection broke: ask again on a new one
            if isinstance(value, wire.Error):
                raise self._error(value, {"op": op})
            return await self._with_oom(_op_status(value.status, value.parts))
        raise self._lost()

    async def _with_oom(self, status: OpStatus) -> OpStatus:
        if self._oom_kills is None or status.exit_code == 0:
            return status
        if status.op not in self._oom_ops:
            kills = await asyncio.to_thread(self._oom_kills)
            if kills <= self.oom_seen:
                return status
            self.oom_seen = kills
            self._oom_ops.append(status.op)
        limit = f"memory: the sandbox's limit of {self._memory} bytes was reached" if self._memory else "memory"
        return msgspec.structs.replace(status, oom_killed=True, detail=limit)

    async def output(self, op: str, offsets: tuple[int, int] = (0, 0), view: bool = False) -> AsyncIterator[Chunk]:
        with _OwnFrames(self.sandbox_id):
            wire.op_bytes(op)
        at = list(offsets)
        loop = asyncio.get_running_loop()
        tries = 0
        while tries < 8:
            channel = await self._open()
            reader = _Reader()
            granted = [at[0] + WINDOW, at[1] + WINDOW]
            request = channel.send(wire.Type.OUTPUT, wire.output(op, (at[0], at[1]), (granted[0], granted[1]), view), reader.feed)
            try:
                while True:
                    if reader.chunks and len(reader.chunks[0].data) < MERGED // 4:
                        await asyncio.sleep(0)  # small pieces: what this round of the loop still brings goes with them
                    while reader.chunks:
                        chunk = reader.take()
                        i = chunk.stream - 1
                        at[i] = chunk.offset + len(chunk.data)
                        tries = 0
                        if chunk.data:  # an empty one only says where the stream goes on
                            yield chunk
                        if at[i] + WINDOW // 2 > granted[i] and not reader.lost:
                            granted[i] = at[i] + WINDOW
                            channel.write(wire.Type.CREDIT, request, wire.OFFSETS.pack(*granted))
                    if reader.ended:
                        return
                    if reader.error is not None:
                        raise self._error(reader.error, {"op": op})
                    if reader.lost:
                        break
                    reader.waiter = loop.create_future()
                    await reader.waiter
            finally:
                if not (reader.ended or reader.lost or reader.error):
                    channel.forget(request)
                    channel.write(wire.Type.DETACH, request)
                self._used = loop.time()
            tries += 1
        raise self._lost()

    async def input(self, op: str, offset: int, data: bytes, eof: bool = False) -> int:
        piece = data[: wire.MAX_DATA]
        with _OwnFrames(self.sandbox_id):
            body = wire.input_(op, offset, piece, eof and len(piece) == len(data))
        value = await self._request(wire.Type.INPUT, body, {"op": op}, repeat=True)
        return int(self._expect(value, int, {}))

    async def signal(self, op: str, signum: int, tree: bool = True) -> None:
        with _OwnFrames(self.sandbox_id):
            body = wire.signal(op, signum, tree)
        await self._request(wire.Type.SIGNAL, body, {"op": op, "signum": str(signum)})

    async def resize(self, op: str, rows: int, cols: int) -> None:
        with _OwnFrames(self.sandbox_id):
            body = wire.resize(op, rows, cols)
        await self._request(wire.Type.RESIZE, body, {"op": op}, repeat=True)

    async def files(self, request: FileRequest) -> FileReply:
        mode, length = request.mode, request.length
        if not length:
            length = {"read": wire.MAX_DATA, "list": LISTING}.get(request.verb, 0)
        if request.verb == "mkdir":
            mode |= (mode & 0o444) >> 2  # a directory that may be read may be entered
        with _OwnFrames(self.sandbox_id):
            body = wire.file(
                request.verb,
                request.path,
                offset=request.offset,
                length=length,
                data=request.data,
                create=request.create,
                truncate=request.truncate,
                recursive=request.recursive,
                target=request.target,
                mode=mode,
                user=request.user,
            )
        values = {"path": request.path, "target": request.target, "user": request.user}
        async with self._file_slots:
            value = await self._request(wire.Type.FILE, body, values, repeat=request.verb in REPEATABLE_VERBS)
        reply = self._expect(value, wire.File, values)
        stats = tuple(_stat(item) for item in reply.stats)
        listing = request.verb == "list"
        return FileReply(
            data=reply.data,
            stat=stats[0] if stats and not listing else None,
            entries=stats if listing else (),
            eof=reply.eof,
            written=reply.written,
        )

    async def ops(self) -> tuple[OpStatus, ...]:
        value = await self._request(wire.Type.OPS, b"", {}, repeat=True)
        return tuple(_op_status(status) for status in self._expect(value, tuple, {}))

    async def shutdown(self) -> None:
        """Tell Aether to kill everything in its pid namespace and to exit. The death itself is seen elsewhere."""
        with suppress(Unavailable):  # the answer may be overtaken by the end
            await self._request(wire.Type.STOP, b"", {})

    async def close(self) -> None:
        """Close the connection; the link stays usable and opens a new one when asked again."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self.hang_up()

    # ---- idling

    @property
    def connected(self) -> bool:
        return self._channel is not None

    def idle_since(self, now: float) -> bool:
        """Whether it may be closed at loop time ``now``."""
        channel = self._channel
        return channel is not None and not channel.busy and now - self._used >= self.idle_seconds

    def hang_up(self) -> None:
        channel, self._channel = self._channel, None
        self._results.clear()
        if channel is not None:
            channel.close()

    # ---- inside

    async def _open(self) -> Channel:
        channel = self._channel
        if channel is not None and not channel.closed:
            return channel
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        task = self._connecting
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise self._lost() from None  # closed while it was being opened
            raise
        finally:
            if task.done() and self._connecting is task:
                self._connecting = None

    async def _connect(self) -> Channel:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.request_timeout):
                channel = await open_channel(self.path, self.generation, self.expect_pid, self.sandbox_id, self._on_lost)
        except TimeoutError:
            raise DeadlineExceeded("the guest does not answer", sandbox=self.sandbox_id) from None
        except wire.WireError as error:
            raise SandboxError(f"the guest answered against the protocol: {error}", sandbox=self.sandbox_id) from None
        except ChannelLost as lost:
            if lost.refusal is not None:
                raise self._error(lost.refusal, {"generation": str(self.generation)}) from None
            raise Unavailable("the guest closed the connection", sandbox=self.sandbox_id) from None
        self._channel = channel
        self._used = loop.time()
        reaper = _reapers.get(loop)
        if reaper is None:
            reaper = _reapers[loop] = _Reaper(loop)
        reaper.add(self)
        return channel

    def _on_lost(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
        reaper = _reapers.get(channel.loop)
        if reaper is not None and self._channel is None:
            reaper.drop(self)

    async def _request(self, kind: wire.Type, body: bytes, values: dict[str, str], *, repeat: bool = False) -> object:
        for attempt in range(3):
            channel = await self._open()
            future: asyncio.Future[object] = channel.loop.create_future()

            def feed(kind: int, value: object, future: asyncio.Future[object] = future) -> bool:
                if not future.done():
                    future.set_result(value if kind else ChannelLost)
                return True

            request = channel.send(kind, body, feed)
            try:
                value = await self._answer(channel, request, future)
            except ChannelLost:
                if not repeat or attempt == 2:
                    raise self._lost() from None
                continue
            if isinstance(value, wire.Error):
                raise self._error(value, values)
            return value
        raise self._lost()

    async def _answer(self, channel: Channel, request: int, future: asyncio.Future[object]) -> object:
        try:
            async with asyncio.timeout(self.request_timeout):
                value = await future
        except TimeoutError:
            channel.forget(request)
            raise DeadlineExceeded("the guest does not answer", sandbox=self.sandbox_id) from None
        except asyncio.CancelledError:
            channel.forget(request)
            raise
        self._used = channel.loop.time()
        if value is ChannelLost or (value is None and channel.closed):
            raise ChannelLost
        return value

    async def _running(self, op: str) -> OpStatus:
        """Where an operation stands that has not ended in time."""
        for status in await self.ops():
            if status.op == op:
                return status
        raise NotFound("no such operation", field="op", value=op, sandbox=self.sandbox_id)

    def _remember(self, op: str, result: _Result) -> None:
        if len(self._results) >= UNCLAIMED:
            for old in [key for key, item in self._results.items() if item.future.done()][: UNCLAIMED // 2]:
                del self._results[old]  # the guest still has it
        self._results[op] = result

    def _expect(self, value: object, cls: type[T], values: dict[str, str]) -> T:
        if isinstance(value, wire.Error):
            raise self._error(value, values)
        if not isinstance(value, cls):
            raise SandboxError("the guest answered with a frame of another kind", sandbox=self.sandbox_id)
        return value

    def _error(self, error: wire.Error, values: dict[str, str]) -> DsecError:
        cls = _BY_CODE.get(error.code, SandboxError)
        message = error.message[:400]
        reason = errno.errorcode.get(error.errno, "")
        detail = os.strerror(error.errno) if error.errno and error.field != "user" else ""  # a user is looked up, not opened
        if detail.lower() not in message.lower():
            message = f"{message}: {detail}"
        if error.code == wire.Code.STALE:
            reason = "stale_generation"
        value = values.get(error.field, "") or self._defaults.get(error.field, "")
        return cls(message, field=error.field, value=value, fix=_FIXES.get(error.field, ""), sandbox=self.sandbox_id, reason=reason)

    def _lost(self) -> Unavailable:
        return Unavailable("the connection to the guest broke", sandbox=self.sandbox_id)


class _OwnFrames:
    """Turns a `WireError` of our own encoding into the caller's `InvalidRequest`."""

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, wire.WireError):
            raise InvalidRequest(str(error), field=error.field, sandbox=self.sandbox_id) from None


def _op_status(status: wire.Status, parts: tuple[bytes, bytes, bytes, bytes] = (b"", b"", b"", b"")) -> OpStatus:
    done = status.ended
    return OpStatus(
        op=status.op,
        running=not done,
        exit_code=status.code if done and not status.signalled else None,
        signal=status.code if done and status.signalled else None,
        timed_out=status.timed_out,
        oom_killed=status.oom,
        duration_ms=status.micros / 1000,
        stdout=Captured(head=parts[0], tail=parts[1], total=status.totals[0]),
        stderr=Captured(head=parts[2], tail=parts[3], total=status.totals[1]),
        pid=status.pid,
        kind=status.kind,
    )


def _stat(item: wire.FileStat) -> Stat:
    return Stat(
        name=item.name,
        kind=item.kind,
        size=item.size,
        mode=item.mode,
        uid=item.uid,
        gid=item.gid,
        mtime=item.mtime_ns / 1e9,
        target=item.target,
    )
