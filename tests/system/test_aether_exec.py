"""Commands through the real guest binary in a real pid namespace."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.guest import connection, wire
from dsec.backends.guest.link import Link
from dsec.errors import Conflict, DeadlineExceeded, Denied, DsecError, InvalidRequest, NotFound, SandboxGone, Unavailable
from dsec.model import ExecSpec, FileRequest
from tests.system.aether_box import Box, new_op, run, shell

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    box = Box(state_dir)
    yield box
    await box.close()


@pytest.fixture
def link(box: Box) -> Link:
    return box.link()


async def test_exit_codes_signals_and_both_streams(link: Link) -> None:
    """An exit code is a result, and so is a signal; stdout and stderr stay apart."""
    done = await shell(link, "echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.signal, done.stdout.data(), done.stderr.data()) == (3, None, b"out\n", b"err\n")
    done = await shell(link, "kill -SEGV $$")
    assert (done.exit_code, done.signal) == (None, signal.SIGSEGV)
    assert (await run(link, "true")).exit_code == 0


async def test_environment_directory_and_user(link: Link) -> None:
    """The sandbox's environment, then what the user implies, then the operation's own."""
    done = await run(link, "sh", "-c", "echo $MARK $A $HOME $USER; pwd; id -u; id -G", env={"A": "b"}, cwd="/usr", user="nobody")
    assert done.stdout.data() == b"of-the-sandbox b /nonexistent nobody\n/usr\n65534\n65534\n"
    done = await run(link, "id", "-u", user="1234:0")
    assert done.stdout.data() == b"1234\n"
    done = await run(link, "sh", "-c", "id -g", user="daemon:games")
    assert done.stdout.data() == b"60\n"


@pytest.mark.parametrize("user", ["root", "nobody"])
async def test_a_command_may_use_every_core(box: Box, link: Link, user: str) -> None:
    """Where a command's process begins binds neither it nor the agent to that core."""
    script = "grep Cpus_allowed_list: /proc/self/status"
    mine = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Cpus_allowed_list:"))
    for _ in range(2):
        assert (await run(link, "sh", "-c", script, user=user)).stdout.data() == f"{mine}\n".encode()
    assert mine in Path(f"/proc/{box.pid}/status").read_text().splitlines()


async def test_a_wrong_user_or_directory_is_named_with_a_fix(box: Box, link: Link, state_dir: Path) -> None:
    """Field, value and fix; the value is the sandbox's own where the order leaves it out. A user is looked up, so no errno is told."""
    with pytest.raises(NotFound) as caught:
        await run(link, "id", user="nosuch")
    assert (caught.value.field, caught.value.value, caught.value.message) == ("user", "nosuch", "no such user")
    assert "number" in caught.value.fix
    own = Link(box.path, generation=1, expect_pid=lambda: box.pid, sandbox_id="t-box", defaults={"cwd": "/from-the-spec", "user": "x"})
    error = own._error(wire.Error(wire.Code.INVALID, errno.ENOTDIR, "cwd", "cannot enter the directory"), {"cwd": ""})
    assert (error.value, error.message) == ("/from-the-spec", "cannot enter the directory: Not a directory")
    assert error.fix
    with pytest.raises(NotFound) as caught:
        await run(link, "true", cwd=str(state_dir / "none"))
    assert (caught.value.field, caught.value.value) == ("cwd", str(state_dir / "none"))


async def test_the_operations_own_path_is_searched(link: Link, state_dir: Path) -> None:
    """PATH of the operation, not of the agent, finds the command."""
    (state_dir / "only-here").write_text("#!/bin/sh\necho found\n")
    (state_dir / "only-here").chmod(0o755)
    assert (await run(link, "only-here", env={"PATH": f"{state_dir}:/bin"})).stdout.data() == b"found\n"
    with pytest.raises(NotFound):
        await run(link, "only-here")


