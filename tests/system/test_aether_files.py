"""File operations through the real guest binary."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.backends.guest.link import Link
from dsec.bus import codec
from dsec.errors import Conflict, Denied, DsecError, InvalidRequest, NotFound, SandboxError
from dsec.model import FileReply, FileRequest
from dsec.trees import clear
from tests.system.aether_box import Box

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="pid namespaces need root")

PIECE = 256 * 1024


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Box]:
    state_dir.chmod(0o755)
    box = Box(state_dir)
    yield box
    await box.close()


@pytest.fixture
def link(box: Box) -> Link:
    return box.link()


@pytest.fixture
def root(state_dir: Path) -> Path:
    (state_dir / "tree").mkdir()
    (state_dir / "tree").chmod(0o777)
    return state_dir / "tree"


@pytest.fixture
def memory_root() -> Iterator[Path]:
    """In memory: thousands of directories on a busy disk take as long as its journal likes."""
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/dev/shm"))
    yield place
    clear(place)


async def ask(link: Link, verb: str, path: Path | str, **fields: object) -> FileReply:
    return await link.files(FileRequest(verb=verb, path=str(path), **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 18 * 1024, 18 * 1024 + 1, 120_000, PIECE, PIECE + 1, 20_000_000])
async def test_c39_c40_every_size_arrives_whole(link: Link, root: Path, size: int) -> None:
    """Up and down in pieces, hashes compared."""
    data = os.urandom(size)
    await ask(link, "write", root / "f", create=True, truncate=True)
    pieces = [(at, data[at : at + PIECE]) for at in range(0, size, PIECE)]
    await asyncio.gather(*(ask(link, "write", root / "f", offset=at, data=piece) for at, piece in pieces))
    assert hashlib.sha256((root / "f").read_bytes()).digest() == hashlib.sha256(data).digest()
    back, end = b"", False
    while not end:
        reply = await ask(link, "read", root / "f", offset=len(back), length=PIECE)
        back, end = back + reply.data, reply.eof
    assert back == data


async def test_c41_a_piece_beyond_the_limit_is_an_error(link: Link, root: Path) -> None:
    """It names the limit's field, and nothing is written."""
    with pytest.raises(InvalidRequest) as caught:
        await ask(link, "write", root / "f", data=b"x" * (PIECE + 1), create=True)
    assert caught.value.field == "data"
    assert not (root / "f").exists()


async def test_stat_list_mkdir_rename_remove(link: Link, root: Path) -> None:
    """The whole life of a tree."""
    await ask(link, "mkdir", root / "a/b/c", create=True)
    await ask(link, "mkdir", root / "a/b/c", create=True)
    with pytest.raises(Conflict):
        await ask(link, "mkdir", root / "a/b/c")
    assert (root / "a/b/c").stat().st_mode & 0o7777 == 0o755
    await ask(link, "write", root / "a/x", data=b"12345", create=True, mode=0o640)
    (root / "a/link").symlink_to("x")
    found = (await ask(link, "stat", root / "a/x")).stat
    assert found is not None
    assert (found.name, found.kind, found.size, found.mode) == ("x", "file", 5, 0o640)
    found = (await ask(link, "stat", root / "a/link")).stat
    assert found is not None
    assert (found.kind, found.target) == ("link", "x")
    listing = await ask(link, "list", root / "a", length=1000)
    assert sorted((e.name, e.kind) for e in listing.entries) == [("b", "dir"), ("link", "link"), ("x", "file")]
    assert listing.eof
    await ask(link, "rename", root / "a/x", target=str(root / "y"))
    assert (root / "y").read_bytes() == b"12345"
    with pytest.raises(Conflict):
        await ask(link, "remove", root / "a")
    await ask(link, "remove", root / "a", recursive=True)
    assert not (root / "a").exists()


async def test_a_name_that_is_not_utf8_does_not_hide_its_directory(link: Link, root: Path) -> None:
    """It is spelled with its bytes, and the listing can be sent on."""
    (root / os.fsdecode(b"odd-\xff\n")).write_text("x")
    (root / "grün").symlink_to(os.fsdecode(b"to-\xfe"))
    listing = await ask(link, "list", root, length=1000)
    assert sorted((e.name, e.target) for e in listing.entries) == [("grün", "to-\\xfe"), ("odd-\\xff\n", "")]
    codec.encode(listing)


async def test_a_large_directory_is_listed_in_pieces(link: Link, root: Path) -> None:
    """The cursor goes on where the last piece ended, and no piece is above its bound."""
    for i in range(3000):
        (root / f"{'n' * 150}-{i:04}").touch()
    names: list[str] = []
    end = False
    while not end:
        reply = await ask(link, "list", root, offset=len(names), length=1000)
        assert 0 < len(reply.entries) <= 1000
        names += [entry.name for entry in reply.entries]
        end = reply.eof
    assert len(set(names)) == len(names) == 3000


async def test_removing_a_deep_and_wide_tree_follows_no_link(link: Link, root: Path) -> None:
    """What a link points to stays."""
    (root / "keep").mkdir()
    (root / "keep/file").write_text("x")
    deep = root / "t"
    for _ in range(60):
        deep = deep / "d"
    deep.mkdir(parents=True)
    for i in range(500):
        (root / "t" / str(i)).touch()
    (deep / "out").symlink_to(root / "keep")
    await ask(link, "remove", root / "t", recursive=True)
    assert not (root / "t").exists()
    assert (root / "keep/file").read_text() == "x"


