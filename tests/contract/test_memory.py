"""Captures and restores of processes that fail half-way, over the container backend: the sandbox goes on, and nothing is left."""

from __future__ import annotations

import array
import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec import syscalls
from dsec.backends import criu
from dsec.backends.base import Instance, LaunchPlan, PackOrder, Undone
from dsec.backends.capture import in_namespace_of
from dsec.backends.guest import wire
from dsec.errors import Unsupported
from dsec.layers.store import LayerStore
from dsec.model import MIB, ExecSpec, LayerRef, PackedLayer
from tests.contract.test_pack import ROOMY, Shelves
from tests.fixtures_backend import MakeYard, Yard, sh

pytestmark = [pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest", "criu")]
OP = "5" * 32
COUNTER = "n=0; while :; do n=$((n+1)); echo $n >/root/n; sleep 0.02; done"
NAME = "checkpoint/t/1"


@pytest.fixture
def yard(leftovers: object, make_yard: MakeYard) -> Yard:
    return make_yard("container")


@pytest_asyncio.fixture
async def backend(yard: Yard, state_dir: Path) -> AsyncIterator[Any]:
    assert yard.mount is not None
    yard.layers = Shelves(yard.mount, LayerStore(state_dir / "layers"))
    yield await yard.backend(disk_store_bytes=512 * MIB)


@pytest_asyncio.fixture
async def box(yard: Yard, backend: Any) -> AsyncIterator[Any]:
    box = await backend.launch(yard.plan(backend.node, resources=ROOMY))
    await box.link.start(OP, ExecSpec(argv=("/bin/sh", "-c", COUNTER), background=True))
    yield box
    await box.stop()


async def captured(backend: Any, box: Instance) -> PackedLayer:
    order = PackOrder(name=NAME, whole=True, processes=backend.snapshots.place(NAME))
    return await box.pack_diff(order, False, lambda: None)


def standing_on(yard: Yard, backend: Any, layer: PackedLayer, below: LaunchPlan, **fields: Any) -> LaunchPlan:
    lowers = (LayerRef(name=layer.name, digest=layer.digest), *below.lowers)
    plan = yard.plan(backend.node, resources=ROOMY, **fields)
    return msgspec.structs.replace(plan, lowers=lowers, processes=backend.snapshots.place(NAME))


async def goes_on(box: Instance) -> int:
    """Until its count has grown; where it is."""
    begun = ""
    async with asyncio.timeout(30):
        while True:
            code, now, _ = await sh(box, "cat /root/n")
            if code == 0 and now.strip() and begun and now != begun:
                return int(now)
            begun = now.strip() and now
            await asyncio.sleep(0.03)


def hooked(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    """CRIU calls ``script`` at each step of a dump."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    plain = criu.dump_command
    monkeypatch.setattr(criu, "dump_command", lambda *args: [*plain(*args), "--action-script", str(path)])


@pytest.mark.parametrize(
    "script",
    [
        pytest.param('[ "$CRTOOLS_SCRIPT_ACTION" != pre-dump ] || exit 1', id="refused at first"),
        pytest.param('[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || exit 1', id="refused at last"),
        pytest.param('[ "$CRTOOLS_SCRIPT_ACTION" != network-lock ] || kill -9 $PPID', id="killed in the middle"),
        pytest.param('[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || kill -9 $PPID', id="killed at last"),
    ],
)
async def test_a_capture_that_fails_leaves_nothing(
    yard: Yard, backend: Any, box: Any, state_dir: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox and its processes go on, no images and no layer are there, and the next capture works."""
    await goes_on(box)
    with monkeypatch.context() as patch:
        hooked(patch, state_dir / "hook", script)
        with pytest.raises(Undone):
            await captured(backend, box)
    assert backend.snapshots.names() == frozenset()
    assert not await box.stands_still()
    assert await goes_on(box)
    assert [op.running for op in await box.link.ops()].count(True) == 1
    layer = await captured(backend, box)
    child = await backend.launch(standing_on(yard, backend, layer, box.plan))
    await goes_on(child)
    await child.stop()
    assert await goes_on(box)


@pytest.mark.parametrize("mode", ["loop", "btrfs", "dir"])
async def test_every_kind_of_writable_layer(yard: Yard, backend: Any, mode: str) -> None:
    """Files that are open for writing go on where they are, whatever holds them."""
    if mode not in backend.node.disk_modes:
        pytest.skip(f"disk={mode}: {backend.capabilities.missing[f'disk={mode}']}")
    box = await backend.launch(yard.plan(backend.node, resources=ROOMY, disk_mode=mode))
    writer = "exec 3>/root/log; rm -f /root/n; n=0; while :; do n=$((n+1)); echo $n >&3; echo $n >/root/n; sleep 0.02; done"
    await box.link.start(OP, ExecSpec(argv=("/bin/sh", "-c", writer), background=True))
    await goes_on(box)
    layer = await captured(backend, box)
    child = await backend.launch(standing_on(yard, backend, layer, box.plan, disk_mode=mode))
    await goes_on(child)
    code, out, _ = await sh(child, "cat /root/log")
    assert (code, out.split()[:3]) == (0, ["1", "2", "3"])
    assert [int(line) for line in out.split()] == list(range(1, len(out.split()) + 1))
    await child.stop()
    await goes_on(box)
    await box.stop()


# What a process may hold. Each is a program that ends with counting, in a file of its own.
HELD = {
    "threads": "import threading; [threading.Thread(target=time.sleep, args=(999,), daemon=True).start() for _ in range(5)]",
    "sockets": "import socket; pair = socket.socketpair(); one = socket.socket(socket.AF_UNIX); one.bind('/tmp/u'); one.listen();"
    "two = socket.socket(socket.AF_UNIX); two.connect('/tmp/u'); three = one.accept(); udp = socket.socket(type=socket.SOCK_DGRAM);"
    "udp.bind(('127.0.0.1', 0)); tcp = socket.create_server(('127.0.0.1', 0))",
    "connection": "import socket, threading; door = socket.create_server(('127.0.0.1', 0));"
    "near = socket.create_connection(door.getsockname());"
    "far = door.accept()[0]; threading.Thread(target=lambda: [far.sendall(far.recv(1)) for _ in iter(int, 1)], daemon=True).start();"
    "talk = lambda: (near.sendall(b'x'), near.recv(1))",
    "files": "import os, fcntl; gone = open('/root/gone', 'w'); gone.write('x' * 9999); gone.flush(); os.unlink('/root/gone');"
    "locked = open('/root/locked', 'w'); fcntl.flock(locked, fcntl.LOCK_EX); os.mkdir('/root/d'); os.chdir('/root/d'); os.rmdir('/root/d')",
    "memory": "import os, mmap, multiprocessing.shared_memory as shared; kept = shared.SharedMemory(create=True, size=1 << 20);"
    "file = os.memfd_create('m'); os.truncate(file, 1 << 20); view = mmap.mmap(file, 1 << 20)",
    "another": "import os; os.setgid(1000); os.setuid(1000)",
    "children": "import subprocess; child = subprocess.Popen(['sleep', '999'], stdout=subprocess.PIPE)",
    "clocks": "import select, signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05);"
    "poll = select.epoll()",
    "terminal": "import os; assert os.isatty(0)",
}
COUNTING = """
import time
{held}
turn = 0
talk = globals().get("talk", int)
while True:
    turn += 1
    talk()
    with open("/tmp/{name}", "w") as file:
        file.write(str(turn))
    time.sleep(0.05)
"""


async def test_what_processes_hold_goes_on(yard: Yard, backend: Any) -> None:
    """Threads, sockets, a loopback connection, files that are gone or locked, shared memory, another user's processes, children, timers, a
    terminal: each is there in the child as it was, and its process counts on."""
    box = await backend.launch(yard.plan(backend.node, resources=msgspec.structs.replace(ROOMY, memory=384 * MIB, pids=128)))
    for number, (name, held) in enumerate(HELD.items()):
        program = COUNTING.format(held=held, name=name)
        tty = name == "terminal"
        spec = ExecSpec(argv=("python3", "-c", program), background=not tty, tty=tty, stdin=tty)
        await box.link.start(f"{number:032x}", spec)

    async def counts(where: Instance) -> dict[str, int]:
        found = {}
        for name in HELD:
            _, out, _ = await sh(where, f"cat /tmp/{name}")
            found[name] = int(out or 0)
        return found

    async def all_go_on(where: Instance) -> None:
        begun = await counts(where)
        async with asyncio.timeout(60):
            while True:
                now = await counts(where)
                if still := [name for name in HELD if now[name] in (0, begun[name])]:
                    ended = [op for op in await where.link.ops() if not op.running and int(op.op, 16) < len(HELD)]
                    assert not ended, (still, [await where.link.wait(op.op, 5) for op in ended])
                    await asyncio.sleep(0.05)
                    continue
                return

    await all_go_on(box)
    layer = await captured(backend, box)
    plan = standing_on(yard, backend, layer, box.plan)
    child = await backend.launch(msgspec.structs.replace(plan, resources=box.plan.resources))
    await all_go_on(child)
    await child.stop()
    await all_go_on(box)
    await box.stop()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("import socket; l = socket.create_server(('10.9.8.7', 0)); c = socket.create_connection(l.getsockname())", "TCP connection"),
        ("import ctypes; assert ctypes.CDLL(None).shmget(7, 65536, 0o1600) >= 0", "System V"),
        ("import ctypes; l = ctypes.CDLL(None); assert l.inotify_add_watch(l.inotify_init(), b'/root', 2) >= 0", "inotify"),
    ],
)
async def test_what_cannot_be_kept_is_said(backend: Any, box: Any, held: str, says: str) -> None:
    """A typed refusal with the reason; the sandbox goes on as if nobody had asked."""
    address = ["ip", "address", "add", "10.9.8.7/32", "dev", "lo"]  # any that is not loopback's
    in_namespace_of(box.pid, "net", syscalls.CLONE_NEWNET, lambda: subprocess.run(address, check=True))
    await box.link.start("6" * 32, ExecSpec(argv=("python3", "-c", COUNTING.format(held=held, name="held")), background=True))
    async with asyncio.timeout(30):
        while (await sh(box, "cat /tmp/held"))[0]:  # noqa: ASYNC110 - a process inside tells nobody
            await asyncio.sleep(0.05)
    with pytest.raises(Unsupported) as caught:
        await captured(backend, box)
    assert (caught.value.reason, says in caught.value.message) == ("snapshot", True)
    assert backend.snapshots.names() == frozenset()
    await goes_on(box)


