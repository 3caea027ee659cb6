"""One shell kept open, for agents that work as a person does: change directory, set variables, go on.

The shell lives in the sandbox (Chronus), not in this client: a session outlives its client and is taken up again by its id. Each
command is an operation of its own, with its own output, exit code and time-out; where it ends is told by the shell over a channel
that its commands do not hold, so nothing that they print, read, close or redirect can be taken for an end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from dsec.bus.messages import ExecReply, ExecRequest
from dsec.errors import Busy, Conflict, DeadlineExceeded, DsecError, InvalidRequest, NotFound, SandboxError
from dsec.model import ExecSpec, OpStatus
from libdsec.process import Process
from libdsec.results import ExecResult
from libdsec.spec import exec_spec, milliseconds, text

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

SCRIPT_LIMIT = 256 * 1024  # bytes of one command
ENDING = 2.0  # seconds in which a command that was killed is gone
RECORD = 1 << 20  # bytes of each stream that the sandbox keeps of a whole session
SHELLS: dict[str, tuple[str, ...]] = {"bash": ("bash", "--norc", "--noprofile"), "sh": ("/bin/sh",)}
# SIGINT gives up the running command, however deep it is in loops and functions, and not the shell. A trap cannot do that by
# itself: in bash it leaves one loop or function and has every later command skipped (extdebug) until the line that ends the run;
# in other shells the failure of a special builtin goes up to the `command eval` that the run is in.
PRELUDE = r"""
case ${BASH_VERSION:-} in
?*) trap '__dsec_code=130
    trap '\''[[ $BASH_COMMAND == *"trap - DEBUG"* ]] || { break 999; return 130; } 2>/dev/null'\'' DEBUG
    shopt -s extdebug; set -T; { break 999; return 130; } 2>/dev/null' INT ;;
