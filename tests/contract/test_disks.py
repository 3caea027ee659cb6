"""What every kind of writable layer owes a sandbox: its limit, its own memory, and nothing left. A kind that this node lacks says why."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dsec.backends import btrfs, quota
from dsec.backends.base import LaunchPlan
from dsec.backends.disk import Disks
from dsec.errors import Unsupported
from dsec.model import MIB, Resources
from tests.fixtures_backend import Yard, sh

pytestmark = [pytest.mark.usefixtures("leftovers"), pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest")]

STORE = 512 * MIB
FULL = ("No space left", "quota exceeded")  # ENOSPC, EDQUOT
SMALL = Resources(memory=64 * MIB, disk=16 * MIB, inodes=300, pids=64)


@pytest.fixture(params=["tmpfs", "loop", "btrfs", "quota"])
def kind(request: pytest.FixtureRequest, state_dir: Path) -> str:
    if request.param == "quota" and (why := quota.trouble(str(state_dir))):
        pytest.skip(f"disk=quota: {why}")
    return str(request.param)


@pytest.fixture
def driver(kind: str) -> str:
    """Each kind with one driver; how a driver binds a directory is the same for btrfs and quota."""
    return "crun" if kind in ("quota", "loop") and shutil.which("crun") else "native"


@pytest_asyncio.fixture
async def backend(leftovers: object, yard: Yard, kind: str) -> Any:
    return await node(yard, kind)


async def node(yard: Yard, kind: str) -> Any:
    """The next Edge's backend; skips where it has no such disks."""
    backend = await yard.backend(disk_store_bytes=STORE)
    if kind not in backend.node.disk_modes:
        pytest.skip(f"disk={kind}: {backend.capabilities.missing[f'disk={kind}']}")
    return backend


def plan(yard: Yard, backend: Any, kind: str, **fields: Any) -> LaunchPlan:
    return yard.plan(backend.node, disk_mode=kind, **{"resources": SMALL, **fields})


def disks(backend: Any) -> Disks:
    found: Disks = backend._disks
    return found


async def test_bytes_are_limited(yard: Yard, backend: Any, kind: str) -> None:
    """Above its limit a sandbox gets ENOSPC or EDQUOT, below it again it writes on; its neighbour notices nothing; usage tells."""
    box = await backend.launch(plan(yard, backend, kind))
    neighbour = await backend.launch(plan(yard, backend, kind))
    code, _, err = await sh(box, "dd if=/dev/zero of=/root/big bs=64k count=512")
    assert code != 0
    assert any(words in err for words in FULL), err
    assert 12 * MIB < int((await sh(box, "stat -c %s /root/big"))[1]) <= 16 * MIB
    assert 12 * MIB < (await box.usage()).disk <= 16 * MIB
    assert (await sh(neighbour, "dd if=/dev/zero of=/root/big bs=64k count=128"))[0] == 0
    assert (await sh(box, "rm /root/big; sync; dd if=/dev/zero of=/root/ok bs=64k count=96"))[0] == 0


async def test_files_are_limited(yard: Yard, backend: Any, kind: str) -> None:
    """The number of files is limited as well; where only their bytes count, the sandbox's plan says so and the bytes hold."""
    made = plan(yard, backend, kind, resources=Resources(memory=64 * MIB, disk=2 * MIB, inodes=300, pids=64))
    box = await backend.launch(made)
    counted = kind != "btrfs"
    assert any(note.startswith("inodes:") for note in made.degraded) is not counted
    most = 1000 if counted else 60_000
    script = f"import os\nfor n in range({most}): os.close(os.open('/root/' + str(n), os.O_CREAT | os.O_WRONLY))"
    code, _, err = await sh(box, f'cd /root && python3 -c "{script}"', 120)
    assert code != 0
    assert any(words in err for words in FULL), err


async def test_its_bytes_are_not_its_memory(yard: Yard, backend: Any, kind: str) -> None:
    """Much more than its memory can be written to a disk that is none; on tmpfs one limit holds for both, and the plan says so."""
    large = Resources(memory=64 * MIB, disk=256 * MIB, inodes=300, pids=64)
    made = plan(yard, backend, kind, resources=large)
    box = await backend.launch(made)
    if kind == "tmpfs":
        assert any(note.startswith("memory:") for note in made.degraded)
        return
    assert not any(note.startswith("memory:") for note in made.degraded)
    assert (await sh(box, "dd if=/dev/zero of=/root/big bs=64k count=3072", 60))[0] == 0
    usage = await box.usage()
    assert usage.oom_kills == 0
    assert usage.memory <= 64 * MIB
    assert usage.disk >= 192 * MIB


async def test_a_sandbox_cannot_leave_its_limit(yard: Yard, backend: Any, kind: str) -> None:
    """Root inside can neither give its files to another project nor reach the file system's own calls."""
    box = await backend.launch(plan(yard, backend, kind))
    script = (
        "import fcntl, os, struct\n"
        "fd = os.open('/root/mine', os.O_CREAT | os.O_RDWR); top = os.open('/root', os.O_RDONLY)\n"
        "def tried(fd, number, data):\n"
        "    try: fcntl.ioctl(fd, number, data); return 'done'\n"
        "    except OSError: return 'refused'\n"
        "print(tried(fd, 0x401c5820, struct.pack('<5I8x', 0, 0, 0, 7, 0)))\n"  # FS_IOC_FSSETXATTR
        "print(tried(top, 0x5000940e, bytearray(8) + bytearray(b'out'.ljust(4088, bytes(1)))))\n"  # BTRFS_IOC_SUBVOL_CREATE
        "print(tried(top, 0x8030942b, struct.pack('<6Q', 0, 1, 1 << 40, 0, 0, 0)))\n"  # BTRFS_IOC_QGROUP_LIMIT
    )
    from dsec.model import ExecSpec

    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/python3", "-c", script)))
    status = await box.link.wait(op, 20)
    assert status.stdout.data().split() == [b"refused"] * 3, status.stderr.data()


