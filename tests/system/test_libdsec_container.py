"""libdsec on real containers: sessions, terminals, files, and work that goes on while the Edge or the bus is killed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from libdsec import Client, DeadlineExceeded, InvalidRequest, NotFound, Sandbox, SandboxError
from tests.system.container_box import SMALL, client, cluster, comes_to, living, sandbox

__all__ = ["client", "cluster", "sandbox"]

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest"), pytest.mark.asyncio(loop_scope="module")]


async def test_session_keeps_its_shell(sandbox: Sandbox) -> None:
    """Directory, variables and functions stay; each command has its own exit code and streams; a syntax error ends nothing."""
    async with sandbox.session(env={"A": "1"}) as shell:
        assert (await shell.run("cd /tmp; export B=2; f() { echo f$1; }")).ok
        result = await shell.run("pwd; echo $A$B; f x; echo err >&2; false")
        assert (result.stdout, result.stderr, result.exit_code) == (b"/tmp\n12\nfx\n", b"err\n", 1)
        assert (await shell.run("if (")).exit_code != 0
        assert (await shell.run("cat; printf 'no newline'")).stdout == b"no newline"
        assert (await shell.run("echo 'it''s'; echo \"$B\"")).stdout == b"its\n2\n"
        assert (await shell.run("yes | head -c 3000000")).stdout.total == 3_000_000
        began = time.monotonic()
        assert (await shell.run("sleep 60 & echo started")).stdout == b"started\n"
        assert time.monotonic() - began < 1
        assert (await shell.run("exit 7")).exit_code == 7
        with pytest.raises(SandboxError, match="exited with 7"):
            await shell.run("true")
    async with sandbox.session() as shell:
        await shell.run("cd /tmp")
        result = await shell.run("sleep 60; echo late", timeout=0.3)
        assert (result.timed_out, result.stdout) == (True, b"")
        running = asyncio.ensure_future(shell.run("while :; do sleep 5; done"))
        await asyncio.sleep(0.2)
        await shell.interrupt()
        assert (await asyncio.wait_for(running, 5)).exit_code == 130
        running = asyncio.ensure_future(shell.run("sleep 63"))
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with shell.start("echo b; sleep 63") as process:
            assert await anext(process.stdout) == b"b\n"
        assert (await shell.run("echo c")).stdout == b"c\n"
        async with shell.start("echo a; sleep 0.1; pwd") as process:
            assert [line async for line in process.lines()] == ["a", "/tmp"]
        assert await living(sandbox, "sleep 63") == 0


async def test_a_session_survives_its_client(client: Client, cluster: Cluster, sandbox: Sandbox) -> None:
    """A detached session is found again by another client with its state, its background jobs and its recorded output."""
    async with sandbox.session(cwd="/tmp", env={"A": "1"}) as shell:
        await shell.run("export B=2; (sleep 0.3; echo late) & echo early")
        shell.detach()
    async with libdsec.connect(cluster.url) as other:
        again = await other.attach(sandbox.id)
        assert [op.op for op in await again.sessions()] == [shell.id]
        async with again.attach_session(shell.id) as found:
            assert (await found.run("echo $A$B; pwd")).stdout == b"12\n/tmp\n"
            await asyncio.sleep(0.4)
            record = await found.output()
            assert (record.data, record.gap) == (b"early\n12\n/tmp\nlate\n", 0)
            assert (await found.output(record.next)).data == b""
            assert (await found.output(6)).text == "12\n/tmp\nlate\n"
            await found.run("echo more")
            assert (await found.output(record.next)).data == b"more\n"
            await found.close()
        assert await again.sessions() == []
        with pytest.raises(NotFound):
            async with again.attach_session("0" * 32):
                pass


async def test_a_terminal_is_driven_by_expecting(sandbox: Sandbox) -> None:
    """Patterns are waited for across pieces; what follows a match stays; a pattern that does not come is an error with what came."""
    async with sandbox.terminal("read -p 'name? ' n; stty -echo; echo; read -p 'pass? ' p; echo; echo $n-$p; sleep 9") as process:
        await process.expect("name[?] ")
        await process.write("me\n")
        await process.expect("pass[?] ")
        await process.write("secret\n")
        assert (await process.expect(rb"(\w+)-(\w+)"))[2] == b"secret"
        with pytest.raises(DeadlineExceeded, match="never"):
            await process.expect("never", timeout=0.2)
        await process.write("\x03")
        with pytest.raises(SandboxError, match="ended before"):
            await process.expect("never", timeout=5)


async def test_c55_the_last_live_viewer_decides_the_size(client: Client, cluster: Cluster, sandbox: Sandbox) -> None:
    """Two look at a terminal: who resized last decides, and once it leaves or dies the other's size is back."""
    async with sandbox.terminal("while :; do stty size; sleep 0.05; done", rows=10, cols=20) as process:
        await process.expect("10 20")
        async with libdsec.connect(cluster.url) as other:
            async with (await other.attach(sandbox.id)).process(process.op) as viewer:
                await viewer.resize(30, 40)
                await process.expect("30 40")
                viewer.detach()
            await process.expect("10 20")
        dead = libdsec.connect(cluster.url)
        async with dead:
            async with (await dead.attach(sandbox.id)).process(process.op) as viewer:
                await viewer.resize(31, 41)
                await process.expect("31 41")
                assert viewer._keeper is not None
                viewer._keeper.cancel()  # it says nothing any more, as if its machine were gone
                await process.expect("10 20", timeout=15)
                viewer.detach()


