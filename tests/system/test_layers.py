"""Bases that boot, layers that keep what they hold, and the ways round what a kernel or a machine lacks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dsec.errors import InvalidRequest, NodeError, Unsupported
from dsec.layers import bootstrap, erofs, erofs_read, importer, mounts
from dsec.layers.store import LayerInfo, LayerStore
from dsec.model import LayerRef

pytestmark = [pytest.mark.needs("root")]

# Attaches a layer in a mount namespace of its own, enters it and runs a command: what a sandbox does, less its walls.
_ENTER = """
import os, sys, msgspec
from dsec import syscalls
from dsec.layers.mounts import LayerMount, open_layer
layer = open_layer(msgspec.json.decode(sys.argv[1], type=LayerMount))
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
place = sys.argv[2]
syscalls.move_mount(layer, place)
syscalls.mount("/dev", place + "/dev", None, syscalls.MS_BIND | syscalls.MS_REC)
os.chroot(place)
os.chdir("/")
os.execve("/bin/sh", ["sh", "-c", sys.argv[3]], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
"""


_FULL_DISK = """
import asyncio, os, sys
from dsec import syscalls
from dsec.errors import DsecError
from dsec.layers import importer
from dsec.layers.store import LayerStore
top = sys.argv[1]
syscalls.unshare(syscalls.CLONE_NEWNS)
syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
syscalls.mount("none", top + "/disk", "tmpfs", 0, "size=3m")
async def main():
    store = LayerStore(top + "/disk/store")
    said = []
    tried = [(importer.import_dir, top + "/big", {}), (importer.import_dir, top + "/big", {"at": "/x"})]
    for make, source, more in (*tried, (importer.import_tar, top + "/big.tar", {})):
        try:
            await make(store, source, "big", **more)
        except DsecError as error:
            said.append(type(error).__name__)
    await importer.import_dir(store, top + "/small", "small")
    print(*said, len(await store.list()), len(os.listdir(store.root / "tmp")))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> LayerStore:
    return LayerStore(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def tiny(shared_store: LayerStore) -> LayerRef:
    try:
        return asyncio.run(bootstrap.bootstrap_tiny(shared_store))
    except (NodeError, Unsupported) as error:
        pytest.skip(f"no busybox from apt here: {error}")


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


async def enter(store: LayerStore, ref: LayerRef, place: Path, command: str) -> str:
    import msgspec

    place.mkdir(exist_ok=True)
    plan = msgspec.json.encode(await store.mount_plan(ref.digest)).decode()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _ENTER, plan, str(place), command, stdout=-1, stderr=-2)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@asynccontextmanager
async def paused(code: str, *arguments: str) -> AsyncIterator[None]:
    """Another process that ran ``code`` up to its ``wait()``; killed with -9 at the end."""
    whole = "import sys, time\ndef wait(): print('ready', flush=True); time.sleep(60)\n" + code
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", whole, *arguments, stdout=-1)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        await process.wait()


async def test_the_tiny_base_boots_a_shell_with_its_users(shared_store: LayerStore, tiny: LayerRef, tmp_path: Path) -> None:
    """root, nobody, agent 1000, a sticky /tmp, and no trace of the machine."""
    said = await enter(
        shared_store,
        tiny,
        tmp_path / "m",
        "id -un; su agent -c 'id -u; echo $HOME'; stat -c %a /tmp /root; cat /etc/hostname; wc -c < /etc/resolv.conf",
    )
    assert said.split() == ["root", "1000", "/home/agent", "1777", "700", "localhost", "0"]


async def test_the_tiny_base_is_the_same_every_time_and_costs_nothing_the_second_time(
    shared_store: LayerStore, tiny: LayerRef, store: LayerStore
) -> None:
    """Cached by its inputs; made again it has the same digest."""
    started = time.perf_counter()
    assert await bootstrap.bootstrap_tiny(shared_store) == tiny
    assert time.perf_counter() - started < 0.5
    assert (await bootstrap.bootstrap_tiny(store, "other", refresh=True)).digest == tiny.digest
    assert (await shared_store.info("busybox")).size < 4 << 20


async def test_a_cached_base_whose_blob_is_damaged_is_made_again(store: LayerStore) -> None:
    """A truncated blob is not handed out as up to date."""
    try:
        ref = await bootstrap.bootstrap_tiny(store)
    except NodeError as error:
        pytest.skip(f"no busybox from apt here: {error}")
    image = store.root / "blobs" / (ref.digest.replace(":", "-") + ".erofs")
    if not image.exists():
        pytest.skip("layers are plain directories here")
    os.truncate(image, 8192)
    assert (await bootstrap.bootstrap_tiny(store)).digest == ref.digest
    await store.verify(ref.digest)


@pytest.mark.parametrize("hide", ["", "erofs_file", "erofs_file,erofs_loop", "mkfs_erofs"])
async def test_a_layer_looks_the_same_whatever_the_machine_lacks(
    hide: str, store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File-backed EROFS, loop device, unpacked image, plain directory: modes, owners, links and times agree."""
    monkeypatch.setenv("DSEC_DISABLE", hide)
    tree = tmp_path / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d/tool").write_text("#!/bin/sh\n")
    os.chmod(tree / "d/tool", 0o4755)
    os.chown(tree / "d", 1000, 1000)
    (tree / "link").symlink_to("/d/tool")
    os.link(tree / "d/tool", tree / "hard")
    os.utime(tree / "d/tool", (1_400_000_000, 1_400_000_000))
    ref = await importer.import_dir(store, tree, "w", at="/opt/w")
    try:
        fd = mounts.open_layer(await store.mount_plan(ref.digest))
    except OSError as error:
        pytest.skip(f"not on this kernel: {error}")
    try:
        top = Path(f"/proc/self/fd/{fd}/opt/w")
        assert (top / "d/tool").stat().st_mode & 0o7777 == 0o4755
        assert (top / "d/tool").stat().st_mtime == 1_400_000_000
        assert (top / "d").stat().st_uid == 1000
        assert os.readlink(top / "link") == "/d/tool"
        assert (top / "hard").stat().st_nlink == 2
        assert top.parent.stat().st_uid == 0
    finally:
        os.close(fd)
    assert bool(store.fallback()) == (hide.startswith("erofs_file"))


async def test_file_capabilities_and_user_attributes_survive(store: LayerStore, tmp_path: Path) -> None:
    """From the directory on disk into the layer."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "ping").touch()
    capability = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)  # version 2, effective, CAP_NET_RAW
    try:
        os.setxattr(tree / "ping", "security.capability", capability)
        os.setxattr(tree / "ping", "user.note", b"kept")
    except OSError as error:
        pytest.skip(f"the test directory keeps no extended attributes: {error}")
    ref = await importer.import_dir(store, tree, "w", at="/w")
    fd = mounts.open_layer(await store.mount_plan(ref.digest))
    try:
        assert os.getxattr(f"/proc/self/fd/{fd}/w/ping", "security.capability") == capability
        assert os.getxattr(f"/proc/self/fd/{fd}/w/ping", "user.note") == b"kept"
    finally:
        os.close(fd)


async def test_a_private_source_directory_does_not_close_the_sandboxs_root(store: LayerStore, tmp_path: Path) -> None:
    """The topmost layer's ``/`` counts in an overlay, so it is root's and 0755 in every layer; the source stays as it is."""
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o700)
    os.chown(tree, 1000, 1000)
    (tree / "f").touch()
    before = tree.stat()
    ref = await importer.import_dir(store, tree, "w")
    fd = mounts.open_layer(await store.mount_plan(ref.digest))
    try:
        assert os.fstat(fd).st_mode & 0o7777 == 0o755
        assert os.fstat(fd).st_uid == 0
    finally:
        os.close(fd)
    assert (tree.stat().st_mode, tree.stat().st_uid, tree.stat().st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)


