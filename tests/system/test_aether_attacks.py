"""Root inside the sandbox against the agent: the listener, the agent's processes, the wire."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.guest import wire
from dsec.backends.guest.build import ensure
from dsec.backends.guest.link import Link
from dsec.errors import SandboxError
from dsec.model import ExecSpec
from tests.system.aether_box import Box, new_op, run, shell

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")

# Runs inside as root: tries each way to the listener (descriptor argv[1], socket path argv[2]) and prints what came of it.
ATTACK = r"""
import ctypes, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
fd, path, linger = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
got = {}
def tell(name, value):
    got[name] = value if value >= 0 else os.strerror(ctypes.get_errno())
def steal(pid, number):
    pidfd = libc.syscall(434, pid, 0)
    return libc.syscall(438, pidfd, number, 0)
taken = steal(1, fd)
tell("pidfd_getfd", taken)
others = [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
mine = [p for p in others if open(f"/proc/{p}/comm").read().startswith(("aether", "chronus"))]
got["supervisors"] = len(mine)
for p in mine:
    for number in range(3, 12):
        if steal(p, number) >= 0:
            got["stolen from a supervisor"] = number
tell("ptrace", libc.ptrace(0x4206, 1, 0, 0))
for name in ("mem", f"fd/{fd}", "environ", "map_files"):
    try:
        if name == "map_files":
            os.readlink("/proc/1/map_files/" + os.listdir("/proc/1/map_files")[0])
        else:
            os.open(f"/proc/1/{name}", os.O_RDONLY)
        got[name] = 1
    except OSError as error:
        got[name] = os.strerror(error.errno)
s = socket.socket(socket.AF_UNIX)
s.settimeout(2)
try:
    s.connect(path)
    s.sendall(bytes.fromhex(sys.argv[4]))
    got["connect"] = s.recv(100).hex()
except OSError as error:
    got["connect"] = "" if isinstance(error, (ConnectionResetError, BrokenPipeError)) else str(error)
print(json.dumps(got), flush=True)
if taken >= 0 and linger:  # become the agent in the eyes of the next who connects
    listener = socket.socket(fileno=taken)
    listener.settimeout(linger)
    while True:
        victim, _ = listener.accept()
        victim.sendall(bytes.fromhex("1400000001000000" "00000000" "01000100" "00000000" "0100000000000000" "01000000"))
"""


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    box = Box(state_dir)
    yield box
    await box.close()


def attack(box: Box, linger: float = 0) -> tuple[str, ...]:
    hello = wire.frame(wire.Type.HELLO, 1, wire.hello(99)).hex()
    return (sys.executable, "-c", ATTACK, str(box.fd), box.path, str(linger), hello)


async def test_root_inside_cannot_reach_the_listener(box: Box) -> None:
    """pidfd_getfd, ptrace, /proc and a connection by path all fail, on PID 1 and on the supervisors."""
    link = box.link()
    done = await run(link, *attack(box))
    assert done.exit_code == 0, done.stderr.data()
    got = json.loads(done.stdout.data())
    assert got.pop("supervisors") >= 1
    assert got.pop("connect") == "", "the agent speaks to peers outside of its pid namespace only"
    denied = {"Operation not permitted", "Permission denied"}
    assert {name: value for name, value in got.items() if value not in denied} == {}
    assert await link.ops(), "the agent is as before"


async def test_the_attack_works_without_the_hardening(state_dir: Path) -> None:
    """Negative control: a dumpable agent loses its listener, and the node finds the impostor out by the kernel's word."""
    program = ensure(extra=("-DAETHER_NEGATIVE_CONTROL",), tag="-dumpable")
    box = Box(state_dir, "--dumpable", program=program)
    try:
        link = box.link()
        op = new_op()
        await link.start(op, ExecSpec(argv=attack(box, linger=20), background=True))
        async for chunk in link.output(op):
            got = json.loads(chunk.data)
            break
        assert isinstance(got["pidfd_getfd"], int), got
        os.kill(box.pid, 19)  # the agent stands still: the thief is the one who accepts
        try:
            victim = Link(box.path, generation=1, expect_pid=lambda: box.pid, sandbox_id="t-box")
            with pytest.raises(SandboxError) as caught:
                await victim.ops()
            assert caught.value.reason == "impostor"
            fooled = Link(box.path, generation=1, expect_pid=None, request_timeout=1.0)
            opened = await fooled._open()
            assert not opened.closed, "without the check the node would speak to the thief"
            await fooled.close()
        finally:
            os.kill(box.pid, 18)
    finally:
        await box.close()


async def test_descriptors_do_not_leak_into_commands(box: Box) -> None:
    """A command has 0, 1 and 2 and nothing of the agent."""
    link = box.link()
    holders = [new_op() for _ in range(3)]
    for op in holders:
        await link.start(op, ExecSpec(argv=("cat",), stdin=True, background=True))
    done = await shell(link, "ls -1 /proc/self/fd; for p in $PPID; do grep -c . /proc/$p/maps; done")
    assert done.stdout.data().split()[:3] == [b"0", b"1", b"2"]
    assert done.stdout.data().split()[3:4] == [b"3"], "ls's own directory"
    inside = await shell(link, "cat /proc/self/status | grep -i sigblk; grep -i sigign /proc/self/status")
    assert inside.stdout.data().split() == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]


