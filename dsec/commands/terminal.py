"""Our terminal, joined to one in a sandbox as ssh joins them: `dsec shell`, `dsec attach`, `-t` of run and exec."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import termios
import tty
from typing import TYPE_CHECKING, Any, Self

import click

from dsec.commands import stdio
from dsec.commands.common import Settings, common, pairs, run
from dsec.commands.ids import SANDBOX
from dsec.commands.run import COMMAND, Runner, own_failures, strip_dashes

if TYPE_CHECKING:
    from libdsec import ExecResult, Process, Sandbox

END, DETACH, HELP = b".", b"d", b"?"
HELP_TEXT = "\r\n~.  end the command\r\n~d  detach and let it run on\r\n~~  a tilde\r\n"


class Detached(Exception):
    """The person has left; the command goes on."""


class Raw:
    """Standard input as a raw terminal. It is put right again on every end of ours, also by SIGKILL: then by a small shell that waits for
    it, since nothing of ours runs any more."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(0)
        script = 'trap "" INT TERM HUP; exec 4<&1; before=$(stty -g <&4); echo >&2; read -r _ && exit; stty "$before" <&4'
        wait, self._keep = os.pipe()
        ready, tell = os.pipe()
        try:  # a session of its own: signals of our terminal do not reach it
            self._guard = subprocess.Popen(["/bin/sh", "-c", script], stdin=wait, stdout=0, stderr=tell, start_new_session=True)
        finally:
            os.close(wait)
            os.close(tell)
        os.read(ready, 1)  # it has seen how the terminal was
        os.close(ready)
        tty.setraw(0, termios.TCSADRAIN)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)
            self._before = None
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._keep, b"\n")
            os.close(self._keep)
            self._guard.wait()
            self._guard = None


class Escapes:
    """``~.`` and its kin at the beginning of a line, as ssh has them. Pure: bytes in, (bytes to send, what is asked) out."""

    def __init__(self) -> None:
        self._line_start, self._tilde = True, False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        out = bytearray()
        for at in range(len(data)):
            byte = data[at : at + 1]
            if self._tilde:
                self._tilde = False
                if byte in (END, DETACH):
                    return bytes(out), byte
                if byte == HELP:
                    return bytes(out) + self.feed(data[at + 1 :])[0], HELP
                out += b"~" if byte == b"~" else b"~" + byte
                self._line_start = byte in (b"\r", b"\n")
            elif self._line_start and byte == b"~":
                self._tilde = True
                self._line_start = False
            else:
                out += byte
                self._line_start = byte in (b"\r", b"\n")
        return bytes(out), b""


def size() -> tuple[int, int]:
    """Rows and columns of our terminal; 24 by 80 where nobody says."""
    try:
        cols, rows = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    return rows or 24, cols or 80


async def interact(process: Process) -> ExecResult:
    """Both ways until the command ends. Raises `Detached`. Our terminal must be raw, the process entered."""
    from dsec.errors import DeadlineExceeded, DsecError, Unavailable

    loop = asyncio.get_running_loop()
    resized = asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    resized.set()

    async def follow_size() -> None:
        told = (0, 0)
        while True:
            await resized.wait()
            resized.clear()
            if size() != told:
                told = size()
                with contextlib.suppress(Unavailable, DeadlineExceeded):  # told with the next attaching
                    await process.resize(*told)

    async def type_in() -> None:
        escapes = Escapes()
        async for data in stdio.Blocks():
            data, asked = escapes.feed(data)
            if data:
                try:
                    await process.write(data)
                except (Unavailable, DeadlineExceeded):  # an outage: what was typed is lost, the terminal is not
                    sys.stderr.write("\a")
                    sys.stderr.flush()
            if asked == HELP:
                sys.stderr.write(HELP_TEXT)
                sys.stderr.flush()
            elif asked == DETACH:
                raise Detached
            elif asked == END:
                await process.kill()

    async def show() -> ExecResult:
        async for event in process:
            await asyncio.to_thread(stdio.write_all, 1, event.data)
        return await process.wait()

    showing = asyncio.ensure_future(show())
    sides = [asyncio.ensure_future(follow_size()), asyncio.ensure_future(type_in())]
    try:
        waiting = {showing, *sides}
        while not showing.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {showing}:
                error = task.exception()
                if error is not None and not isinstance(error, DsecError):  # a command may well end before what is typed
                    raise error
        return showing.result()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        for task in (showing, *sides):
            task.cancel()
        await asyncio.gather(showing, *sides, return_exceptions=True)


