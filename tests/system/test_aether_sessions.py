"""Sessions of the guest: a shell that is kept, runs that are operations of their own, ends that no command can forge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsec.backends.guest.link import Link
from dsec.errors import Busy, Conflict, InvalidRequest, NotFound
from dsec.model import ExecSpec, OpStatus
from libdsec.session import PRELUDE, SHELLS
from tests.system.aether_box import Box, new_op

pytestmark = pytest.mark.needs("root", "guest")


@pytest_asyncio.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    box = await asyncio.to_thread(Box, state_dir)
    yield box
    await box.close()


class Shell:
    """One session on a link."""

    def __init__(self, link: Link) -> None:
        self.link, self.op = link, new_op()

    async def open(self, shell: str) -> Shell:
        await self.link.start(self.op, ExecSpec(argv=SHELLS[shell], session=True, background=True, tail=1 << 20))
        assert (await self.run(PRELUDE)).exit_code == 0
        return self

    async def begin(self, text: str, seconds: float = 0, **fields: object) -> str:
        op = new_op()
        await self.link.start(op, ExecSpec(argv=(text,), run_in=self.op, timeout_ms=int(seconds * 1000), **fields))  # type: ignore[arg-type]
        return op

    async def run(self, text: str, seconds: float = 0) -> OpStatus:
        return await self.link.wait(await self.begin(text, seconds), 20)

    async def out(self, text: str) -> tuple[int | None, bytes, bytes]:
        status = await self.run(text)
        assert not status.running
        return status.exit_code, status.stdout.data(), status.stderr.data()


@pytest_asyncio.fixture(params=["bash", "sh"])
async def shell(box: Box, request: pytest.FixtureRequest) -> Shell:
    return await Shell(box.link()).open(request.param)


async def test_state_persists_and_streams_are_each_commands_own(shell: Shell) -> None:
    """Directory, variables, functions and background jobs stay; each run has its own exit code and streams."""
    assert await shell.out("cd /tmp; export B=2; f() { echo f$1; }") == (0, b"", b"")
    assert await shell.out("pwd; echo $B; f x; echo err >&2; false") == (1, b"/tmp\n2\nfx\n", b"err\n")
    assert (await shell.run("sleep 100 & echo $!")).exit_code == 0
    assert (await shell.out("kill -0 $! && echo lives"))[1] == b"lives\n"
    assert (await shell.out("printf 'no newline'"))[1] == b"no newline"
    assert (await shell.out("echo 'it''s' \"$B\"\necho two lines"))[1] == b"its 2\ntwo lines\n"
    status = await shell.run("yes | head -c 3000000; echo e >&2")
    assert (status.stdout.total, status.stderr.data()) == (3_000_000, b"e\n")


async def test_nothing_that_a_command_does_is_taken_for_its_end(shell: Shell) -> None:
    """Printed marks, closed and redirected descriptors, read stdin, errors of syntax and options of the shell leave the session usable."""
    mark = "0" * 32
    tries = f"for f in 0 1 2 3 9 10 11 12; do (echo {mark} 7 >&$f); done 2>/dev/null"
    op = await shell.begin(f"echo {mark} 0; cat; {tries}; sleep 0.2; (exit 5)")
    for text in (f"echo {op} 9", f"echo {op} 9 >&2"):
        with pytest.raises(Busy):
            await shell.begin(text)
    assert (await shell.link.wait(op, 10)).exit_code == 5
    strange = ("if (", "echo $((1/0))", ". /missing", "cat <<", "shift 99", "exec 5>&1", "PS1='# '", "printf() { :; }")
    for text in (*strange, "set -e", "set -x", "set -u"):
        assert (await shell.run(text)).running is False, text
        assert (await shell.out("set +xu; echo well"))[1] == b"well\n", text
    assert (await shell.out("false; echo on"))[:2] == (0, b"on\n")
    assert (await shell.run("exec >&- 2>&-")).exit_code == 0
    assert (await shell.run("(exit 6)")).exit_code == 6


async def test_interrupt_keeps_the_session(shell: Shell) -> None:
    """SIGINT ends the command, its loops and functions with 130 and nothing else."""
    await shell.run("A=1; sleep 100 & f() { while :; do sleep 5; done; }")
    for text in ("sleep 50; echo after", "f; echo after", "while :; do :; done"):
        op = await shell.begin(text)
        await asyncio.sleep(0.15)
        await shell.link.signal(op, 2, False)
        status = await shell.link.wait(op, 5)
        assert (status.running, status.exit_code, status.stdout.data()) == (False, 130, b""), text
        assert (await shell.out("echo $A; kill -0 $! && echo job"))[1] == b"1\njob\n"


async def test_c09_a_timeout_ends_the_command_and_not_the_session(box: Box, shell: Shell) -> None:
    """What a command started is gone after its time-out, background jobs of earlier commands and the shell live on."""
    await shell.run("A=1; sleep 111 &")
    deaf = "sh -c 'trap \"\" INT; sleep 222 & setsid sleep 222; sleep 222'"
    for text in ("sleep 222; echo late", deaf, "trap '' INT; sleep 222; trap - INT"):
        began = time.monotonic()
        status = await shell.run(text, seconds=0.2)
        assert (status.running, status.timed_out) == (False, True)
        assert time.monotonic() - began < 2, text
        assert box.alive("sleep 222") == []
        assert (await shell.out("echo $A; kill -0 $! && echo job"))[1] == b"1\njob\n", text


async def test_a_shell_that_is_busy_itself_ends_with_its_timeout(box: Box, shell: Shell) -> None:
    """A loop that ignores SIGINT takes its session along, and that is told."""
    status = await shell.run("trap '' INT; while :; do :; done", seconds=0.2)
    assert (status.running, status.timed_out, status.signal) == (False, True, 9)
    with pytest.raises(Conflict, match="has ended"):
        await shell.begin("true")


@pytest.mark.parametrize(("text", "code"), [("exit 7", 7), ("set -e; false; echo on", 1), ("exec sh -c 'echo x; exit 3'", 3)])
async def test_the_shells_own_end_is_told_apart(shell: Shell, text: str, code: int) -> None:
    """A command that ends the shell gives its exit code; later ones are refused."""
    assert (await shell.run(text)).exit_code == code
    with pytest.raises(Conflict):
        await shell.begin("true")
    with pytest.raises(NotFound):
        await Shell(shell.link).begin("true")


async def test_what_a_session_cannot_be_is_refused_or_left_out(box: Box, shell: Shell) -> None:
    """A session has no terminal, a run has no stdin or terminal of its own, and only a session can be run in."""
    with pytest.raises(InvalidRequest):
        await shell.link.start(new_op(), ExecSpec(argv=SHELLS["sh"], session=True, background=True, tty=True))
    op = await shell.begin("cat; echo out; echo err >&2", tty=True, stdin=True)
    status = await shell.link.wait(op, 5)
    assert (status.stdout.data(), status.stderr.data(), status.kind) == (b"out\n", b"err\n", "run")
    plain = new_op()
    await shell.link.start(plain, ExecSpec(argv=("sleep", "9"), background=True))
    for wrong in (plain, "f" * 31 + "g", "", new_op()):
        with pytest.raises((NotFound, InvalidRequest)):
            await shell.link.start(new_op(), ExecSpec(argv=("true",), run_in=wrong or "short"))
    assert (await shell.out("echo well"))[1] == b"well\n"


async def test_the_record_is_read_by_offset(box: Box, shell: Shell) -> None:
    """All output of a session, of background jobs too, is kept within bounds under absolute offsets."""
    start = (await shell.link.wait(shell.op, 0)).stdout.total
    await shell.run("echo one; (sleep 0.1; echo late) &")
    await shell.run("echo two")
    await asyncio.sleep(0.3)
    seen = b""
    async for chunk in box.link().output(shell.op, (start, 0), view=True):
        seen += chunk.data if chunk.stream == 1 else b""
        if b"late" in seen:
            break
    assert seen == b"one\ntwo\nlate\n"


async def test_a_slow_reader_of_a_run_holds_it_back_and_loses_nothing(shell: Shell) -> None:
    """A followed run waits for its reader, whatever its size, and its end comes after its last byte."""
    op = await shell.begin("seq 1 300000", background=True, stream=True)
    data, first = b"", True
    async for chunk in shell.link.output(op):
        data += chunk.data
        if first:
            await asyncio.sleep(0.3)
            assert (await shell.link.wait(op, 0)).running
            first = False
    assert data == b"".join(b"%d\n" % n for n in range(1, 300_001))
    assert (await shell.link.wait(op, 5)).exit_code == 0
    assert (await shell.out("echo next"))[1] == b"next\n"


async def test_a_large_script_arrives_whole(shell: Shell) -> None:
    """Scripts of hundreds of KiB with quotes pass."""
    text = ": '" + 'it is"$x" ' * 20_000 + "'; echo done"
    assert (await shell.out(text))[:2] == (0, b"done\n")


async def test_several_read_one_stream(box: Box) -> None:
    """The newest reader holds the stream; the one before and a viewer look on and end with it."""
    link = box.link()
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "echo a; read x; seq 1 200000; echo end"), background=True, stream=True, stdin=True))

    async def read(view: bool) -> tuple[bytes, int]:
        data, gaps = b"", 0
        async for chunk in link.output(op, view=view):
            gaps += chunk.offset - len(data) - gaps if chunk.offset > len(data) + gaps else 0
            data += chunk.data
        return data, gaps

    tasks = [asyncio.ensure_future(read(view)) for view in (False, True, False)]
    await asyncio.sleep(0.2)
    await link.input(op, 0, b"\n")
    results = await asyncio.wait_for(asyncio.gather(*tasks), 20)
    whole = b"a\n" + b"".join(b"%d\n" % n for n in range(1, 200_001)) + b"end\n"
    assert results[2] == (whole, 0)
    for data, gaps in results[:2]:
        assert len(data) + gaps == len(whole)
        assert data.endswith(b"end\n")
