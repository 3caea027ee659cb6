"""The inside of a fake sandbox: operations as asyncio tasks, files as a dict, a shell of a few words.

It understands ``/bin/sh -c`` with ``;``, ``&&``, ``||``, a closing ``&``, ``> file``, ``>> file`` and the commands true, false, echo,
printf, sleep, cat, yes, head -c N, exit N, kill -N $$, cd, env. Everything else is "not found" (127), as in a shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shlex
import time
from collections.abc import AsyncIterator

import msgspec

from dsec.backends import fake_services
from dsec.backends.base import Chunk, LaunchPlan
from dsec.errors import Busy, Conflict, InvalidRequest, NotFound, SandboxError, SandboxGone
from dsec.model import Captured, ExecSpec, Exit, FileReply, FileRequest, OpStatus, Stat, Usage

RING = 256 * 1024
PIECE = 64 * 1024
_EXPECTED = object()  # stands for the reader that a streaming operation waits for
_BUILTINS = frozenset({"true", "false", "echo", "printf", "sleep", "cat", "yes", "head", "exit", "kill", "cd", "env", ":"})


class _Output:
    """One stream: the first bytes, a ring of the last, and how many there were."""

    def __init__(self, head: int, tail: int) -> None:
        self.head_limit, self.tail_limit = head, tail
        self.head = b""
        self.ring = bytearray()
        self.total = 0
        self.readers: dict[object, int] = {}  # held streams and how far each has read

    def write(self, data: bytes) -> None:
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
        self.ring += data
        self.total += len(data)
        keep = max(RING, self.tail_limit)
        if self.readers:
            keep = max(keep, self.total - min(self.readers.values()))
        if len(self.ring) > keep:
            del self.ring[: len(self.ring) - keep]

    @property
    def full(self) -> bool:
        return bool(self.readers) and self.total - min(self.readers.values()) > RING

    def captured(self) -> Captured:
        after_head = self.total - len(self.head)
        tail = bytes(self.ring[-min(self.tail_limit, after_head) :]) if after_head and self.tail_limit else b""
        return Captured(head=self.head, tail=tail, total=self.total)

    def read(self, offset: int) -> tuple[int, bytes]:
        start = self.total - len(self.ring)
        at = max(offset, start)
        return at, bytes(self.ring[at - start : at - start + PIECE])


class Op:
    def __init__(self, spec: ExecSpec, order: ExecSpec | None = None) -> None:
        self.spec = spec
        self.order = order or spec  # as it was asked for
        self.streams = (_Output(spec.head, spec.tail), _Output(spec.head, spec.tail))
        self.stdin = bytearray()
        self.stdin_at = 0
        self.stdin_eof = not spec.stdin
        self.changed = asyncio.Condition()
        self.started = time.monotonic()
        self.ended = 0.0
        self.code: int | None = None
        self.signal: int | None = None
        self.timed_out = False
        self.left = False  # by `exit` or a signal of its own
        self.done = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def over(self, _task: asyncio.Task[None]) -> None:
        """Also of one that was cancelled before its first step."""
        if not self.done.is_set():
            self.ended = time.monotonic()
            self.done.set()

    def status(self, op: str, captured: bool) -> OpStatus:
        running = not self.done.is_set()
        streams = [stream.captured() if captured else Captured(total=stream.total) for stream in self.streams]
        return OpStatus(
            op=op,
            running=running,
            exit_code=self.code,
            signal=self.signal,
            timed_out=self.timed_out,
            duration_ms=((time.monotonic() if running else self.ended) - self.started) * 1000,
            stdout=streams[0],
            stderr=streams[1],
            pid=2,
            kind="session" if self.spec.session else "run" if self.spec.run_in else "terminal" if self.spec.tty else "",
        )

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class _Exit(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class FakeGuest:
    """State of one fake sandbox; it outlives links and backends. Cheap until something runs in it."""

    __slots__ = ("_gone", "_thawed", "dirs", "exit", "files", "frozen", "generation", "ops", "plan")

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self.ops: dict[str, Op] = {}
        self.files: dict[str, bytes] = {}
        self.dirs: set[str] = {"/", "/tmp", "/root"}
        self.exit: Exit | None = None
        self.frozen = False
        self.generation = 0
        self._gone: asyncio.Future[Exit] | None = None
        self._thawed: asyncio.Event | None = None

    def gone(self) -> asyncio.Future[Exit]:
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            if self.exit is not None:
                self._gone.set_result(self.exit)
        return self._gone

    def end(self, ending: Exit) -> None:
        if self.exit is None:
            self.exit = ending
            for op in self.ops.values():
                if op.task is not None:
                    op.task.cancel()
            if self._gone is not None and not self._gone.done():
                self._gone.set_result(ending)

    def thaw(self) -> None:
        self.frozen = False
        if self._thawed is not None:
            self._thawed.set()

    async def breathe(self) -> None:
        """Returns when the sandbox is not frozen."""
        await asyncio.sleep(0)
        while self.frozen:
            self._thawed = asyncio.Event()
            await self._thawed.wait()

    def usage(self) -> Usage:
        running = sum(not op.done.is_set() for op in self.ops.values())
        return Usage(memory=sum(map(len, self.files.values())), pids=1 + running, disk=sum(map(len, self.files.values())))

    async def run(self, op: Op, argv: tuple[str, ...]) -> None:
        if op.spec.session:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            op.signal = op.signal or (9 if op.code is None else None)
            return
        timeout = op.spec.timeout_ms / 1000 if op.spec.timeout_ms else None
        try:
            async with asyncio.timeout(timeout):
                shell = len(argv) == 3 and posixpath.basename(argv[0]) in ("sh", "bash") and argv[1] == "-c"
                if op.spec.service:
                    op.code = await fake_services.run(self, op, argv)
                else:
                    op.code = await (self.shell(op, argv[2]) if shell else self.command(op, list(argv), op.streams[0]))
        except _Exit as end:
            op.left = True
            op.code = end.code if end.code >= 0 else None
            op.signal = -end.code if end.code < 0 else None
        except TimeoutError:
            op.timed_out, op.signal = True, 9
        except asyncio.CancelledError:
            op.signal = op.signal or 9
        finally:
            op.ended = time.monotonic()
            op.done.set()
            await op.notify()

    async def run_in(self, shell: Op, op: Op) -> None:
        await self.run(op, ("sh", "-c", op.spec.argv[0]))
        shell.streams[0].write(op.streams[0].captured().data())
        shell.streams[1].write(op.streams[1].captured().data())
        if op.left and shell.task is not None:
            shell.code = op.code
            shell.task.cancel()

    async def shell(self, op: Op, text: str) -> int:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|>")
        lexer.whitespace_split = True
        words, code, join = [], 0, ";"
        for token in [*lexer, ";"]:
            if token not in (";", "&&", "||", "&"):
                words.append(token)
                continue
            if words and (join == ";" or (join == "&&") == (code == 0)):
                if token == "&":  # a background child: the shell does not wait for it
                    code = 0
                else:
                    code = await self.redirected(op, words)
            words, join = [], ";" if token == "&" else token
        return code

    async def redirected(self, op: Op, words: list[str]) -> int:
        if len(words) > 2 and words[-2] in (">", ">>"):
            path = posixpath.join(op.spec.cwd or self.plan.workdir or "/", words[-1])
            out = _Output(0, RING)
            code = await self.command(op, words[:-2], out)
            self.files[path] = (self.files.get(path, b"") if words[-2] == ">>" else b"") + bytes(out.ring)
            return code
        return await self.command(op, words, op.streams[0])

    async def command(self, op: Op, argv: list[str], out: _Output) -> int:
        name, rest = posixpath.basename(argv[0]), argv[1:]
        if name in ("true", "cd", ":"):
            return 0
        if name == "false":
            return 1
        if name == "exit":
            raise _Exit(int(rest[0]) if rest else 0)
        if name == "kill":
            raise _Exit(-int(rest[0].lstrip("-")))
        if name == "sleep":
            await asyncio.sleep(float(rest[0]))
            await self.breathe()
            return 0
        if name in ("echo", "printf", "env"):
            env = self.plan.env | op.spec.env
            text = " ".join(env.get(word[1:], "") if word.startswith("$") else word for word in rest)
            if name == "env":
                text = "\n".join(f"{key}={value}" for key, value in env.items())
            data = text.encode().decode("unicode_escape").encode("latin-1") if name == "printf" else text.encode() + b"\n"
            return await self.emit(op, out, data)
        if name == "yes":
            while True:
                await self.emit(op, out, ((rest[0] if rest else "y") + "\n").encode() * 4096)
        if name == "head":
            left = int(rest[1])
            while left > 0:
                await self.emit(op, out, b"\0" * min(left, PIECE))
                left -= PIECE
            return 0
        if name == "cat":
            return await self.cat(op, rest, out)
        op.streams[1].write(f"sh: {argv[0]}: not found\n".encode())
        return 127

    async def cat(self, op: Op, paths: list[str], out: _Output) -> int:
        for path in paths:
            if path not in self.files:
                op.streams[1].write(f"cat: {path}: No such file or directory\n".encode())
                return 1
            await self.emit(op, out, self.files[path])
        while not paths:
            async with op.changed:
                await op.changed.wait_for(lambda: op.stdin or op.stdin_eof)
                data = bytes(op.stdin)
                op.stdin.clear()
            if not data:
                break
            await self.emit(op, out, data)
        return 0

    async def emit(self, op: Op, out: _Output, data: bytes) -> int:
        await self.breathe()
        async with op.changed:
            await op.changed.wait_for(lambda: not out.full)
            out.write(data)
            op.changed.notify_all()
        return 0


class FakeLink:
    """`GuestLink` onto a `FakeGuest`. The highest generation that has spoken wins, as with Aether."""

    def __init__(self, guest: FakeGuest, generation: int = 1) -> None:
        self._guest = guest
        self._generation = generation

    def _alive(self) -> FakeGuest:
        guest = self._guest
        if guest.exit is not None:
            raise SandboxGone("the sandbox has ended", sandbox=guest.plan.id, reason=guest.exit.reason)
        if self._generation < guest.generation:
            raise Conflict("a newer Edge owns this sandbox", sandbox=guest.plan.id)
        guest.generation = self._generation
        return guest

    def _op(self, op: str) -> Op:
        found = self._alive().ops.get(op)
        if found is None:
            raise NotFound("no such operation", field="op", value=op)
        return found

    async def start(self, op: str, spec: ExecSpec) -> OpStatus:
        guest = self._alive()
        if (known := guest.ops.get(op)) is not None:
            if known.order != spec:
                raise Conflict("this id was used for another command", field="op", value=op, reason="request_id_conflict")
            return known.status(op, True)
        if not spec.argv or any("\0" in word for word in spec.argv):
            raise InvalidRequest("not a command", field="argv", value=spec.argv[:1])
        if spec.run_in:
            return self._run_in(guest, op, spec)
        name = posixpath.basename(spec.argv[0])
        if spec.service:
            fake_services.check(spec.argv)
        elif name not in _BUILTINS and name not in ("sh", "bash"):
            raise NotFound("no such command", field="argv", value=spec.argv[0])
        if spec.cwd and spec.cwd not in guest.dirs:
            raise NotFound("no such directory", field="cwd", value=spec.cwd)
        state = guest.ops[op] = Op(spec)
        state.task = asyncio.get_running_loop().create_task(guest.run(state, spec.argv))
        state.task.add_done_callback(state.over)
        if spec.stream:
            for stream in state.streams:
                stream.readers[_EXPECTED] = 0  # nothing is dropped until its reader has come
        return state.status(op, True)

    def _run_in(self, guest: FakeGuest, op: str, spec: ExecSpec) -> OpStatus:
        """A run in a session: one at a time; it has the session's environment, and `exit` ends both."""
        shell = guest.ops.get(spec.run_in)
        if shell is None or not shell.spec.session:
            raise NotFound("no such session", field="session", value=spec.run_in)
        if shell.done.is_set():
            raise Conflict("the session has ended", field="session", value=spec.run_in)
        if any(other.spec.run_in == spec.run_in and not other.done.is_set() for other in guest.ops.values()):
            raise Busy("another command runs in this session", field="session", value=spec.run_in)
        state = guest.ops[op] = Op(msgspec.structs.replace(spec, env=shell.spec.env, cwd=shell.spec.cwd), spec)
        state.task = asyncio.get_running_loop().create_task(guest.run_in(shell, state))
        state.task.add_done_callback(state.over)
        return state.status(op, True)

    async def wait(self, op: str, timeout: float) -> OpStatus:
        state = self._op(op)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(state.done.wait(), timeout)
        self._alive()
        return state.status(op, True)

    async def output(self, op: str, offsets: tuple[int, int] = (0, 0), view: bool = False) -> AsyncIterator[Chunk]:
        state = self._op(op)
        key = object()
        at = list(offsets)
        for number, stream in enumerate(state.streams):
            if view:
                continue
            stream.readers[key] = at[number]
            stream.readers.pop(_EXPECTED, None)
        try:
            while True:
                sent = False
                for number, stream in enumerate(state.streams):
                    if not view:
                        stream.readers[key] = at[number]
                    start, data = stream.read(at[number])
                    if data:
                        sent = True
                        at[number] = start + len(data)
                        if not view:
                            stream.readers[key] = at[number]
                        await state.notify()
                        yield Chunk(stream=number + 1, offset=start, data=data)
                if not sent:
                    async with state.changed:
                        if all(at[n] >= s.total for n, s in enumerate(state.streams)):
                            if state.done.is_set():
                                return
                            await state.changed.wait()
        finally:
            for stream in state.streams:
                stream.readers.pop(key, None)

    async def input(self, op: str, offset: int, data: bytes, eof: bool = False) -> int:
        state = self._op(op)
        if offset > state.stdin_at:
            return state.stdin_at
        new = data[state.stdin_at - offset :]
        state.stdin += new
        state.stdin_at += len(new)
        state.stdin_eof = state.stdin_eof or eof
        await state.notify()
        return state.stdin_at

    async def signal(self, op: str, signum: int, tree: bool = True) -> None:  # noqa: ARG002
        state = self._op(op)
        if not state.done.is_set() and state.task is not None:
            state.signal = signum
            state.task.cancel()

    async def resize(self, op: str, rows: int, cols: int) -> None:  # noqa: ARG002
        if not self._op(op).spec.tty:
            raise InvalidRequest("the operation has no terminal", field="op", value=op)

    async def files(self, request: FileRequest) -> FileReply:
        guest = self._alive()
        path = posixpath.normpath("/" + request.path.lstrip("/"))
        match request.verb:
            case "write":
                if posixpath.dirname(path) not in guest.dirs:
                    raise NotFound("no such directory", field="path", value=path)
                old = b"" if request.truncate else guest.files.get(path)
                if old is None and not request.create:
                    raise NotFound("no such file", field="path", value=path)
                old = (old or b"").ljust(request.offset, b"\0")
                data = old[: request.offset] + request.data + old[request.offset + len(request.data) :]
                if len(data) + sum(len(d) for p, d in guest.files.items() if p != path) > guest.plan.resources.disk:
                    raise SandboxError("No space left on device", field="path", value=path, reason="ENOSPC")
                guest.files[path] = data
                return FileReply(written=len(request.data))
            case "mkdir":
                guest.dirs.add(path)
                return FileReply()
            case "rename":
                guest.files[posixpath.normpath("/" + request.target.lstrip("/"))] = self._file(guest, path)
                del guest.files[path]
                return FileReply()
            case "chmod" | "chown" | "touch":
                self._stat(guest, path)
                return FileReply()
            case "remove":
                if path in guest.dirs:
                    guest.dirs.discard(path)
                    for name in [name for name in guest.files if name.startswith(path + "/")]:
                        del guest.files[name]
                else:
                    self._file(guest, path)
                    del guest.files[path]
                return FileReply()
            case "read":
                data = self._file(guest, path)[request.offset :]
                return FileReply(data=data[: request.length], eof=len(data) <= request.length)
            case "stat":
                return FileReply(stat=self._stat(guest, path))
            case "list":
                names = sorted(name for name in {*guest.files, *guest.dirs} - {"/"} if posixpath.dirname(name) == path)
                page = names[request.offset : request.offset + (request.length or 1000)]
                entries = tuple(self._stat(guest, name) for name in page)
                return FileReply(entries=entries, eof=request.offset + len(page) >= len(names))
        raise InvalidRequest("no such file operation", field="verb", value=request.verb)

    def _file(self, guest: FakeGuest, path: str) -> bytes:
        if path in guest.dirs:
            raise SandboxError("Is a directory", field="path", value=path, reason="EISDIR")
        if path not in guest.files:
            raise NotFound("no such file", field="path", value=path)
        return guest.files[path]

    def _stat(self, guest: FakeGuest, path: str) -> Stat:
        if path in guest.dirs:
            return Stat(name=posixpath.basename(path), kind="dir", mode=0o755)
        return Stat(name=posixpath.basename(path), kind="file", size=len(self._file(guest, path)), mode=0o644)

    async def ops(self) -> tuple[OpStatus, ...]:
        return tuple(state.status(op, False) for op, state in self._alive().ops.items())

    async def close(self) -> None:
        return None