@pytest.mark.parametrize(
    ("spec", "error", "field"),
    [
        ({"argv": ("no-such-command",)}, NotFound, "argv"),
        ({"argv": ("/etc/passwd",)}, Denied, "argv"),
        ({"argv": ("/etc",)}, Denied, "argv"),
        ({"argv": ("true",), "user": "no-such-user"}, NotFound, "user"),
        ({"argv": ("true",), "user": "root:no-such-group"}, NotFound, "user"),
        ({"argv": ("true",), "cwd": "/no/such/dir"}, NotFound, "cwd"),
        ({"argv": ("true",), "cwd": "/etc/passwd"}, NotFound, "cwd"),
        ({"argv": ("true",), "cwd": "/root", "user": "nobody"}, Denied, "cwd"),
        ({"argv": ("true", "x" * 200_000)}, InvalidRequest, "argv"),
        ({"argv": ("true", "x" * 1_100_000)}, InvalidRequest, "argv"),
        ({"argv": ("true", "a\0b")}, InvalidRequest, "argv"),
    ],
)
async def test_a_start_that_fails_names_its_field(link: Link, spec: dict[str, object], error: type[DsecError], field: str) -> None:
    """A command that cannot start is a typed error and not exit code 127; the same id may be used again."""
    op = new_op()
    with pytest.raises(error) as caught:
        await link.start(op, ExecSpec(**spec))  # type: ignore[arg-type]
    assert (caught.value.field, caught.value.sandbox) == (field, "t-box")
    await link.start(op, ExecSpec(argv=("true",)))
    assert (await link.wait(op, 5)).exit_code == 0


async def test_a_missing_interpreter_is_told_apart(link: Link, state_dir: Path) -> None:
    """The file is there but not what runs it: the message says so instead of "no such file" alone."""
    script = state_dir / "script"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    with pytest.raises(NotFound, match="interpreter or loader is missing") as caught:
        await run(link, str(script))
    assert caught.value.field == "argv"
    (state_dir / "text").write_text("no program\n")
    (state_dir / "text").chmod(0o755)
    with pytest.raises(InvalidRequest, match="Exec format error"):
        await run(link, str(state_dir / "text"))


async def test_the_same_id_starts_nothing_twice(link: Link, state_dir: Path) -> None:
    """A repeated START answers where the operation stands, also after its end."""
    op, spec = new_op(), ExecSpec(argv=("sh", "-c", f"echo x >>{state_dir}/count; sleep 0.2"))
    await asyncio.gather(*(link.start(op, spec) for _ in range(5)))
    assert (await link.wait(op, 5)).exit_code == 0
    again = await link.start(op, spec)
    assert not again.running
    assert (await link.wait(op, 5)).exit_code == 0
    assert (state_dir / "count").read_text() == "x\n"