async def test_device_nodes_in_a_directory_are_refused_and_sockets_left_out(store: LayerStore, tmp_path: Path) -> None:
    """A node would be a door to the host; a socket means nothing without its process. The source keeps both."""
    import socket

    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tree / "sock"))
        ref = await importer.import_dir(store, tree, "w")
        fd = mounts.open_layer(await store.mount_plan(ref.digest))
        try:
            assert os.listdir(f"/proc/self/fd/{fd}") == []
        finally:
            os.close(fd)
        assert (tree / "sock").exists()
    os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
    with pytest.raises(InvalidRequest) as caught:
        await importer.import_dir(store, tree, "w2")
    assert caught.value.value == "null"


async def test_a_pinned_layer_outlives_the_process_that_pinned_it_only_as_long_as_the_descriptor(store: LayerStore, tmp_path: Path) -> None:
    """A pin of another process blocks removal; its kill -9 frees it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").touch()
    ref = await importer.import_dir(store, tree, "w")
    await store.untag("w")
    plan = await store.mount_plan(ref.digest)
    code = "from dsec.layers.mounts import *\npin_layer(LayerMount(kind=sys.argv[1], source=sys.argv[2]))\nwait()"
    async with paused(code, plan.kind, plan.source):
        assert (await store.gc()).in_use == (ref.digest,)
    assert (await store.gc()).digests == (ref.digest,)


async def test_a_killed_import_leaves_nothing_that_gc_does_not_free(store: LayerStore) -> None:
    """kill -9 while a layer is staged."""
    code = (
        "import asyncio\nfrom dsec.layers.store import LayerStore\nasync def main():\n"
        "    async with LayerStore(sys.argv[1]).staging() as stage:\n        (stage / 'half').touch()\n        wait()\nasyncio.run(main())"
    )
    async with paused(code, str(store.root)):
        await store.gc()
        assert len(list((store.root / "tmp").iterdir())) == 1
    await store.gc()
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("field", "arguments"), [("suite", {"suite": "--help"}), ("packages", {"packages": ["a,b; rm"]}), ("variant", {"variant": ""})]
)
async def test_words_that_are_not_for_apt_are_refused(field: str, arguments: dict[str, object], store: LayerStore) -> None:
    """No option and no shell text gets to mmdebstrap."""
    with pytest.raises(InvalidRequest) as caught:
        await bootstrap.bootstrap_debian(store, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field


async def test_a_full_disk_is_the_nodes_fault_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    """In a store of 3 MB: a layer of 8 MB by directory and by tar is a typed error; a small one goes in afterwards."""
    (tmp_path / "big").mkdir()
    (tmp_path / "big/file").write_bytes(os.urandom(8 << 20))
    (tmp_path / "small").mkdir()
    (tmp_path / "disk").mkdir()
    with tarfile.open(tmp_path / "big.tar", "w") as archive:
        archive.add(tmp_path / "big", ".")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _FULL_DISK, str(tmp_path), stdout=-1, stderr=-2)
    output, _ = await process.communicate()
    assert output.decode().split("\n")[-2] == "NodeError NodeError NodeError 1 0", output.decode()


@pytest.mark.parametrize("kind", ["erofs_file", "dir"])
async def test_unpacking_an_image_loses_nothing(kind: str, shared_store: LayerStore, tiny: LayerRef, tmp_path: Path) -> None:
    """The unpacked tree of a base and of odd files packs to the same image again."""
    if kind == "dir":
        odd = tmp_path / "odd"
        (odd / "many").mkdir(parents=True)
        for n in range(600):  # a directory of several blocks
            (odd / "many" / f"a-rather-long-name-for-a-file-{n:05d}").touch()
        for size in (0, 1, 4095, 4096, 4097, 3_000_000):
            (odd / f"size-{size}").write_bytes(os.urandom(size))
        os.link(odd / "size-1", odd / "hard")
        (odd / "long").symlink_to("/x" * 1000)
        os.mkfifo(odd / "pipe")
        os.mknod(odd / "whiteout", 0o20000, 0)
        (odd / "suid").touch()
        os.chown(odd / "suid", 5, 70_000)
        os.chmod(odd / "suid", 0o6711)
        for n in range(3):
            os.setxattr(odd / "size-0", f"user.own{n}", b"v" * n)
            os.setxattr(odd / f"size-{4095 + n}", "user.shared", b"the same")
        os.setxattr(odd / "size-1", "security.capability", struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0))
        ref = await importer.import_dir(shared_store, odd, "odd", at="/odd")
    else:
        ref = tiny
    image = shared_store.root / "blobs" / (ref.digest.replace(":", "-") + ".erofs")
    await asyncio.to_thread(erofs_read.unpack, str(image), tmp_path / "tree")
    again = tmp_path / "again"
    await erofs.build(str(tmp_path / "tree"), str(again), erofs.survey(str(tmp_path / "tree")))
    assert erofs.file_digest(again) == ref.digest


@pytest.mark.parametrize("place", [1024 + 14, 1024 + 40, 1300, 2000])
async def test_unpacking_a_damaged_image_is_a_typed_error_or_harmless(
    place: int, shared_store: LayerStore, tiny: LayerRef, tmp_path: Path
) -> None:
    """Flipped bytes in superblock and inodes never escape the target or hang."""
    data = bytearray((shared_store.root / "blobs" / (tiny.digest.replace(":", "-") + ".erofs")).read_bytes())
    data[place] ^= 0xFF
    (tmp_path / "bad").write_bytes(data)
    with contextlib.suppress(NodeError, Unsupported):
        await asyncio.to_thread(erofs_read.unpack, str(tmp_path / "bad"), tmp_path / "tree")
    assert sorted(path.name for path in tmp_path.iterdir()) in (["bad"], ["bad", "tree"])


@pytest.mark.slow
@pytest.mark.needs("mmdebstrap")
@pytest.mark.timeout(400)
async def test_the_debian_base_has_an_agents_tools_and_nothing_of_this_machine(store: LayerStore, tmp_path: Path) -> None:
    """Made in under 90 s, under 300 MB; python and git work; no host name, resolver, package list or mount stays."""
    started = time.monotonic()
    lines: list[str] = []
    ref = await bootstrap.bootstrap_debian(store, progress=lines.append)
    took = time.monotonic() - started
    info: LayerInfo = await store.info("debian-12")
    print(f"debian-12: {took:.0f} s, {info.size / 1e6:.0f} MB")
    assert lines
    assert info.size < 300e6
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert not [line for line in mounts if str(tmp_path) in line or "mmdebstrap" in line]  # of others there may be any
    said = await enter(
        store,
        ref,
        tmp_path / "m",
        "python3 -c 'import json, ssl, sqlite3; print(\"py\")'; git --version; make --version | head -1; patch --version | head -1;"
        " curl --version | head -1; which ps; su agent -c 'id -u'; cat /etc/hostname;"
        " wc -c < /etc/resolv.conf; wc -c < /etc/machine-id;"
        " find /var/lib/apt/lists /var/cache/apt -type f | wc -l",
    )
    for word in ("py", "git version", "GNU Make", "GNU patch", "curl", "/bin/ps", "1000", "localhost"):
        assert word in said
    assert said.split()[-3:] == ["0", "0", "0"]
    assert os.uname().nodename not in said
    again = time.monotonic()
    assert await bootstrap.bootstrap_debian(store) == ref
    assert time.monotonic() - again < 1