*) trap '__dsec_code=130; . /dev/null/none 2>/dev/null; : "${__dsec_none:?interrupted}"' INT ;;
esac
"""


class Recorded(msgspec.Struct, frozen=True):
    """What is kept of a session's output from an offset on. ``gap`` bytes before ``data`` are not kept any more."""

    data: bytes
    next: int  # the offset to ask from the next time
    gap: int = 0

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Session:
    """Made by `Sandbox.session` and `Sandbox.attach_session`; an async context manager. One command at a time; `run` waits for its turn.

    ``id`` takes the session up again, from any client. A session that `Sandbox.session` opened ends with its block unless it was
    detached; one that was attached to goes on.
    """

    def __init__(self, sandbox: Sandbox, op: str, specs: tuple[ExecSpec, ...]) -> None:
        self.id = op
        self._sandbox = sandbox
        self._specs = specs
        self._turn = asyncio.Lock()
        self._keep = not specs
        self._current = ""
        self._over = ""

    async def __aenter__(self) -> Self:
        if not self._specs:
            if (await self.status()).kind != "session":
                raise InvalidRequest("this operation is no session", field="session", value=self.id, sandbox=self._sandbox.id)
            return self
        try:
            for spec in self._specs:
                try:
                    request = ExecRequest(op=self.id, spec=spec, wait_ms=0)
                    await self._sandbox._request("exec", request, ExecReply, timeout=30.0, each=5.0)
                    break
                except NotFound as error:
                    if error.field != "argv" or spec is self._specs[-1]:
                        raise
            await self.run(PRELUDE, timeout=20)
        except BaseException:
            await self._sandbox._kill_quietly(self.id)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._keep:
            await self.close()

    async def close(self) -> None:
        """End the shell and everything that it started."""
        self._over = self._over or "it was closed"
        if self._sandbox._gone is None:
            await self._sandbox._kill_quietly(self.id)
            with contextlib.suppress(DsecError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._sandbox._run(self.id, None)

    def detach(self) -> Session:
        """Let it live on after the block; `Sandbox.attach_session` with `id` takes it up again."""
        self._keep = True
        return self

    async def run(self, cmd: str, *, timeout: float | None = None, check: bool = False) -> ExecResult:
        """Run a shell command in the session; its directory, variables, functions and background jobs stay for the next.

        It reads from ``/dev/null``. After ``timeout`` seconds (None: the sandbox's default for an exec, 0: no limit) it is
        interrupted and what it started is killed; the result says ``timed_out``, and the session goes on. Only a shell that is
        busy itself and cannot be interrupted (it ignores SIGINT) ends with it. Cancelling does the same.

        ``set -e`` holds for the command that sets it. A command that ends the shell (``exit``, ``exec``) gives its exit code and
        ends the session; later runs raise `SandboxError`. Raises `Busy` while another client runs a command in this session.
        """
        async with self._turn:
            op, spec = self._run_spec(cmd, timeout)
            self._current = op
            try:
                status = await self._when_free(op, spec)
            except asyncio.CancelledError:
                await self._sandbox._kill_quietly(op)
                with contextlib.suppress(DsecError, TimeoutError):
                    async with asyncio.timeout(ENDING):  # the next run is not to find this one in its way
                        await self._sandbox._run(op, None)
                raise
            except (Conflict, NotFound) as error:
                raise await self._ended(error) from error
            finally:
                self._current = ""
        result = ExecResult.of(status)
        return result.check(cmd) if check else result

    async def _when_free(self, op: str, spec: ExecSpec) -> OpStatus:
        """A command that was killed a moment ago (a block that was left) may still be ending: wait a little for it."""
        until = asyncio.get_running_loop().time() + ENDING
        while True:
            try:
                return await self._sandbox._run(op, spec)
            except Busy as error:
                if error.field != "session" or asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(0.02)

    def start(self, cmd: str, *, timeout: float | None = 0) -> Process:
        """As `run`, with its output followed while it runs: ``async with shell.start(cmd) as process``."""
        op, spec = self._run_spec(cmd, timeout)
        return Process(self._sandbox, op, msgspec.structs.replace(spec, background=True, stream=True))

    async def interrupt(self) -> None:
        """SIGINT to the foreground, as Ctrl+C: the running command ends (130, unless it handles the signal), the session stays."""
        op = self._current or next((op.op for op in await self._sandbox.ops() if op.kind == "run" and op.running), "")
        if op:
            await self._sandbox._signal(op, 2, False)

    async def output(self, offset: int = 0, stream: Literal["stdout", "stderr"] = "stdout", limit: int = RECORD) -> Recorded:
        """What all commands and background jobs of the session wrote, from an absolute offset, as far as it is kept.

        Of each stream the first 64 KiB and the last MiB are kept. ``next`` of the answer is where to go on.
        """
        status = await self.status()
        wanted = 0 if stream == "stdout" else 1
        end = (status.stdout.total, status.stderr.total)[wanted]
        offsets = (offset, status.stderr.total) if wanted == 0 else (status.stdout.total, offset)
        if offset > end:
            raise InvalidRequest("is beyond what was written so far", field="offset", value=offset, fix=f"use at most {end}")
        parts: list[bytes] = []
        first, at = -1, offset
        if offset < end:
            async with Process(self._sandbox, self.id, None, offsets=offsets, view=True).detach() as process:
                async for event in process:
                    if event.stream != stream:
                        continue
                    if first < 0:
                        first = event.offset
                    elif event.gap:
                        break  # the beginning is kept, what follows is not: the next call begins behind it
                    parts.append(event.data)
                    at = event.offset + len(event.data)
                    if at >= end or at - first >= limit:
                        break
        return Recorded(b"".join(parts)[:limit], min(at, first + limit) if first >= 0 else end, max(0, first - offset))

    async def status(self) -> OpStatus:
        """Where the shell stands, without output. Raises `NotFound` for one that the sandbox does not know (any more)."""
        for op in await self._sandbox.ops():
            if op.op == self.id:
                return op
        raise NotFound("no such session", field="session", value=self.id, sandbox=self._sandbox.id, fix="see sandbox.sessions()")

    def _run_spec(self, cmd: str, timeout: float | None) -> tuple[str, ExecSpec]:
        from libdsec.sandbox import new_op

        if self._over:
            fix = "open another with sandbox.session()"
            raise SandboxError(f"this session has ended: {self._over}", sandbox=self._sandbox.id, fix=fix)
        script = text(cmd, "cmd", limit=SCRIPT_LIMIT, empty=True)
        limit = None if timeout is None else milliseconds(timeout, "timeout")
        return new_op(), ExecSpec(argv=(script or ":",), run_in=self.id, timeout_ms=limit)

    async def _ended(self, error: DsecError) -> DsecError:
        """What to raise when the shell is not there any more: how it ended."""
        if error.field != "session":
            return error
        how = "the sandbox does not know it"
        try:
            status = await self.status()
            how = f"the shell was killed by signal {status.signal}" if status.signal else f"the shell exited with {status.exit_code}"
        except (NotFound, DeadlineExceeded):
            pass
        self._over = self._over or how
        fix = "open another with sandbox.session()"
        return SandboxError(f"this session has ended: {how}", sandbox=self._sandbox.id, fix=fix)


def shell_specs(shell: str | None, *, cwd: str | None, env: Mapping[str, str] | None, user: str | None) -> tuple[ExecSpec, ...]:
    """What to start for a session, in order of preference. Raises `InvalidRequest` for a shell that is none."""
    names = (shell,) if shell else ("bash", "sh")
    made = []
    for name in names:
        argv = SHELLS["bash"] if name.rpartition("/")[2] == "bash" else SHELLS.get(name, (name,))
        argv = (name, *argv[1:]) if name.startswith("/") else argv
        spec = exec_spec(list(argv), cwd=cwd, env=env, user=user, timeout=0, background=True)
        made.append(msgspec.structs.replace(spec, session=True, tail=RECORD))
    return tuple(made)
