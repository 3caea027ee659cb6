"""The node's side of the guest wire: `Link` is the `GuestLink` of one sandbox over a Unix socket.

A link connects when it is first used and closes when it has been idle; neither says anything about the sandbox's life. While
it is closed it holds no descriptor, task or timer: one timer a loop looks after all open links, and only while there are any.
Requests that may be repeated (start under its op, wait, input at its offset, reads) survive a lost connection unnoticed.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

import msgspec

from dsec.backends.base import Chunk
from dsec.backends.guest import wire
from dsec.backends.guest.answers import MERGED, OwnFrames, Reader, Result, op_status, stat
from dsec.backends.guest.channel import ChannelLost, Expected
from dsec.backends.guest.connection import SILENCE, Connection
from dsec.backends.guest.pace import pace
from dsec.errors import NotFound, SandboxGone, Unavailable
from dsec.model import ExecSpec, FileReply, FileRequest, OpStatus

WINDOW = 1 << 20  # bytes of each stream that may be under way to a reader
LISTING = 1000  # entries of one answer when the request gives no number
FILE_REQUESTS = 6  # at one time; the guest has eight workers
REPEATABLE_VERBS = frozenset({"read", "write", "stat", "list", "chmod", "chown", "touch"})
UNCLAIMED = 64  # results that came before anybody waited for them


class Link(Connection):
    """The way into one sandbox; implements `dsec.backends.base.GuestLink`.

    Args:
        path: the Unix socket that Aether listens on; any length.
        generation: the Edge's; connections of lower generations are closed by the guest.
        expect_pid: what must be the pid (as this process sees it) of whoever answers: the sandbox's init. None checks nothing.
        idle_seconds: closes the connection after so long without a request under way.
        sandbox_id: named in errors.
        request_timeout: seconds for any answer but `wait`'s; then `DeadlineExceeded`.
        silence: seconds after which an agent that was asked and says nothing at all, not even to a question that it answers whatever
            runs, is `Unavailable` with reason ``agent_silent``.
        frozen: whether the sandbox is held still from outside (blocking, called in a thread): its silence is then none.
        oom_kills: the sandbox's count of OOM kills so far (blocking, called in a thread): the guest cannot see its own cgroup, so
            a failed operation during which the count rose is the one that was killed.
        memory: its memory limit in bytes, named in the status of what was killed.

    Raises (all methods): `SandboxGone` when nobody listens any more, `Unavailable` when the connection breaks in a request that
    must not be repeated or when the agent is silent, `Conflict` with reason ``stale_generation`` when a newer Edge has taken over.
    """

    def __init__(
        self,
        path: str,
        *,
        generation: int,
        expect_pid: Expected = None,
        idle_seconds: float = 30.0,
        sandbox_id: str = "",
        request_timeout: float = 30.0,
        oom_kills: Callable[[], int] | None = None,
        defaults: Mapping[str, str] | None = None,
        memory: int = 0,
        frozen: Callable[[], bool] | None = None,
        silence: float = SILENCE,
    ) -> None:
        super().__init__(
            path,
            generation=generation,
            expect_pid=expect_pid,
            idle_seconds=idle_seconds,
            sandbox_id=sandbox_id,
            request_timeout=request_timeout,
            defaults=defaults,
            frozen=frozen,
            silence=silence,
        )
        self._results: dict[str, Result] = {}
        self._file_slots: asyncio.Semaphore | None = None  # made when it is first needed
        self._oom_kills = oom_kills
        self.oom_seen = 0  # kills that were told as the end of an operation
        self._memory = memory
        self._oom_ops: tuple[str, ...] = ()  # a repeated question gets the same answer

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
            | (wire.Start.WALL if spec.wall_timeout else 0)
        )
        argv, cwd = spec.argv, spec.cwd
        if spec.run_in:
            # `command eval`: an error of syntax or of a special builtin is the command's exit code and does not end the shell.
            argv, cwd = (f"command eval {shlex.quote(spec.argv[0])} </dev/null\n",), spec.run_in
        with OwnFrames(self.sandbox_id):
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
        with await pace().turn():
            return await self._start(op, body, values, background=spec.background)

    async def _start(self, op: str, body: bytes, values: dict[str, str], *, background: bool) -> OpStatus:
        loop = asyncio.get_running_loop()
        for attempt in range(3):
            channel = await self._open()
            started: asyncio.Future[object] = loop.create_future()
            result = None if background else Result(loop.create_future())

            def feed(kind: int, value: object, started: asyncio.Future[object] = started, result: Result | None = result) -> bool:
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
            return op_status(status)
        raise self._lost()

    async def wait(self, op: str, timeout: float) -> OpStatus:
        until = time.monotonic() + timeout
        for _ in range(8):
            result = self._results.get(op)
            if result is None:
                with OwnFrames(self.sandbox_id):
                    body = wire.op_bytes(op)
                channel = await self._open()
                result = Result(asyncio.get_running_loop().create_future())
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
                self._results = self._results or {}  # one that has been emptied keeps its table
            if value is None:
                continue  # the connection broke: ask again on a new one
            if isinstance(value, wire.Error):
                raise self._error(value, {"op": op})
            return await self._with_oom(op_status(value.status, value.parts))
        raise self._lost()

    async def _with_oom(self, status: OpStatus) -> OpStatus:
        if self._oom_kills is None or status.exit_code == 0:
            return status
        if status.op not in self._oom_ops:
            kills = await asyncio.to_thread(self._oom_kills)
            if kills <= self.oom_seen:
                return status
            self.oom_seen = kills
            self._oom_ops = (*self._oom_ops[-63:], status.op)
        limit = f"memory: the sandbox's limit of {self._memory} bytes was reached" if self._memory else "memory"
        return msgspec.structs.replace(status, oom_killed=True, detail=limit)

    async def output(self, op: str, offsets: tuple[int, int] = (0, 0), view: bool = False) -> AsyncIterator[Chunk]:
        with OwnFrames(self.sandbox_id):
            wire.op_bytes(op)
        at = list(offsets)
        loop = asyncio.get_running_loop()
        tries = 0
        while tries < 8:
            channel = await self._open()
            reader = Reader()
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
        with OwnFrames(self.sandbox_id):
            body = wire.input_(op, offset, piece, eof and len(piece) == len(data))
        value = await self._request(wire.Type.INPUT, body, {"op": op}, repeat=True)
        return int(self._expect(value, int, {}))

    async def signal(self, op: str, signum: int, tree: bool = True) -> None:
        with OwnFrames(self.sandbox_id):
            body = wire.signal(op, signum, tree)
        await self._request(wire.Type.SIGNAL, body, {"op": op, "signum": str(signum)})

    async def resize(self, op: str, rows: int, cols: int) -> None:
        with OwnFrames(self.sandbox_id):
            body = wire.resize(op, rows, cols)
        await self._request(wire.Type.RESIZE, body, {"op": op}, repeat=True)

    async def files(self, request: FileRequest) -> FileReply:
        mode, length = request.mode, request.length
        if not length:
            length = {"read": wire.MAX_DATA, "list": LISTING}.get(request.verb, 0)
        if request.verb == "mkdir":
            mode |= (mode & 0o444) >> 2  # a directory that may be read may be entered
        with OwnFrames(self.sandbox_id):
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
        self._file_slots = self._file_slots or asyncio.Semaphore(FILE_REQUESTS)
        async with self._file_slots:
            value = await self._request(wire.Type.FILE, body, values, repeat=request.verb in REPEATABLE_VERBS)
        reply = self._expect(value, wire.File, values)
        stats = tuple(stat(item) for item in reply.stats)
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
        return tuple(op_status(status) for status in self._expect(value, tuple, {}))

    async def shutdown(self) -> None:
        """Tell Aether to kill everything in its pid namespace and to exit. The death itself is seen elsewhere."""
        with suppress(Unavailable, SandboxGone):  # the answer may be overtaken by the end
            await self._request(wire.Type.STOP, b"", {})

    def hang_up(self) -> None:
        super().hang_up()
        self._results = {}

    # ---- inside

    async def _running(self, op: str) -> OpStatus:
        """Where an operation stands that has not ended in time."""
        for status in await self.ops():
            if status.op == op:
                return status
        raise NotFound("no such operation", field="op", value=op, sandbox=self.sandbox_id)

    def _remember(self, op: str, result: Result) -> None:
        if len(self._results) >= UNCLAIMED:
            for old in [key for key, item in self._results.items() if item.future.done()][: UNCLAIMED // 2]:
                del self._results[old]  # the guest still has it
        self._results[op] = result
