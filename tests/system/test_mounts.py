"""Layers as detached mounts on the real kernel."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsec import syscalls
from dsec.layers import erofs, mounts
from dsec.layers.mounts import Kind, LayerMount

pytestmark = [pytest.mark.needs("root")]

BASE = 3_000_000


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "etc").mkdir(parents=True)
    (top / "etc/motd").write_text("hello\n" * 1000)
    (top / "data").write_bytes(os.urandom(8 << 20))
    return top


@pytest.fixture
def image(tree: Path, tmp_path: Path) -> Path:
    if not erofs.available():
        pytest.skip("mkfs.erofs is not installed")
    asyncio.run(erofs.build(str(tree), str(tmp_path / "image"), erofs.survey(str(tree))))
    return tmp_path / "image"


@contextmanager
def opened(layer: LayerMount) -> Iterator[int]:
    fd = mounts.open_layer(layer)
    try:
        yield fd
    finally:
        os.close(fd)


def plan(kind: Kind, image: Path, tree: Path) -> LayerMount:
    return LayerMount(kind=kind, source=str(tree if kind == "dir" else image))


def kinds() -> list[object]:
    return [
        pytest.param("erofs_file", marks=pytest.mark.needs("erofs_file")),
        pytest.param("erofs_loop", marks=pytest.mark.needs("erofs_loop")),
        "dir",
    ]


def resident(fd: int) -> int:
    """Pages of ``data`` in the page cache of the mount (mincore)."""
    file = os.open("data", os.O_RDONLY, dir_fd=fd)
    try:
        size = os.fstat(file).st_size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0)))
        pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        assert libc.mincore(address, ctypes.c_size_t(size), pages) == 0
        libc.munmap(address, ctypes.c_size_t(size))
        return sum(page & 1 for page in pages)
    finally:
        os.close(file)


def loops_of(image: Path) -> list[str]:
    return [str(path) for path in Path("/sys/block").glob("loop*/loop/backing_file") if path.read_text().strip() == str(image)]


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_shows_the_tree_read_only_and_is_attached_nowhere(kind: Kind, image: Path, tree: Path) -> None:
    """Same content, EROFS on write, the mount table as before, and nothing left when the descriptor closes."""
    before = Path("/proc/self/mountinfo").read_text()
    with opened(plan(kind, image, tree)) as fd:
        assert Path(f"/proc/self/fd/{fd}/etc/motd").read_text() == "hello\n" * 1000
        assert Path(f"/proc/self/fd/{fd}/data").read_bytes() == (tree / "data").read_bytes()
        with pytest.raises(OSError) as caught:
            os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        assert caught.value.errno == errno.EROFS
        assert Path("/proc/self/mountinfo").read_text() == before
    _eventually(lambda: not loops_of(image))


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_can_be_idmapped_for_a_sandbox_while_the_shared_mount_stays(kind: Kind, image: Path, tree: Path) -> None:
    """Root's files belong to the map's base through the clone, to root through the original."""
    if syscalls.disabled("userns"):
        pytest.skip("user namespaces are disabled by DSEC_DISABLE")
    userns = syscalls.make_userns(BASE)
    with opened(plan(kind, image, tree)) as fd:
        clone = syscalls.open_tree("", syscalls.OPEN_TREE_CLONE | syscalls.AT_EMPTY_PATH, fd)
        try:
            syscalls.mount_setattr(clone, userns_fd=userns)
            assert os.stat("etc/motd", dir_fd=clone).st_uid == BASE
            assert os.stat("etc/motd", dir_fd=fd).st_uid == 0
        finally:
            os.close(clone)
            os.close(userns)


@pytest.mark.needs("erofs_file")
def test_one_mount_has_one_page_cache_and_a_second_mount_another(image: Path, tree: Path) -> None:
    """Why a node keeps one mount a layer: a clone reads without new pages, a second mount fills its own."""

    with opened(plan("erofs_file", image, tree)) as one, opened(plan("erofs_file", image, tree)) as two:
        Path(f"/proc/self/fd/{one}/data").read_bytes()
        clone = syscalls.open_tree("", syscalls.OPEN_TREE_CLONE | syscalls.AT_EMPTY_PATH, one)
        try:
            assert resident(one) == resident(clone) == (8 << 20) // os.sysconf("SC_PAGESIZE")
            assert resident(two) == 0
        finally:
            os.close(clone)


@pytest.mark.parametrize("damage", ["empty", "short", "zeros", "superblock"])
@pytest.mark.parametrize("kind", ["erofs_file", "erofs_loop"])
def test_a_damaged_image_is_an_error_and_leaves_no_loop_device(kind: Kind, damage: str, image: Path) -> None:
    """Nothing half-made."""
    if damage == "superblock":
        with open(image, "r+b") as file:
            file.seek(1024)
            file.write(bytes(64))
    else:
        image.write_bytes({"empty": b"", "short": b"x", "zeros": bytes(65536)}[damage])
    with pytest.raises(OSError, match=r"."):
        mounts.open_layer(LayerMount(kind=kind, source=str(image)))
    _eventually(lambda: not loops_of(image))


def test_sources_that_are_not_what_the_plan_says_are_refused(image: Path, tree: Path, tmp_path: Path) -> None:
    """Another size, an absent file, a directory for an image and an image for a directory."""
    cases: list[tuple[LayerMount, int]] = [
        (LayerMount(kind="erofs_file", source=str(image), size=1), errno.EIO),
        (LayerMount(kind="erofs_file", source=str(tmp_path / "absent")), errno.ENOENT),
        (LayerMount(kind="erofs_file", source=str(tree)), errno.EINVAL),
        (LayerMount(kind="dir", source=str(image)), errno.ENOTDIR),
        (LayerMount(kind="dir", source=str(tmp_path / "absent")), errno.ENOENT),
    ]
    for layer, code in cases:
        with pytest.raises(OSError, match=r".") as caught:
            mounts.open_layer(layer)
        assert caught.value.errno == code


@pytest.mark.parametrize(("hide", "kind"), [("erofs_file", "erofs_loop"), ("erofs_file,erofs_loop", "dir")])
def test_an_older_kernel_gets_the_next_best_kind_and_the_reason(
    hide: str, kind: Kind, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSEC_DISABLE makes this kernel look like one; the reason is given."""
    if kind == "erofs_loop" and not Path("/dev/loop-control").exists():
        pytest.skip("no loop devices")
    monkeypatch.setenv("DSEC_DISABLE", hide)
    found, reason = mounts.probe(str(image))
    assert found == kind
    assert "erofs_file" in reason