async def test_an_agent_that_is_stopped_is_told_soon(box: Box, link: Link) -> None:
    """Silence of the agent is `Unavailable` after its own short time, on an open connection and on a new one; later it works again."""
    held = Link(box.path, generation=1, expect_pid=lambda: box.pid, frozen=lambda: True, request_timeout=2.0)
    box.links.append(held)
    for each in (link, held):
        await shell(each, "true")
        each.silence = 0.4
    os.kill(box.pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(Unavailable, match="has not answered for") as caught:
                await shell(link, "true")
            assert caught.value.reason == "agent_silent"
            await link.close()
        with pytest.raises(DeadlineExceeded):  # its sandbox is held still by its own node: not the agent's fault
            await shell(held, "true")
    finally:
        os.kill(box.pid, signal.SIGCONT)
    link.silence = 20.0
    assert (await shell(link, "true")).exit_code == 0


async def test_an_answer_may_take_long_where_the_agent_is_there(box: Box, link: Link) -> None:
    """A worker that stands still, as over a layer whose bytes are on the way, is no silence of the agent."""
    stat = FileRequest(verb="stat", path="/")
    await link.files(stat)
    link.silence = 4.0
    workers = [pid for pid, _, line in box.processes() if "aether" in line]
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    slow = asyncio.ensure_future(link.files(stat))
    await asyncio.sleep(5.0)
    assert not slow.done()
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    assert (await slow).stat is not None


async def test_many_run_at_once(link: Link) -> None:
    """Fifty commands on one connection, each with its own answer."""
    results = await asyncio.gather(*(shell(link, f"sleep 0.1; echo {i}; exit {i}") for i in range(50)))
    assert [(r.exit_code, r.stdout.data()) for r in results] == [(i, b"%d\n" % i) for i in range(50)]


async def test_c08_a_background_process_does_not_hold_the_exec(box: Box, link: Link) -> None:
    """``sleep 60 &`` and nohup return in less than a second; the process lives on, also when it goes on writing."""
    begun = time.monotonic()
    done = await shell(link, "nohup sleep 61.5 & (while sleep 0.05; do echo tick; done) & echo started")
    assert time.monotonic() - begun < 1
    assert done.exit_code == 0
    assert b"started\n" in done.stdout.data()
    await asyncio.sleep(0.4)
    assert box.alive("sleep 61.5")
    assert box.alive("echo tick"), "a write into the old pipe must not kill it"


async def test_c09_a_timeout_ends_the_whole_tree(box: Box, link: Link, state_dir: Path) -> None:
    """Children, setsid children, double forks and processes that ignore SIGTERM are gone, and none writes later."""
    late = state_dir / "late"
    text = f"""
        trap '' TERM HUP INT
        (setsid sh -c 'sleep 1; echo a >>{late}' &)
        setsid setsid sh -c 'trap "" TERM; (while :; do sleep 0.3; done; echo b >>{late}) & wait' &
        sh -c 'sleep 1.1; echo c >>{late}' & sleep 77.7; echo d >>{late}"""
    begun = time.monotonic()
    done = await shell(link, text, timeout_ms=300)
    assert 0.25 < time.monotonic() - begun < 2
    assert (done.timed_out, done.exit_code, done.signal) == (True, None, signal.SIGKILL)
    assert [entry for entry in box.processes() if entry[1] not in "ZX"] == []
    await asyncio.sleep(1.2)
    assert not late.exists()


async def test_c09_a_timeout_ends_a_tree_that_forks_all_the_time(box: Box, link: Link) -> None:
    """A fork loop (of a user with a process limit, as a sandbox has one) loses the race with the walk."""
    text = "f() { (sleep 0.01; f) & (sleep 0.02; f) & wait; }; (f 2>/dev/null) & sleep 88.8"
    done = await run(link, "prlimit", "--nproc=150", "sh", "-c", text, timeout_ms=400, user="54321")
    assert done.timed_out
    await asyncio.sleep(0.2)
    assert [entry for entry in box.processes() if entry[1] not in "ZX"] == []


async def test_c09_a_process_whose_first_thread_has_ended_is_found(box: Box, link: Link, state_dir: Path) -> None:
    """/proc shows it as a zombie while its other threads and its children work on."""
    text = f"""
import ctypes, os, threading, time
def work():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1)
        open("{state_dir}/late-child", "w")
        os._exit(0)
    time.sleep(1)
    open("{state_dir}/late-thread", "w")
threading.Thread(target=work).start()
time.sleep(0.05)
ctypes.CDLL(None).syscall({60 if os.uname().machine == "x86_64" else 93}, 0)
"""
    done = await shell(link, f"{sys.executable} -c '{text}' & sleep 22.2", timeout_ms=500)
    assert done.timed_out
    await asyncio.sleep(1.1)
    assert not list(state_dir.glob("late-*"))
    assert box.processes() == []


async def test_c10_a_kill_from_outside_ends_the_tree(box: Box, link: Link) -> None:
    """What a cancelled client asks for: SIGKILL to the whole tree."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "setsid sleep 66.6 & sleep 66.6")))
    await asyncio.sleep(0.1)
    await link.signal(op, signal.SIGKILL)
    assert (await link.wait(op, 5)).signal == signal.SIGKILL
    assert box.alive("66.6") == []
    with pytest.raises(Conflict):
        await link.signal(op, signal.SIGTERM)


async def test_a_signal_reaches_the_command_or_its_tree(link: Link) -> None:
    """``tree=False`` is for the command alone; a handler sees it."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.05; done")))
    await asyncio.sleep(0.2)
    await link.signal(op, signal.SIGUSR1, tree=False)
    done = await link.wait(op, 5)
    assert (done.exit_code, done.stdout.data()) == (5, b"ready\ngot\n")