def dial(box: Box) -> socket.socket:
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(5)
    s.connect(box.path)
    return s


def say_hello(s: socket.socket) -> None:
    s.sendall(wire.frame(wire.Type.HELLO, 1, wire.hello(1)))
    assert wire.header(s.recv(12))[1] == wire.Type.HELLO
    s.recv(20)


async def test_hostile_frames_end_their_connection_only(box: Box) -> None:
    """Random bytes, mutated frames, huge lengths, half frames: the agent goes on and stays small."""
    link = box.link()
    await run(link, "true")
    dice = random.Random(7)
    op = os.urandom(16).hex()
    good = [
        (wire.Type.START, wire.start(op, ["true"], env={"A": "b"}, flags=wire.Start.NOTIFY)),
        (wire.Type.WAIT, wire.op_bytes(op)),
        (wire.Type.OUTPUT, wire.output(op, (0, 0), (1 << 20, 1 << 20))),
        (wire.Type.INPUT, wire.input_(op, 0, b"abc", True)),
        (wire.Type.SIGNAL, wire.signal(op, 0, True)),
        (wire.Type.RESIZE, wire.resize(op, 1, 1)),
        (wire.Type.FILE, wire.file("stat", "/")),
        (wire.Type.OPS, b""),
        (wire.Type.CREDIT, wire.OFFSETS.pack(1, 2)),
        (wire.Type.DETACH, b""),
    ]
    for turn in range(400):
        with dial(box) as s:
            if turn % 4:
                say_hello(s)
            raw = bytearray()
            for _ in range(dice.randrange(1, 6)):
                kind, body = dice.choice(good)
                piece = bytearray(wire.frame(kind, dice.randrange(5), body))
                if turn % 3 == 0 and kind != wire.Type.SIGNAL:
                    for _ in range(dice.randrange(1, 6)):
                        piece[dice.randrange(12 if turn % 2 else 8, len(piece)) if len(piece) > 12 else 11] = dice.randrange(256)
                raw += piece
            if turn % 5 == 0:
                raw = bytearray(dice.randbytes(dice.randrange(1, 2000)))
                raw[4:6] = b"\0\0"  # never STOP by chance
            try:
                s.sendall(raw[: dice.randrange(1, len(raw) + 1)])
                if turn % 2:
                    s.setblocking(False)
                    s.recv(4096)
            except OSError:
                pass
    for raw in (struct.pack("<IHHI", 1 << 30, 2, 0, 1), struct.pack("<IHHI", 65, 1, 0, 1), struct.pack("<IHHI", 0, 20, 0, 1)):
        with dial(box) as s:  # too long; too long before HELLO; STOP before HELLO
            s.sendall(raw)
            assert s.recv(100) == b""
    assert (await run(link, "echo", "alive")).stdout.data() == b"alive\n"
    assert box.rss() < 4 << 20


async def test_connections_are_bounded(box: Box) -> None:
    """Sixteen at most; the ones that never say HELLO are closed after five seconds, and the others live on."""
    link = box.link()
    await link.ops()
    idle = [dial(box) for _ in range(15)]
    await asyncio.sleep(0.1)
    with dial(box) as more:
        assert more.recv(1) == b""
    await asyncio.sleep(5.2)
    assert all(s.recv(1) == b"" for s in idle)
    for s in idle:
        s.close()
    assert (await run(link, "true")).exit_code == 0


async def test_half_frames_are_bounded_in_memory(box: Box) -> None:
    """Fifteen connections that each announce a megabyte and send all but the last byte."""
    link = box.link()
    await link.ops()
    held = []
    for _ in range(15):
        s = dial(box)
        say_hello(s)
        await asyncio.to_thread(s.sendall, struct.pack("<IHHI", 1 << 20, 2, 0, 1) + b"x" * ((1 << 20) - 1))
        held.append(s)
    await asyncio.sleep(0.2)
    assert box.rss() < 18 << 20
    for s in held:
        s.close()
    await asyncio.sleep(0.3)
    assert box.rss() < 2 << 20


async def test_an_idle_agent_is_small(box: Box) -> None:
    """A quarter of a MiB, file pages included, after some work."""
    link = box.link()
    for _ in range(20):
        await run(link, "true")
    await link.close()
    await asyncio.sleep(0.1)
    print(f"rss {box.rss() // 1024} KiB")
    assert box.rss() <= 512 << 10
