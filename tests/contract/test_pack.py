"""What packing owes whoever asks, over every kind of writable layer and every driver: the whole change, or a typed error and nothing."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dsec import syscalls
from dsec.backends import quota
from dsec.backends.base import LaunchPlan, PackOrder
from dsec.errors import InvalidRequest, NodeError
from dsec.layers.erofs_read import Image
from dsec.layers.importer import import_dir
from dsec.layers.mounts import LayerMount
from dsec.layers.store import LayerStore
from dsec.model import MIB, ExecSpec, LayerRef, Resources
from tests.fixtures_backend import BASE, MakeYard, OneLayer, Yard, sh
from tests.system.test_pack_diff import CHANGES, PREPARE, SNAP

pytestmark = [pytest.mark.guest, pytest.mark.needs("root", "cgroup", "guest")]

ROOMY = Resources(memory=96 * MIB, disk=96 * MIB, inodes=8192, pids=64)
PRIVATE = {"origin", "impure", "uuid", "nlink", "upper", "metacopy", "protattr"}  # what an overlay notes for itself


class Shelves(OneLayer):
    """A layer store beside the test's base."""

    def __init__(self, mount: LayerMount, store: LayerStore) -> None:
        super().__init__(mount)
        self.store = store

    async def mount_plan(self, digest: str) -> LayerMount:
        return self.mount if digest == BASE.digest else await self.store.mount_plan(digest)

    def staging(self) -> Any:
        return self.store.staging()

    async def put_image(self, *args: Any) -> LayerRef:
        return await self.store.put_image(*args)


FLAVOURS = ["tmpfs", "loop", "btrfs", "quota", "dir", "tmpfs crun", pytest.param("tmpfs docker", marks=pytest.mark.slow)]


@pytest.fixture(params=FLAVOURS)
def kind(request: pytest.FixtureRequest, state_dir: Path) -> str:
    mode, _, driver = request.param.partition(" ")
    if driver == "docker":
        request.getfixturevalue("dockerd")  # before anything is counted
    if mode == "quota" and (why := quota.trouble(str(state_dir))):
        pytest.skip(f"disk=quota: {why}")
    return str(mode)


@pytest.fixture
def yard(kind: str, leftovers: object, make_yard: MakeYard, request: pytest.FixtureRequest) -> Yard:
    return make_yard("docker" if "docker" in request.node.callspec.id else "container")


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> str:
    return "crun" if "crun" in request.node.callspec.id else "native"


@pytest_asyncio.fixture
async def backend(yard: Yard, kind: str, state_dir: Path) -> AsyncIterator[Any]:
    yard.layers = Shelves(yard.mount, LayerStore(state_dir / "layers"))  # type: ignore[arg-type] - containers have one
    backend = await yard.backend(disk_store_bytes=512 * MIB)
    if kind not in backend.node.disk_modes:
        pytest.skip(f"disk={kind}: {backend.capabilities.missing[f'disk={kind}']}")
    yield backend


def plan(yard: Yard, backend: Any, kind: str, *above: LayerRef) -> LaunchPlan:
    made = yard.plan(backend.node, disk_mode=kind, resources=ROOMY)
    return msgspec.structs.replace(made, lowers=(*above, *made.lowers))


async def python(box: Any, script: str) -> str:
    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/python3", "-c", script), head=MIB, tail=MIB))
    status = await box.link.wait(op, 60)
    assert status.exit_code == 0, status.stderr.data()
    return str(status.stdout.data().decode())


async def pack(box: Any, **order: Any) -> Any:
    return await box.pack_diff(PackOrder(**{"name": "packed", **order}), False, lambda: None)