def test_a_killed_process_leaves_no_mount_and_no_loop_device(image: Path) -> None:
    """kill -9 of whoever holds the descriptors."""
    code = (
        "import sys, time\nfrom dsec.layers.mounts import *\n"
        "for kind in ('erofs_file', 'erofs_loop'): open_layer(LayerMount(kind=kind, source=sys.argv[1]))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    before = Path("/proc/self/mountinfo").read_text()
    with subprocess.Popen([sys.executable, "-c", code, str(image)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            pytest.skip("this kernel lacks one of the kinds")
        assert loops_of(image)
        process.kill()
    _eventually(lambda: not loops_of(image))
    assert Path("/proc/self/mountinfo").read_text() == before


def test_user_namespaces_are_made_in_any_thread_without_child_or_signal() -> None:
    """No SIGCHLD, no zombie, right maps, and nothing of the caller is disturbed."""
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, _frame: seen.append(number))
    children = _children()
    made: list[int] = []
    lock = threading.Lock()

    def work(start: int) -> None:
        for n in range(start, start + 10):
            fd = syscalls.make_userns(BASE + n * 65_536)
            with lock:
                made.append(fd)

    try:
        threads = [threading.Thread(target=work, args=(n * 10,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({os.fstat(fd).st_ino for fd in made}) == 40
        assert not seen
        assert _children() == children
    finally:
        signal.signal(signal.SIGCHLD, before)
        for fd in made:
            os.close(fd)


def test_openat2_keeps_links_and_dots_inside_the_root(tmp_path: Path) -> None:
    """RESOLVE_IN_ROOT."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostname").write_text("inside")
    (tmp_path / "link").symlink_to("/etc/hostname")
    root = os.open(tmp_path, os.O_PATH)
    try:
        for path in ("link", "../../../etc/hostname", "/etc/hostname"):
            with os.fdopen(syscalls.openat2(root, path, os.O_RDONLY)) as file:
                assert file.read() == "inside"
        with pytest.raises(OSError, match="openat2"):
            syscalls.openat2(root, "../x", os.O_RDONLY, resolve=syscalls.RESOLVE_BENEATH)
    finally:
        os.close(root)


def test_importing_the_syscalls_costs_little_and_loads_nothing_of_the_project() -> None:
    """The start-up budget that the file promises (with room for a loaded machine)."""
    code = (
        "import sys, time, ctypes, signal, platform\nstart = time.perf_counter()\nimport dsec.syscalls\n"
        "took = (time.perf_counter() - start) * 1e3\n"
        "print(took, *[name for name in sys.modules if name.startswith('dsec.')])"
    )
    took, *modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert modules == ["dsec.syscalls"]
    assert float(took) < 50


def _children() -> set[str]:
    """Our child processes, zombies included."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[1]) == os.getpid():
            found.add(path.parent.name)
    return found


def _eventually(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "still not so"
        time.sleep(0.02)
