"""Checkpoints and forks with processes, by CRIU: they go on in each child by themselves, what cannot be kept is refused by its reason, and
nothing of a capture or a restore that failed is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.actors.up import Cluster
from dsec.errors import Unsupported
from libdsec import Client, Sandbox
from tests.system.small_cluster import client, cluster, sandbox
from tests.system.test_checkpoint import freed, text

__all__ = ["client", "cluster", "sandbox"]
pytestmark = [pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest", "criu"), pytest.mark.asyncio(loop_scope="module")]

# Fills memory with what only it knows, and counts in a file that it opens anew each time.
COUNTER = """
import os, time
held = bytearray(os.urandom(1 << 20) * {mib})
word = os.urandom(8).hex()
turn = 0
while True:
    turn += 1
    held[turn * 4096 % len(held)] = turn % 256
    with open("/root/count", "a") as file:
        file.write(f"{{word}} {{turn}}\\n")
    if turn == 1:
        print(word, flush=True)
    time.sleep(0.02)
"""
SERVER = """
import socket
listener = socket.create_server(("127.0.0.1", 8080))
print("ready", flush=True)
while True:
    peer, _ = listener.accept()
    peer.sendall(b"here")
    peer.close()
"""
# What a process sees of its walls.
LOOK = """
import os
STATUS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Groups", "Uid")
for name in ("status", "cgroup", "limits"):
    for line in open(f"/proc/self/{name}"):
        if name != "status" or line.split(":")[0] in STATUS:
            print(line, end="")
for line in sorted(open("/proc/self/mountinfo"), key=lambda line: line.split()[4]):
    print(line.split()[4], line.split()[5].split(",")[0], line.split(" - ")[1].split()[0])
for path in ("/", "/dev/null", "/dev/pts/ptmx", "/root"):
    print(path, os.stat(path).st_uid, oct(os.stat(path).st_mode))
def read(path):
    return open(path).read()
def write(path):
    return open(path, "w").write("x")
asks = {"/proc/1/fd/3": os.readlink, "/proc/acpi": os.listdir, "/proc/keys": read, "/proc/1/environ": read}
for path, ask in (asks | dict.fromkeys(("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/dev/null"), write)).items():
    try:
        print(path, ask(path))
    except OSError as error:
        print(error)
"""
WATCH = """
import ctypes, time
libc = ctypes.CDLL(None)
assert libc.inotify_add_watch(libc.inotify_init(), b"/root", 2) >= 0
print("on", flush=True)
time.sleep(999)
"""
STOPPED = """
import os, time
child = os.fork()
if not child:
    time.sleep(999)
os.kill(child, 19)
os.waitpid(child, os.WUNTRACED)
print("on", flush=True)
time.sleep(999)
"""
TRACE = """
import ctypes, os, time
child = os.fork()
if not child:
    time.sleep(999)