@pytest.mark.parametrize(
    ("verb", "path", "fields", "error"),
    [
        ("read", "no-such-file", {"length": 1}, NotFound),
        ("read", ".", {"length": 1}, InvalidRequest),
        ("read", "fifo", {"length": 1}, InvalidRequest),
        ("write", "no/parent", {"create": True}, NotFound),
        ("write", "absent", {}, NotFound),
        ("list", "file", {"length": 1}, NotFound),
        ("remove", "absent", {}, NotFound),
        ("remove", "..", {}, InvalidRequest),
        ("rename", "absent", {"target": "/tmp"}, NotFound),
        ("write", "x" * 300, {"create": True}, InvalidRequest),
        ("stat", "x" * 5000, {}, InvalidRequest),
        ("stat", "a\0b", {}, InvalidRequest),
        ("chflags", "file", {}, InvalidRequest),
        ("read", "/proc/1/environ", {"length": 10}, DsecError),
    ],
)
async def test_a_failure_is_typed_and_names_the_path(
    link: Link, root: Path, verb: str, path: str, fields: dict[str, object], error: type[DsecError]
) -> None:
    """A FIFO does not hang it, a directory is no file, and nothing is cut silently."""
    os.mkfifo(root / "fifo")
    (root / "file").touch()
    with pytest.raises(error) as caught:
        await asyncio.wait_for(ask(link, verb, f"{root}/{path}" if not path.startswith("/") else path, **fields), 5)
    assert caught.value.field in {"path", "target", "verb"}
    assert caught.value.sandbox == "t-box"


async def test_files_are_touched_as_the_user(link: Link, root: Path) -> None:
    """Owner and permissions are the run-as user's, also right after another user's request."""
    await ask(link, "write", root / "roots", data=b"x", create=True, mode=0o600)
    await ask(link, "write", root / "mine", data=b"x", create=True, user="nobody")
    assert (root / "mine").stat().st_uid == 65534
    with pytest.raises(Denied):
        await ask(link, "read", root / "roots", length=1, user="nobody")
    with pytest.raises(NotFound) as caught:
        await ask(link, "stat", root / "mine", user="no-such-user")
    assert caught.value.field == "user"
    assert (await ask(link, "read", root / "roots", length=1)).data == b"x"


async def test_magic_links_are_refused(link: Link) -> None:
    """/proc/N/root and /proc/N/fd lead out of any resolution."""
    for path in ("/proc/self/root/etc/passwd", "/proc/self/cwd/x", "/proc/self/fd/3"):
        with pytest.raises(DsecError):
            await ask(link, "read", path, length=10)


async def test_a_full_disk_is_named(box: Box, link: Link, root: Path) -> None:
    """ENOSPC is the sandbox's error, with its name in ``reason``."""
    # The mount belongs in the guest's mount namespace: entered from outside, since the guest itself may not mount.
    command = ("nsenter", "-t", str(box.pid), "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(root))
    await asyncio.to_thread(subprocess.run, command, check=True)
    await ask(link, "write", root / "big", create=True)
    with pytest.raises(SandboxError) as caught:
        await ask(link, "write", root / "big", data=b"x" * PIECE)
    assert caught.value.reason == "ENOSPC"


async def test_a_worker_that_is_killed_from_inside_is_replaced(box: Box, link: Link, root: Path) -> None:
    """Root inside kills the file workers: a request fails at most once, and the next one works."""
    await ask(link, "write", root / "f", data=b"abc", create=True)
    for pid, _, line in box.processes():
        if "aether" in line:
            os.kill(pid, 9)
    await asyncio.sleep(0.1)
    assert (await ask(link, "read", root / "f", length=3)).data == b"abc"


async def test_workers_leave_when_idle(box: Box, link: Link, root: Path) -> None:
    """An idle sandbox is its init alone."""
    await ask(link, "stat", root)
    assert box.processes()
    for _ in range(60):
        await asyncio.sleep(0.1)
        if not box.processes():
            break
    assert box.processes() == []


def _deep(top: Path, levels: int, width: int) -> None:
    """A chain of directories, ``width`` files and one empty directory beside each, made without a path that long."""
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(levels):
        for number in range(width):
            os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=at))
        os.mkdir("beside", dir_fd=at)
        os.mkdir("d", dir_fd=at)
        fd = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = fd
    os.close(at)


@pytest.mark.parametrize(("levels", "width"), [(150, 3), (201, 1), (3000, 1)])
async def test_a_tree_of_any_depth_is_removed(link: Link, memory_root: Path, levels: int, width: int) -> None:
    """However deep it is, with few descriptors; what lies beside it stays, and so does what its links point to."""
    (memory_root / "kept").mkdir()
    (memory_root / "kept" / "file").write_text("x")
    await asyncio.to_thread((memory_root / "t").mkdir)
    (memory_root / "t" / "link").symlink_to(memory_root / "kept")
    await asyncio.to_thread(_deep, memory_root / "t", levels, width)
    with pytest.raises(Conflict):
        await ask(link, "remove", memory_root / "t")
    await ask(link, "remove", memory_root / "t", recursive=True)
    assert sorted(os.listdir(memory_root)) == ["kept"]
    assert (memory_root / "kept" / "file").read_text() == "x"
    with pytest.raises(NotFound):
        await ask(link, "remove", memory_root / "t", recursive=True)