async def test_several_look_at_one_terminal(client: Client, cluster: Cluster, sandbox: Sandbox) -> None:
    """Each viewer reads from its own offset; one that does not read holds nobody back but itself."""
    async with sandbox.start("echo first; read x; seq 1 100000; echo last; read x", tty=True) as writer:
        await writer.expect("first")
        async with sandbox.process(writer.op, view=True) as viewer, sandbox.process(writer.op, view=True) as idle:
            await viewer.expect("first")
            await writer.write("\n")
            await writer.expect("last", timeout=20)
            await viewer.expect("last", timeout=20)
            for process in (viewer, idle):
                process.detach()


async def test_c20_terminal_size(sandbox: Sandbox) -> None:
    """A resize is acknowledged, and the terminal has that size."""
    async with sandbox.start("stty size; read x; stty size", tty=True, rows=10, cols=33) as process:
        stdout = process.stdout
        assert await anext(stdout) == b"10 33\r\n"
        await process.resize(11, 44)
        await process.write("\n")
        assert b"11 44" in b"".join([data async for data in stdout])


async def test_c08_c11_background_children_do_not_hold(sandbox: Sandbox) -> None:
    """A background process that keeps stdout does not hold exec back, and lives on."""
    began = time.monotonic()
    result = await sandbox.exec("sleep 61 & setsid sleep 61 & echo done")
    assert result.stdout == b"done\n"
    assert time.monotonic() - began < 1
    assert await comes_to(sandbox, "sleep 61", 2)  # a child may still be on its way to become sleep