assert ctypes.CDLL(None).ptrace(0x4206, child, None, None) == 0
print("on", flush=True)
time.sleep(999)
"""
RENAMED = """
import os, time
held = open("/root/a", "w")
os.link("/root/a", "/root/b")
os.unlink("/root/a")
print("on", flush=True)
time.sleep(999)
"""
CALL = "import socket; print(socket.create_connection(('127.0.0.1', 8080), 5).recv(9).decode())"


async def begin(box: Sandbox, program: str) -> str:
    """Start a program in the background; its first line."""
    process = box.start(["python3", "-c", program])
    await process.__aenter__()
    async for event in process:
        return event.data.decode().strip()
    raise AssertionError("it ended")


async def last(box: Sandbox) -> tuple[str, int]:
    word, turn = (await text(box, "tail -n 1 /root/count")).split()
    return word, int(turn)


async def goes_on(box: Sandbox) -> tuple[str, int]:
    """Until its count has grown; the word it counts with, and where it is."""
    word, begun = await last(box)
    async with asyncio.timeout(30):
        while (now := await last(box))[1] <= begun:  # noqa: ASYNC110 - a process inside tells nobody
            await asyncio.sleep(0.02)
    assert now[0] == word
    return now


async def gone(cluster: Cluster, client: Client) -> None:
    """Until the node has no checkpoint, and nothing of one."""
    await freed(cluster, client)
    async with asyncio.timeout(30):
        while images(cluster):  # noqa: ASYNC110 - a node tells nobody
            await asyncio.sleep(0.02)


def images(cluster: Cluster) -> list[Path]:
    """What is left of captures on the node."""
    return list(cluster.dir.glob("edges/*/processes/*"))


async def test_a_fork_goes_on_in_each_child(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """Two children count on from where their parent was, each in its own file, under the parent's operation, with names, ids and groups
    of their own; a disk fork of the same sandbox has no such process; the parent goes on."""
    word = await begin(sandbox, COUNTER.format(mib=64))
    before = await goes_on(sandbox)
    async with await sandbox.fork(2, kind="memory") as children:
        assert not children.failed
        made = children.checkpoint
        assert (made.kind, made.processes > 64 << 20) == ("memory", True)
        names = set()
        ranges = {(await text(sandbox, "cat /proc/self/uid_map")).split()[1]}
        for child in children:
            assert (await goes_on(child))[0] == word
            assert [op.running for op in await child.ops()].count(True) == 1
            names.add(await text(child, "cat /proc/sys/kernel/hostname"))
            ranges.add((await text(child, "cat /proc/self/uid_map")).split()[1])
        assert (len(names), len(ranges)) == (2, 3)
        for each in (sandbox, *children):
            counted = (await text(each, "cat /root/count")).splitlines()
            assert counted == [f"{word} {turn}" for turn in range(1, len(counted) + 1)]
            assert len(counted) > before[1]
        await children.sandboxes[0].exec(
            'for s in /proc/[0-9]*/stat; do read p n x <$s; [ "$n" != "(python3)" ] || kill $p; done', check=True
        )
        await goes_on(children.sandboxes[1])
        await goes_on(sandbox)
    async with await sandbox.fork() as plain:
        assert not [op for op in await plain.sandboxes[0].ops() if op.running]
    await gone(cluster, client)


async def test_a_restored_sandbox_is_as_confined_as_any(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """Capabilities, filters, limits, mounts and groups of what is started in it are as in its parent; the agent's descriptors are out of
    reach; its loopback interface is up and a server that listened there is reached."""
    await begin(sandbox, SERVER)
    mine = await text(sandbox, f"python3 -c '{LOOK}' 2>&1")
    assert "Permission denied: '/proc/1/fd/3'" in mine
    async with await sandbox.fork(1, kind="memory") as children:
        child = children.sandboxes[0]
        assert (await text(child, f"python3 -c '{LOOK}' 2>&1")).splitlines() == mine.splitlines()
        assert await text(child, f'python3 -c "{CALL}"') == "here\n"
        assert await text(sandbox, f'python3 -c "{CALL}"') == "here\n"
        async with await child.fork(1, kind="memory") as second:  # of one that was restored itself
            assert await text(second.sandboxes[0], f'python3 -c "{CALL}"') == "here\n"
        await child.pause()
        assert await text(child, "echo awake") == "awake\n"
        async with child.session() as shell:
            assert (await shell.run("cd /root && pwd")).stdout.text == "/root\n"
    await gone(cluster, client)


async def test_what_cannot_be_kept_is_refused_with_its_reason(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """A watched file, and a sandbox that is paused: a typed refusal that says so, never a fork of files alone; it runs on."""
    await begin(sandbox, WATCH)
    with pytest.raises(Unsupported) as caught:
        await sandbox.fork(2, kind="memory")
    assert (caught.value.reason, "inotify" in str(caught.value)) == ("snapshot", True)
    assert await text(sandbox, "echo on") == "on\n"
    await sandbox.pause()
    with pytest.raises(Unsupported) as caught:
        await sandbox.checkpoint(kind="memory")
    assert caught.value.reason == "paused"
    await gone(cluster, client)
    assert [info.id for info in await client.list()] == [sandbox.id]


@pytest.mark.parametrize(("program", "word"), [(TRACE, "traced"), (STOPPED, "stopped"), (RENAMED, "a name that is gone")])
async def test_each_process_is_refused_with_its_reason(cluster: Cluster, client: Client, sandbox: Sandbox, program: str, word: str) -> None:
    """A debugger at work, a process that somebody has stopped, a file that has lost the name by which it was opened and not its others:
    the refusal says what would help, at once, and all go on."""
    await begin(sandbox, program)
    with pytest.raises(Unsupported) as caught:
        await sandbox.fork(1, kind="memory")
    assert (caught.value.reason, word in str(caught.value)) == ("snapshot", True)
    assert [op.running for op in await sandbox.ops()].count(True) == 1
    await gone(cluster, client)


async def test_an_edge_that_is_killed_in_the_middle_of_a_capture(cluster: Cluster, client: Client, sandbox: Sandbox) -> None:
    """The sandbox and its processes go on, the repeated request captures, a child outlives another death of the Edge; nothing is left."""
    edge = next(iter(cluster.edges.values()))
    word = await begin(sandbox, COUNTER.format(mib=64))
    await goes_on(sandbox)
    taking = asyncio.ensure_future(sandbox.checkpoint(kind="memory"))
    async with asyncio.timeout(30):
        while not images(cluster) and not taking.done():  # noqa: ASYNC110 - a node tells nobody
            await asyncio.sleep(0.005)
    await edge.kill()
    await edge.start()
    assert (await goes_on(sandbox))[0] == word
    made = await asyncio.wait_for(taking, 90)
    async with await client.restore(made, 1) as children:
        child = children.sandboxes[0]
        assert (await goes_on(child))[0] == word
        await edge.kill()
        await edge.start()
        assert (await goes_on(child))[0] == word
        assert len(images(cluster)) == 1
        await client.drop_checkpoints([made.id])
    async with asyncio.timeout(30):  # what the killed one had staged in the layer store is for `dsec layer gc`
        while images(cluster) or await client.checkpoints():  # noqa: ASYNC110 - a node tells nobody
            await asyncio.sleep(0.02)
    await goes_on(sandbox)