def attributes(path: str) -> Iterator[tuple[str, str]]:
    """(path, overlay attribute) of every entry of an image."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        image = Image(data)
        stack = [("", image.root)]
        while stack:
            where, nid = stack.pop()
            inode = image.inode(nid)
            for key, _ in inode.xattrs:
                if key.startswith("trusted.overlay."):
                    yield where, key.removeprefix("trusted.overlay.")
            if stat.S_ISDIR(inode.mode):
                stack += [(f"{where}/{os.fsdecode(name)}", child) for name, child in image.entries(inode)]


async def test_every_kind_of_entry_survives(yard: Yard, backend: Any, kind: str, tmp_path: Path) -> None:
    """A sandbox above the packed layer sees what the first one left, whatever its upper lives on; of the overlay's own notes the layer
    has only those that say what it takes away."""
    assert await sh_here(PREPARE, tmp_path) == 0
    work = await import_dir(yard.layers.store, tmp_path, "work", at="/w")
    first = await backend.launch(plan(yard, backend, kind, work))
    await python(first, CHANGES)
    script = SNAP.replace("print(", "import sys; sys.stdout.write(")
    before = json.loads(await python(first, script))
    packed = await pack(first)
    assert packed.entries > 700
    assert (await sh(first, "echo on"))[1] == "on\n"
    second = await backend.launch(plan(yard, backend, kind, LayerRef(name="packed", digest=packed.digest), work))
    after = json.loads(await python(second, script))
    different = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not different
    found = set(attributes((await yard.layers.store.mount_plan(packed.digest)).source))
    assert ("/w/d", "opaque") in found
    assert not {name for _, name in found} & PRIVATE


async def sh_here(script: str, where: Path) -> int:
    process = await asyncio.create_subprocess_exec("bash", "-ec", script, cwd=where)
    return await process.wait()


async def test_limits_are_typed(yard: Yard, backend: Any, kind: str) -> None:
    """More entries or bytes than the order allows is its field's error and leaves no blob; at the limit it is packed; it runs on."""
    box = await backend.launch(plan(yard, backend, kind))
    assert (await sh(box, "mkdir /srv; for i in 1 2 3; do head -c 1000 /dev/zero >/srv/$i; done"))[0] == 0
    for field, value in (("max_entries", 3), ("max_bytes", 2999)):
        with pytest.raises(InvalidRequest) as caught:
            await pack(box, **{field: value})
        assert caught.value.field == field
        assert blobs(yard) == []
        assert (await sh(box, "echo on"))[1] == "on\n"
    packed = await pack(box, max_entries=4, max_bytes=3000)
    assert (packed.entries, packed.bytes) == (4, 3000)
    assert len(blobs(yard)) == 1


def blobs(yard: Yard) -> list[str]:
    """Every file of the store but its index and locks."""
    top = yard.layers.store.root
    return [str(path) for path in top.rglob("*") if path.is_file() and path.stat().st_size > 4096]


@pytest.mark.parametrize("kind", ["tmpfs", "btrfs"])
async def test_a_full_store_is_told(yard: Yard, backend: Any, kind: str) -> None:
    """When the store's disk is full in the middle of a pack the error is the node's and can be tried again; nothing half-made stays, the
    sandbox runs on, and with room the same order is served."""
    place = str(yard.layers.store.root)
    syscalls.mount("dsec-test", place, "tmpfs", 0, "size=4m")
    try:
        yard.layers.store = LayerStore(place)
        box = await backend.launch(plan(yard, backend, kind))
        fill = "head -c 9000000 /dev/urandom >/root/big; mkdir /root/many; for i in $(seq 50); do echo $i >/root/many/$i; done"
        assert (await sh(box, fill))[0] == 0
        with pytest.raises(NodeError) as caught:
            await pack(box)
        assert (caught.value.reason, caught.value.retryable) == ("disk", True), caught.value
        assert blobs(yard) == []
        room = os.statvfs(place)
        assert room.f_bfree > 0.9 * room.f_blocks
        assert (await sh(box, "wc -c </root/big"))[1].strip() == "9000000"
        syscalls.mount("dsec-test", place, None, syscalls.MS_REMOUNT, "size=64m")
        assert (await pack(box)).entries >= 52
        await box.stop()
    finally:
        syscalls.umount2(place, syscalls.MNT_DETACH)