async def test_c10_cancel_kills_the_tree(sandbox: Sandbox) -> None:
    """Cancelling exec ends every process of the command."""
    task = asyncio.ensure_future(sandbox.exec("sh -c 'sleep 62 & sleep 62; true'; true"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await comes_to(sandbox, "sleep 62", 0)


async def test_signals_and_exit_codes(sandbox: Sandbox) -> None:
    """A signal by name reaches the process; its death is told as a shell would."""
    async with sandbox.start("trap 'echo got; exit 5' INT; echo up; while :; do sleep 0.05; done") as process:
        stdout = process.stdout
        assert await anext(stdout) == b"up\n"
        await process.signal("INT", tree=False)
        assert (await process.wait(5)).exit_code == 5
    assert (await sandbox.exec("kill -9 $$")).signal == 9
    with pytest.raises(NotFound):
        await sandbox.exec(["/no/such/program"])
    with pytest.raises(InvalidRequest):
        await sandbox.exec("true", cwd="relative")


@pytest.mark.parametrize("size", [0, 1, 18 * 1024 + 1, 120_000, 256 * 1024, 256 * 1024 + 1, 5_000_000])
async def test_c39_c40_files_of_every_size(sandbox: Sandbox, tmp_path: Path, size: int) -> None:
    """What is uploaded is there, whole: hashes agree on both sides and after the way back."""
    data = os.urandom(size)
    (tmp_path / "up").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    await sandbox.files.upload(tmp_path / "up", "/tmp/new/file")
    assert (await sandbox.exec(["python3", "-c", HASH, "/tmp/new/file"])).stdout.text.strip() == digest
    await sandbox.files.download("/tmp/new/file", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    assert await sandbox.files.read("/tmp/new/file") == data


HASH = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"


async def test_writing_keeps_what_a_file_is(sandbox: Sandbox) -> None:
    """Mode and owner of an existing file stay, a link is written through, /proc is read although it has no size."""
    await sandbox.exec("printf old > /tmp/script; chmod 755 /tmp/script; ln -s script /tmp/link", check=True)
    await sandbox.files.write("/tmp/link", "new")
    assert (
        await sandbox.exec("cat /tmp/script; stat -c ' %a' /tmp/script; stat -c %N /tmp/link")
    ).stdout.text == "new 755\n'/tmp/link' -> 'script'\n"
    await sandbox.exec("echo mine > /home/user/f; mkdir /tmp/closed; echo mine > /tmp/closed/f", check=True)
    await sandbox.exec(["python3", "-c", "import os; [os.chown(p, 1000, 1000) for p in ('/home/user/f', '/tmp/closed/f')]"], check=True)
    for path in ("/home/user/f", "/tmp/closed/f"):
        await sandbox.files.write(path, "edited by root")
        found = await sandbox.files.stat(path)
        assert (found.uid, found.gid, found.size) == (1000, 1000, 14)
    assert b"Name:" in await sandbox.files.read("/proc/self/status")
    assert not [entry.name for entry in await sandbox.files.list("/tmp/closed") if entry.name != "f"]
    await sandbox.files.as_user("user").write("/home/user/own", "x")
    assert (await sandbox.files.stat("/home/user/own")).uid == 1000


async def test_c26_full_disk_is_told(sandbox: Sandbox) -> None:
    """A write beyond the disk's limit is a typed error, names the path, and leaves no temporary file."""
    with pytest.raises(SandboxError, match="/tmp/full"):
        await sandbox.files.write("/tmp/full", bytes(80 << 20))
    assert "full" not in [entry.name for entry in await sandbox.files.list("/tmp")]
    assert not [entry.name for entry in await sandbox.files.list("/tmp") if entry.name.startswith(".full")]


async def test_c44_links_survive_and_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    """Trees go up and down with their links, absolute ones too; nothing is written through one."""
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/f").write_text("x")
    (tree / "a/b/f").chmod(0o755)
    (tree / "abs").symlink_to("/etc/passwd")
    (tree / "rel").symlink_to("a/b")
    await sandbox.files.upload(tree, "/tmp/tree")
    assert (
        await sandbox.exec("stat -c %N /tmp/tree/abs; cat /tmp/tree/rel/f; stat -c %a /tmp/tree/a/b/f")
    ).stdout == b"'/tmp/tree/abs' -> '/etc/passwd'\nx755\n"
    await sandbox.exec("mkdir /tmp/tree/d; ln -s /tmp /tmp/tree/d/out")
    await sandbox.files.download("/tmp/tree", tmp_path / "back")
    assert os.readlink(tmp_path / "back/abs") == "/etc/passwd"
    assert os.readlink(tmp_path / "back/d/out") == "/tmp"
    assert (tmp_path / "back/a/b/f").stat().st_mode & 0o777 == 0o755


async def test_output_and_exec_survive_a_killed_edge(client: Client, cluster: Cluster, sandbox: Sandbox) -> None:
    """The Edge is killed with -9 and started: the exec ends with its whole output, the stream loses and doubles nothing."""
    (edge,) = cluster.edges.values()
    slow = "i=0; while [ $i -lt 40 ]; do echo line $i; i=$((i+1)); sleep 0.05; done"
    wanted = "".join(f"line {n}\n" for n in range(40))
    running = asyncio.ensure_future(sandbox.exec(slow))
    pieces: list[tuple[int, bytes]] = []

    async def read() -> None:
        async with sandbox.start("seq 1 400000; sleep 1; seq 1 1000") as process:
            async for event in process:
                assert event.gap == 0
                pieces.append((event.offset, event.data))
                await asyncio.sleep(0.001)

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0.4)
    await edge.kill()
    await asyncio.sleep(0.3)
    await edge.start()
    async with asyncio.timeout(40):
        assert (await running).stdout.text == wanted
        await reading
    offset = 0
    for at, data in pieces:
        assert at == offset
        offset += len(data)
    text = "".join(f"{n}\n" for n in range(1, 400_001)) + "".join(f"{n}\n" for n in range(1, 1001))
    assert b"".join(data for _, data in pieces).decode() == text
    assert (await sandbox.exec("echo well")).stdout == b"well\n"


async def test_a_burst_survives_a_killed_edge(client: Client, cluster: Cluster) -> None:
    """The Edge is killed with -9 in the middle of a burst and started: every index ends with one sandbox that works, none is left over."""
    (edge,) = cluster.edges.values()
    async with client.burst(libdsec.spec("small", **SMALL), 24, deadline=60) as burst:
        await asyncio.sleep(0.15)
        await edge.kill()
        await asyncio.sleep(0.2)
        await edge.start()
        ready = await burst.wait()
        assert len({sandbox.id for sandbox in ready}) == 24
        assert {(await sandbox.exec("echo works")).stdout for sandbox in ready} == {b"works\n"}
        async with asyncio.timeout(15):
            while len(await client.list()) != 24:  # noqa: ASYNC110 - a cluster has no event for "nothing more happens"
                await asyncio.sleep(0.1)
    assert await client.list() == []


async def test_exec_survives_a_killed_bus(client: Client, cluster: Cluster, sandbox: Sandbox) -> None:
    """nats-server is killed and started in the middle of an exec: the result comes, and the sandbox is still ours."""
    running = asyncio.ensure_future(sandbox.exec("sleep 1; echo through"))
    await asyncio.sleep(0.3)
    cluster.nats.kill()
    await asyncio.sleep(0.5)
    await cluster.nats.start()
    async with asyncio.timeout(30):
        assert (await running).stdout == b"through\n"
    assert client._leases.holds(sandbox._id)