async def test_a_restore_that_fails_leaves_nothing(yard: Yard, backend: Any, box: Any, leftovers: Any) -> None:
    """Images that are damaged: a typed error for each child, and nothing of it stays."""
    await goes_on(box)
    layer = await captured(backend, box)
    place = Path(backend.snapshots.place(NAME))
    whole = {path: path.read_bytes() for path in (place / "core-1.img", place / "dsec.json", max(place.glob("pages-*.img")))}
    await box.pause(False)  # its counter starts a process now and then
    before = leftovers.snapshot()
    damages = [(path, whole[path][: len(whole[path]) // 2]) for path in whole]
    damages.append((core := place / "core-1.img", whole[core][:8] + bytes(len(whole[core]) - 8)))  # what only CRIU finds out
    for path, data in damages:
        path.write_bytes(data)
        plans = [standing_on(yard, backend, layer, box.plan) for _ in range(2)]
        outcomes = await asyncio.gather(*(backend.launch(plan) for plan in plans), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Undone, Undone], path.name
        path.write_bytes(whole[path])
    assert not leftovers.left_since(before, seconds=5.0)
    child = await backend.launch(standing_on(yard, backend, layer, box.plan))
    await goes_on(child)
    await child.stop()


async def test_an_agent_that_is_given_no_socket_stays_where_it_is(backend: Any, box: Any) -> None:
    """LISTEN with nothing, or with something that nobody can call, is an error, and the agent is called as before."""
    path = backend.socket_path(box.plan.ulid)

    def ask(fds: list[int]) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
            call.settimeout(10)
            call.connect(path)
            call.sendall(wire.frame(wire.Type.HELLO, 0, wire.hello(backend.options.generation)))
            assert call.recv(64)
            call.sendmsg([wire.frame(wire.Type.LISTEN, 1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
            return call.recv(512)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        for fds in ([], [theirs.fileno()]):
            answer = await asyncio.to_thread(ask, fds)
            assert wire.header(answer)[1] == wire.Type.ERROR
            assert b"listening socket" in answer
    await goes_on(box)


async def test_without_criu_and_on_another_driver_it_says_why(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Capabilities.missing` has the reason, and a capture or a restore is refused with it."""
    for word, options in (("DSEC_DISABLE", {}), ("crun", {"driver": "crun"})):
        with monkeypatch.context() as patch:
            if not options:
                patch.setenv("DSEC_DISABLE", "criu")
            backend = await yard.backend(**options)
            assert (backend.capabilities.snapshot, word in backend.capabilities.missing["snapshot"]) == (False, True)
            with pytest.raises(Unsupported) as caught:
                await backend.launch(msgspec.structs.replace(yard.plan(backend.node), processes="/nonexistent"))
            assert caught.value.reason == "snapshot"
            await backend.shutdown()