async def test_nothing_of_it_is_left(yard: Yard, backend: Any, kind: str) -> None:
    """After a stop neither directory nor subvolume nor image is there, and the next sandbox begins empty."""
    for _ in range(2):
        made = plan(yard, backend, kind)
        box = await backend.launch(made)
        assert (await sh(box, "ls /root; echo x >/root/left"))[1] == ""
        assert made.ulid in disks(backend).names() or kind != "btrfs"
        await box.stop()
        assert not os.path.exists(made.state_dir)
        assert made.ulid not in disks(backend).names()


async def test_it_outlives_edge_and_holder(yard: Yard, backend: Any, kind: str) -> None:
    """With Edge and holder killed a sandbox keeps its disk and its limit; the next Edge adopts it, makes more, and frees all."""
    from tests.system.test_holder import holder_pid

    made = plan(yard, backend, kind)
    box = await backend.launch(made)
    assert (await sh(box, "echo kept >/root/kept"))[0] == 0
    pid = holder_pid(backend)
    await backend.close()
    os.kill(pid, signal.SIGKILL)
    second = await node(yard, kind)
    box = await second.adopt(made)
    assert box is not None
    code, out, err = await sh(box, "cat /root/kept; dd if=/dev/zero of=/root/big bs=64k count=512")
    assert (code != 0, out) == (True, "kept\n")
    assert any(words in err for words in FULL), err
    assert (await box.usage()).disk > 12 * MIB
    more = await second.launch(plan(yard, second, kind))
    assert (await sh(more, "echo x >/root/x"))[0] == 0
    await asyncio.gather(box.stop(), more.stop())
    assert not set(disks(second).names()) - {".probe"}


async def test_what_no_record_names_is_reaped(yard: Yard, backend: Any, kind: str) -> None:
    """Disks of sandboxes that died with Edge and holder, recorded or not, are freed by the next Edge's reap."""
    from tests.system.test_holder import holder_pid

    made = plan(yard, backend, kind)
    box = await backend.launch(made)
    await asyncio.to_thread(disks(backend).make, half := plan(yard, backend, kind)) if kind == "btrfs" else None
    pid = holder_pid(backend)
    await backend.close()
    for victim in (pid, box.pid):
        os.kill(victim, signal.SIGKILL)
    second = await node(yard, kind)
    freed = await second.reap(frozenset())
    assert made.ulid in freed
    assert kind != "btrfs" or not set(disks(second).names()) & {made.ulid, half.ulid}
    assert not os.path.exists(made.state_dir)


@pytest.mark.parametrize("kind", ["btrfs"])
async def test_the_next_holder_has_the_same_store(yard: Yard, backend: Any, kind: str) -> None:
    """A holder that is killed under its Edge takes no disk along: the next one has the store with what stands on it, and makes more."""
    from tests.system.test_holder import holder_pid

    before = await backend.launch(plan(yard, backend, kind))
    os.kill(holder_pid(backend), signal.SIGKILL)
    while backend._holder.connected:  # noqa: ASYNC110 - until it has noticed
        await asyncio.sleep(0.01)
    after = await backend.launch(plan(yard, backend, kind))
    for box in (before, after):
        assert (await sh(box, "dd if=/dev/zero of=/root/big bs=64k count=128"))[0] == 0
        assert (await box.usage()).disk >= 8 * MIB
        assert {before.plan.ulid, after.plan.ulid} <= set(disks(backend).names())
    await asyncio.gather(before.stop(), after.stop())
    assert disks(backend).names() == ()


@pytest.mark.parametrize("kind", ["btrfs"])
async def test_what_the_configuration_chooses(yard: Yard, backend: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for a store, auto means it wherever the node has no quota; a kind that is named comes first; one that is not there is
    refused by the key's name, and a store that does not fit is none."""
    assert backend.node.disk_modes[0] in ("quota", "btrfs")
    await backend.shutdown()
    monkeypatch.setenv("DSEC_DISABLE", ",".join(filter(None, (os.environ.get("DSEC_DISABLE", ""), "quota"))))
    chosen = await yard.backend(disk="tmpfs", disk_store_bytes=STORE)
    assert chosen.node.disk_modes[:2] == ("tmpfs", "btrfs")
    await chosen.shutdown()
    with pytest.raises(Unsupported) as caught:
        await yard.backend(disk="quota", disk_store_bytes=STORE)
    assert (caught.value.field, caught.value.value, caught.value.reason) == ("container.disk", "quota", "disk")
    if btrfs.is_btrfs(str(yard.state)):  # which needs no store
        return
    room = os.statvfs(yard.state)
    for size, word in ((1 * MIB, "less than"), (room.f_blocks * room.f_frsize, "bytes free")):
        with pytest.raises(Unsupported) as caught:
            await yard.backend(disk="btrfs", disk_store_bytes=size)
        assert word in str(caught.value)
        plain = await yard.backend(disk_store_bytes=size)
        assert plain.node.disk_modes[0] == "tmpfs"
        assert word in plain.capabilities.missing["disk=btrfs"]
        await plain.shutdown()
    assert not os.path.exists(f"{yard.state}/disks.btrfs")