async def test_c11_a_setsid_child_that_holds_stdout_does_not_delay_the_deadline(link: Link) -> None:
    """The exec returns by its deadline whoever holds the pipe."""
    begun = time.monotonic()
    done = await shell(link, "setsid sleep 55.5 & sleep 55.5", timeout_ms=300)
    assert done.timed_out
    assert time.monotonic() - begun < 1.5


async def test_c12_a_timeout_is_a_flag_and_not_an_exit_code(link: Link) -> None:
    """A command that exits with 124 has not timed out."""
    done = await shell(link, "exit 124", timeout_ms=5000)
    assert (done.exit_code, done.timed_out) == (124, False)


async def test_c13_a_background_operation_has_no_timeout_of_its_own(link: Link) -> None:
    """It runs until it ends, and can be asked about from another connection."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "sleep 0.6; exit 9"), background=True))
    link.hang_up()
    assert (await link.wait(op, 0.05)).running
    assert (await link.wait(op, 5)).exit_code == 9


async def test_a_frozen_sandbox_does_not_time_out(box: Box, link: Link) -> None:
    """While the agent stood still the clocks of its operations stood still."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sleep", "3.3"), timeout_ms=2000))
    await asyncio.sleep(0.1)
    os.kill(box.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(3.0)
    finally:
        os.kill(box.pid, signal.SIGCONT)
    done = await link.wait(op, 10)
    assert (done.exit_code, done.timed_out) == (0, False)


async def test_stdin_by_offset(link: Link) -> None:
    """Repeats are harmless, gaps are told, a large input is taken piece by piece, EOF ends it."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "sleep 0.2; exec sha256sum"), stdin=True))
    data = os.urandom(1_000_000)
    assert await link.input(op, 500, b"x") == 0, "a gap is not taken"
    at = await link.input(op, 0, data[:1000])
    assert at == 1000
    assert await link.input(op, 0, data[:1000]) == 1000
    while at < len(data):
        at = await link.input(op, at, data[at:], eof=True)
    done = await link.wait(op, 10)
    import hashlib

    assert done.stdout.data().split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_no_stdin_is_dev_null(link: Link) -> None:
    """A command that reads stdin ends at once."""
    assert (await run(link, "cat")).exit_code == 0
    op = new_op()
    await link.start(op, ExecSpec(argv=("sleep", "5")))
    with pytest.raises(InvalidRequest):
        await link.input(op, 0, b"x")
    await link.signal(op, 9)


async def test_c20_a_resize_is_acknowledged_and_seen(link: Link) -> None:
    """``stty size`` agrees; before, it was what START said."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "stty size; read x; stty size"), tty=True, rows=11, cols=22))
    await asyncio.sleep(0.1)
    await link.resize(op, 33, 44)
    await link.input(op, 0, b"\n")
    done = await link.wait(op, 5)
    assert done.stdout.data().replace(b"\r", b"").split() == [b"11", b"22", b"33", b"44"]


async def test_unused_connections_are_few(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many links have been used, few connections stay open; one that runs something stays, and all can be used again."""
    monkeypatch.setattr(connection, "MOST_IDLE", 4)
    busy = box.link()
    op = new_op()
    await busy.start(op, ExecSpec(argv=("/bin/sleep", "30")))
    waiting = asyncio.ensure_future(busy.wait(op, 30))
    await asyncio.sleep(0)
    links = [box.link() for _ in range(12)]
    for link in links:
        await link.ops()
        assert sum(each.connected for each in links) <= 4
    assert links[-1].connected
    assert busy.connected
    await links[0].signal(op, 9)
    assert (await asyncio.wait_for(waiting, 10)).signal == 9


async def test_c18_a_quiet_terminal_stays(box: Box) -> None:
    """Idle links close (accelerated); the terminal and its shell do not notice."""
    link = box.link(idle_seconds=0.2)
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh",), tty=True, background=True))
    await asyncio.sleep(1.0)
    assert not link.connected
    await link.input(op, 0, b"echo still-$((40+2)); exit 6\n")
    done = await link.wait(op, 5)
    assert done.exit_code == 6
    assert b"still-42" in done.stdout.data()


async def test_c21_a_thousand_orphans_are_reaped(box: Box, link: Link) -> None:
    """PID 1 leaves no zombie."""
    done = await shell(link, "i=0; while [ $i -lt 1000 ]; do (sleep 0.02 &) ; i=$((i+1)); done; echo made")
    assert done.stdout.data() == b"made\n"
    for _ in range(100):
        if not box.processes():
            return
        await asyncio.sleep(0.05)
    assert box.processes() == []


async def test_c45_a_missing_workdir_is_made_for_the_user(state_dir: Path) -> None:
    """The run-as user owns it and works there."""
    state_dir.chmod(0o755)
    box = Box(state_dir, "--user", "nobody", "--workdir", f"{state_dir}/a/work")
    try:
        done = await shell(box.link(), "id -un; pwd; echo x >mine")
        assert done.stdout.data().decode() == f"nobody\n{state_dir}/a/work\n"
        assert done.exit_code == 0
        assert (state_dir / "a/work/mine").stat().st_uid == 65534
    finally:
        await box.close()


async def test_the_highest_generation_wins(box: Box) -> None:
    """A newer Edge closes the older one's connection; the older is refused from then on."""
    old, new = box.link(1), box.link(2)
    assert await old.ops() == ()
    await new.ops()
    with pytest.raises(Conflict) as caught:
        await old.ops()
    assert caught.value.reason == "stale_generation"
    assert await new.ops() == ()


async def test_shutdown_ends_the_namespace(box: Box, link: Link) -> None:
    """STOP kills everything and the init exits; from then on nobody listens."""
    await link.start(new_op(), ExecSpec(argv=("sleep", "44.4"), background=True))
    await link.shutdown()
    assert box.unshare.wait(5) == 0
    with pytest.raises(SandboxGone):
        await link.ops()


async def test_signals_from_inside_do_not_reach_the_agent(link: Link) -> None:
    """Root inside cannot kill, stop or upset PID 1."""
    done = await shell(link, "for s in TERM KILL STOP INT HUP USR1 CHLD PIPE; do kill -$s 1; done; echo sent")
    assert done.stdout.data() == b"sent\n"
    assert (await run(link, "true")).exit_code == 0


async def test_a_supervisor_that_is_killed_from_inside_is_told(link: Link) -> None:
    """Root inside may break its own operation; it ends as killed and nothing hangs."""
    done = await shell(link, "kill -KILL $PPID; sleep 0.3")
    assert done.signal == signal.SIGKILL
    assert (await run(link, "true")).exit_code == 0


async def test_a_stopped_supervisor_does_not_outlive_a_timeout(box: Box, link: Link) -> None:
    """Root inside stops the supervisor; the time-out starts it again and the tree ends."""
    done = await shell(link, "kill -STOP $PPID; sleep 33.3", timeout_ms=300)
    assert done.timed_out
    assert done.duration_ms < 3000
    assert box.alive("33.3") == []


async def test_a_wait_that_times_out_says_running(link: Link) -> None:
    """The status so far, with the bytes counted so far; the wait can be repeated."""
    op = new_op()
    await link.start(op, ExecSpec(argv=("sh", "-c", "echo abc; sleep 0.4")))
    status = await link.wait(op, 0.15)
    assert (status.running, status.exit_code, status.stdout.total) == (True, None, 4)
    assert status.pid > 1
    assert (await link.wait(op, 5)).stdout.data() == b"abc\n"


@pytest.mark.parametrize("loop_factory", ["asyncio", "uvloop"])
def test_the_link_works_on_both_loops(state_dir: Path, loop_factory: str) -> None:
    """Handshake, exec, a stream and a file on asyncio and on uvloop; the socket's path is longer than sun_path."""
    deep = state_dir / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)

    async def main() -> None:
        box = Box(state_dir)
        try:
            os.rename(box.path, deep / "socket")
            box.path = str(deep / "socket")
            link = box.link()
            assert (await shell(link, "echo hi")).stdout.data() == b"hi\n"
            op = new_op()
            await link.start(op, ExecSpec(argv=("head", "-c", "5000000", "/dev/zero"), stream=True))
            assert sum([len(chunk.data) async for chunk in link.output(op)]) == 5_000_000
            assert len(await link.ops()) == 2
        finally:
            await box.close()

    factory = pytest.importorskip("uvloop").new_event_loop if loop_factory == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