async def on_terminal(sandbox: Sandbox, processes: list[Process], *, keep: bool = False) -> int:
    """Enter the first of ``processes`` whose program is there, and be its terminal; the exit code. With ``keep`` it outlives us."""
    from dsec.errors import NotFound

    async with contextlib.AsyncExitStack() as stack:
        for process in processes:
            try:
                await stack.enter_async_context(process)
                break
            except NotFound as error:
                if error.field != "argv" or process is processes[-1]:
                    raise
        if keep:
            process.detach()
        try:
            with Raw():
                result = await interact(process)
        except Detached:
            process.detach()
            click.echo(f"\ndsec: it runs on; come back with: dsec attach {sandbox.id} {process.op}", err=True)
            return 0
    return result.exit_code & 0xFF


def need_terminal() -> None:
    if not os.isatty(0):
        raise click.UsageError("standard input is no terminal; use `dsec exec ID -- COMMAND` to run without one")


@click.command("shell", cls=Runner, context_settings=COMMAND)
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("-e", "--env", multiple=True, metavar="KEY[=VALUE]")
@click.option("-w", "--workdir", default=None)
@click.option("-u", "--user", default=None)
@common
def shell_command(
    settings: Settings, sandbox_id: str, command: tuple[str, ...], env: tuple[str, ...], workdir: str | None, user: str | None
) -> int:
    """A terminal in the sandbox ID, as with ssh: bash where it is there, else sh, or COMMAND. The exit code is the command's.

    \b
    dsec shell ID
    dsec shell ID -u user -- top
    Enter ~.  ends it    Enter ~d  leaves it running (see `dsec attach`)    Enter ~?  help
    """
    need_terminal()
    wanted = [list(strip_dashes(command))] if command else [["bash"], ["/bin/sh", "-i"]]
    variables = {"TERM": os.environ.get("TERM", "xterm")} | pairs(env, "-e", lookup=dict(os.environ))

    async def work() -> int:
        async with settings.connect() as client:
            sandbox = await client.attach(sandbox_id)
            rows, cols = size()
            processes = [sandbox.start(argv, env=variables, cwd=workdir, user=user, tty=True, rows=rows, cols=cols) for argv in wanted]
            return await on_terminal(sandbox, processes)

    return own_failures(lambda: run(work()), settings.json)


@click.command("attach")
@click.argument("sandbox_id", metavar="ID", type=SANDBOX)
@click.argument("op", required=False)
@click.option("--read-only", "view", is_flag=True, help="Only look on: nothing is typed, nobody waits for us.")
@common
def attach_command(settings: Settings, sandbox_id: str, op: str | None, view: bool) -> int:
    """Take up a command that runs in ID: what it has written comes first, as far as it is kept. It goes on when you leave.

    OP is an operation's id as `dsec ops ID` shows it; without it the one terminal that runs.

    \b
    dsec attach ID
    dsec attach ID OP --read-only
    """

    async def work() -> int:
        from dsec.errors import InvalidRequest, NotFound

        async with settings.connect() as client:
            sandbox = await client.attach(sandbox_id)
            known = {item.op: item for item in await sandbox.ops()}
            running = [item.op for item in known.values() if item.kind == "terminal" and item.running]
            if op is None and len(running) != 1:
                many = f"{len(running)} terminals run" if running else "no terminal runs"
                raise InvalidRequest(f"{many} in it; say which operation", field="OP", fix=f"see `dsec ops {sandbox_id}`")
            chosen = op or running[0]
            if chosen not in known:
                raise NotFound("no such operation", field="op", value=chosen, fix=f"see `dsec ops {sandbox_id}`")
            process = sandbox.process(chosen, view=view)
            if known[chosen].kind == "terminal" and known[chosen].running and not view:
                need_terminal()
                return await on_terminal(sandbox, [process], keep=True)
            async with process.detach():
                result = await stdio.attach(process, feed=False)
            return result.exit_code & 0xFF

    return own_failures(lambda: run(work()), settings.json)
