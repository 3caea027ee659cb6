"""One shell kept open, for agents that work as a person does: change directory, set variables, go on.

Each command is evaluated by the shell itself, with ``/dev/null`` as its input, and followed by a mark made of a nonce that the
command cannot guess; the mark carries the exit code and ends both streams.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dsec.errors import SandboxError
from dsec.model import Captured
from libdsec.process import Process
from libdsec.results import ExecResult, Output
from libdsec.spec import milliseconds, text

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

HEAD, TAIL = 64 * 1024, 256 * 1024  # bytes kept of each stream of each command


class Kept:
    """The beginning and the end of a stream, bounded while it runs."""

    def __init__(self, head: int = HEAD, tail: int = TAIL) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._limits = head, tail
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._limits[0] - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._limits[1]:
            del self._tail[: -self._limits[1]]

    def output(self) -> Output:
        return Output.of(Captured(head=bytes(self._head), tail=bytes(self._tail[-self._limits[1] :]), total=self._total))


class Scanner:
    """Splits a stream at its mark. Pure: feed bytes, get what belongs to the command and, at the end, what follows the mark."""

    def __init__(self, nonce: str) -> None:
        self._mark = f"\n{nonce} ".encode()
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, int | None]:
        """(output, exit code); the code is None until the whole mark ``\\n<nonce> <code>\\n`` has come."""
        data = self._held + data
        at = data.find(self._mark)
        if at >= 0:
            end = data.find(b"\n", at + len(self._mark))
            if end < 0:
                self._held = data[at:]
                return data[:at], None
            self._held = b""
            return data[:at], int(data[at + len(self._mark) : end])
        keep = 0
        for length in range(min(len(self._mark) - 1, len(data)), 0, -1):  # a mark may have begun at the end
            if self._mark.startswith(data[-length:]):
                keep = length
                break
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep], None

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return held


class Session:
    """Made by `Sandbox.session`; an async context manager. One command at a time; `run` waits for its turn."""

    def __init__(self, sandbox: Sandbox, *, cwd: str | None, env: Mapping[str, str] | None, user: str | None) -> None:
        self._process: Process = sandbox.start(["/bin/sh"], cwd=cwd, env=env, user=user, stdin=True)
        self._sandbox = sandbox
        self._turn = asyncio.Lock()
        self._over = ""

    async def __aenter__(self) -> Self:
        await self._process.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over = self._over or "it was closed"
        await self._process.__aexit__(kind, error, trace)

    async def run(self, cmd: str, *, timeout: float | None = None, check: bool = False) -> ExecResult:
        """Run a shell command in the session; its directory, variables and functions stay for the next.

        After ``timeout`` seconds (None: no limit), or when it is cancelled, the session is killed with everything that it
        started, since the state of an interrupted shell is not known; the result then says ``timed_out``. A command that ends
        the shell (``exit``) gives its exit code and ends the session. Later runs raise `SandboxError`.
        """
        script = text(cmd, "cmd", limit=512 * 1024, empty=True)
        limit = None if timeout is None else milliseconds(timeout, "timeout") / 1000
        async with self._turn:
            if self._over:
                fix = "open another with sandbox.session()"
                raise SandboxError(f"this session has ended: {self._over}", sandbox=self._sandbox.id, fix=fix)
            nonce = secrets.token_hex(16)
            # `command eval`: a syntax error is the command's exit code and does not end the shell.
            mark = f"printf '\\n%s %d\\n' {nonce} $__dsec"
            line = f"command eval {shlex.quote(script)} </dev/null\n__dsec=$?; {mark} >&2; {mark}\n"
            result = await self._collect(line, nonce, limit)
        return result.check(script) if check else result

    async def _collect(self, line: str, nonce: str, limit: float | None) -> ExecResult:
        loop = asyncio.get_running_loop()
        began = loop.time()
        kept = {"stdout": Kept(), "stderr": Kept()}
        scanners = {"stdout": Scanner(nonce), "stderr": Scanner(nonce)}
        codes: dict[str, int] = {}
        timed_out = False
        try:
            async with asyncio.timeout(limit):
                await self._process.write(line)
                async with aclosing(aiter(self._process)) as events:
                    async for event in events:
                        data, code = scanners[event.stream].feed(event.data)
                        if event.stream not in codes:
                            kept[event.stream].add(data)
                        if code is not None:
                            codes[event.stream] = code
                            if len(codes) == 2:
                                break
        except TimeoutError:
            timed_out = True
            self._over = f"a command ran longer than {limit} s"
            await self._process.kill()
        except BaseException:
            self._over = self._over or "a command was interrupted"
            await self._sandbox._kill_quietly(self._process.op)
            raise
        result = ExecResult(
            exit_code=codes.get("stdout", codes.get("stderr", -1)),
            stdout=Output(),
            stderr=Output(),
            duration=0.0,
        )
        if len(codes) < 2:
            for stream, scanner in scanners.items():
                kept[stream].add(scanner.rest())
            if not timed_out:
                result = await self._process.wait(5.0)
                self._over = f"the shell exited with {result.exit_code}"
        return ExecResult(
            exit_code=137 if timed_out else result.exit_code,
            stdout=kept["stdout"].output(),
            stderr=kept["stderr"].output(),
            duration=loop.time() - began,
            signal=9 if timed_out else result.signal,
            timed_out=timed_out,
            oom_killed=result.oom_killed,
            op=self._process.op,
        )
