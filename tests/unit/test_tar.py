"""Archives from a hostile sandbox, and honest ones: nothing lands outside of the target, and what is honest survives."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec import tar
from dsec.errors import DsecError, InvalidRequest, SandboxError
from libdsec import packing, tree
from libdsec.bridge import Bridge, Closed

STRICT = tar.Rules(devices="skip", strict=True)


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"evil", **fields: Any) -> bytes:
    """One member as bytes, as a hostile archive has it: nothing is checked."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    for field, value in fields.items():
        setattr(info, field, value)
    body = data + bytes(-len(data) % 512) if kind == tarfile.REGTYPE else b""
    return info.tobuf(tarfile.PAX_FORMAT) + body


def pax(records: str, size: int | None = None) -> bytes:
    """An extended header with these records."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT) + records.encode() + bytes(-len(records) % 512)


def record(key: str, value: str) -> str:
    body = f" {key}={value}\n"
    length = len(body) + 1
    while len(f"{length}{body}") != length:
        length += 1
    return f"{length}{body}"


END = bytes(1024)
LINK, HARD, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
SPARSE = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") + record("GNU.sparse.realsize", "4096")
# name -> the archive; OUT stands for a directory outside of the target.
HOSTILE: dict[str, Callable[[str], bytes]] = {
    "dotdot": lambda _: member("../evil"),
    "dotdot in the middle": lambda _: member("a/../../evil"),
    "absolute": lambda out: member(f"{out}/evil"),
    "through a link": lambda out: member("d", LINK, linkname=out) + member("d/evil"),
    "through a relative link": lambda _: member("d", LINK, linkname="../out") + member("d/evil"),
    "through two links": lambda out: member("a", LINK, linkname=out) + member("b", LINK, linkname="a") + member("b/evil"),
    "a link in place of a directory": lambda out: member("d", DIR) + member("d", LINK, linkname=out) + member("d/evil"),
    "over a link": lambda out: member("f", LINK, linkname=f"{out}/evil") + member("f"),
    "hard link to outside": lambda out: member("h", HARD, linkname=f"{out}/keep") + member("h"),
    "hard link by dotdot": lambda _: member("h", HARD, linkname="../out/keep") + member("h"),
    "hard link to a link": lambda out: member("l", LINK, linkname=f"{out}/keep") + member("h", HARD, linkname="l") + member("h"),
    "hard link through a link": lambda out: member("d", LINK, linkname=out) + member("h", HARD, linkname="d/keep") + member("h"),
    "a mode through a link": lambda out: member("k", LINK, linkname=f"{out}/keep") + member("k", DIR, mode=0o777),
    "long name": lambda _: pax(record("path", "../" * 50 + "evil")) + member("x"),
    "the root as a link": lambda out: member(".", LINK, linkname=out) + member("evil"),
    "the root as a file": lambda _: member("."),
    "an empty name": lambda _: member(""),
    "a name of dots": lambda _: member("...") + member("d/..."),
    "NUL in a name": lambda _: pax("15 path=a\0b\n" + record("comment", "x")) + member("x"),
    "a device": lambda _: member("sda", tarfile.BLKTYPE, devmajor=8) + member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
    "an endless header": lambda _: pax("", 1 << 32),
    "a negative size": lambda _: b"x" + bytes(123) + b"\xff" * 12 + bytes(376),
    "headers without a member": lambda _: pax(record("comment", "x")) * 3000,
    "global headers": lambda _: pax(record("path", "evil")).replace(b"x" + bytes(100), b"g" + bytes(100), 1) + member("x"),
    "a sparse map without end": lambda _: pax(SPARSE) + member("s", data=b"99999999999999\n" + b"1\n" * 5000),
    "a sparse map beyond": lambda _: pax(SPARSE) + member("s", data=b"1\n9999\n10\n".ljust(512, b"\0") + b"x" * 10),
    "a sparse map backwards": lambda _: pax(SPARSE) + member("s", data=b"2\n100\n9\n0\n9\n".ljust(512, b"\0") + b"x" * 18),
    "garbage": lambda _: os.urandom(5000),
    "truncated": lambda _: member("f", data=b"x" * 5000)[:2000],
    "a set-id file": lambda _: member("su", mode=0o6755),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep").write_text("keep")
    (tmp_path / "out" / "keep").chmod(0o600)
    (tmp_path / "target").mkdir()
    yield tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "target"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["keep"]
    assert (tmp_path / "out" / "keep").read_text() == "keep"
    assert (tmp_path / "out" / "keep").stat().st_mode & 0o7777 == 0o600


def unpack(archive: bytes, target: Path, rules: tar.Rules = STRICT, **limits: int) -> tar.Done:
    root = os.open(target, os.O_RDONLY)
    try:
        return tar.unpack(io.BytesIO(archive), root, rules=rules, limits=tar.Limits(**limits), stop=tar.Stop())
    finally:
        os.close(root)


@pytest.mark.parametrize("name", HOSTILE)
def test_c43_nothing_is_written_outside(place: Path, name: str) -> None:
    """A hostile archive is refused with a typed error or lands inside, twice in a row, and no set-id bit is kept."""
    archive = HOSTILE[name](str(place / "out")) + END
    for _ in range(2):
        with contextlib.suppress(InvalidRequest):  # nothing else may come out
            unpack(archive, place / "target")
    for path in (place / "target").rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o6000 == 0
    assert not [path for path in (place / "target").rglob("*") if path.is_block_device() or path.is_char_device()]


@pytest.mark.parametrize("name", HOSTILE)
async def test_c43_a_download_turns_it_into_the_sandboxs_error(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a download, from the stream's first piece on: the caller's disk and the caller's threads stay as they were."""

    async def hostile(*_: object, **__: object) -> AsyncIterator[bytes]:
        data = HOSTILE[name](str(place / "out")) + END
        for at in range(0, len(data), 700):
            yield data[at : at + 700]

    class Log:
        def warning(self, *_: object, **__: object) -> None: ...

    class Box:
        id = "n1-x"
        _wire = type("Wire", (), {"log": Log()})()

    monkeypatch.setattr(tree, "pack_inside", hostile)
    with contextlib.suppress(SandboxError):  # nothing else may come out
        await asyncio.wait_for(tree.download_tree(Box(), "", "/t", place / "target", False, 1 << 20, None), 10)  # type: ignore[arg-type]


def test_c43_a_bomb_meets_its_limits(place: Path) -> None:
    """Too many members, too many bytes, and a hole of a petabyte that costs no time."""
    with pytest.raises(InvalidRequest, match="members"):
        unpack(b"".join(member(str(n), data=b"") for n in range(20)) + END, place / "target", members=10)
    with pytest.raises(InvalidRequest, match="bytes"):
        unpack(member("f", data=b"x" * 5000) + END, place / "target", bytes=4999)
    hole = record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0") + record("GNU.sparse.realsize", str(1 << 42))
    body = f"1\n{1 << 42}\n0\n".encode().ljust(512, b"\0")
    done = unpack(pax(hole) + member("hole", data=body) + END, place / "target", bytes=1 << 43)
    assert done.bytes == 1 << 42
    assert (place / "target/hole").stat().st_blocks < 100


def test_memory_does_not_grow_with_the_archive(place: Path) -> None:
    """Five thousand members, which tarfile would keep all, take less than 1 MiB."""
    one = member("f", data=b"")

    class Endless(io.RawIOBase):
        left = 5_000

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            return one if self.left > 0 else END if size else b""

    root = os.open(place / "target", os.O_RDONLY)
    tracemalloc.start()
    try:
        assert tar.unpack(Endless(), root, rules=STRICT, limits=tar.Limits(), stop=tar.Stop()).members == 4_999  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        os.close(root)


def test_directories_are_remembered_within_a_bound(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it they get their mode at once, and are filled all the same."""
    monkeypatch.setattr(tar, "_MAX_LATER", 3)
    archive = b"".join(member(f"d{n}", DIR, mode=0o755) + member(f"d{n}/f") for n in range(6))
    unpack(archive + END, place / "target")
    assert sorted(path.name for path in (place / "target").iterdir()) == [f"d{n}" for n in range(6)]
    assert all((place / f"target/d{n}").stat().st_mode & 0o777 == 0o755 and (place / f"target/d{n}/f").exists() for n in range(6))


def test_c44_what_is_honest_survives(place: Path) -> None:
    """Absolute and dangling links, hard links, holes, modes, nanoseconds and attributes come back as they were packed."""
    source = place / "target" / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub").chmod(0o500)
    (source / "abs").symlink_to("/etc/passwd")
    (source / "up").symlink_to("../../nowhere")
    (source / "f").write_bytes(b"data")
    os.utime(source / "f", ns=(1, 1_600_000_000_123_456_789))
    os.link(source / "f", source / "again")
    os.mkfifo(source / "fifo", 0o640)
    with open(source / "holes", "wb") as file:
        for at in (1 << 20, 5 << 20):
            file.seek(at)
            file.write(b"x" * 5000)
        file.truncate(50 << 20)
    (source / ("n" * 200)).write_bytes(b"long")
    os.fsencode(source)
    attributes = True
    try:
        os.setxattr(source / "f", "user.a", bytes(range(256)))
    except OSError:
        attributes = False
    archive = io.BytesIO()
    packing.pack(archive.write, source, ".", tar.Stop(), lambda _: None)
    assert len(archive.getvalue()) < 200_000, "holes are not sent"
    back = place / "target" / "back"
    back.mkdir()
    unpack(archive.getvalue(), back)
    assert os.readlink(back / "abs") == "/etc/passwd"
    assert os.readlink(back / "up") == "../../nowhere"
    assert (back / "f").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert (back / "f").stat().st_ino == (back / "again").stat().st_ino
    assert (back / "sub").stat().st_mode & 0o7777 == 0o500
    assert (back / "fifo").is_fifo()
    assert (back / "holes").read_bytes() == (source / "holes").read_bytes()
    assert (back / "holes").stat().st_blocks < 200
    assert (back / ("n" * 200)).read_bytes() == b"long"
    if attributes:
        assert os.getxattr(back / "f", "user.a") == bytes(range(256))


def test_names_that_are_no_text_survive(place: Path) -> None:
    """Bytes that are not UTF-8."""
    source = place / "target" / "source"
    source.mkdir()
    (Path(os.fsdecode(os.fsencode(source) + b"/\xff\xfe\n"))).write_bytes(b"x")
    archive = io.BytesIO()
    packing.pack(archive.write, source, ".", tar.Stop(), lambda _: None)
    back = place / "target" / "back"
    back.mkdir()
    unpack(archive.getvalue(), back)
    assert os.listdir(os.fsencode(back)) == [b"\xff\xfe\n"]


async def test_a_bridge_is_bounded_and_tells_each_side_of_the_others_end() -> None:
    """A thread that writes without a reader waits; a reader that leaves ends it; a writer that gives up ends the reader."""
    bridge = Bridge()
    written = 0

    def work() -> None:
        nonlocal written
        while True:
            bridge.write(bytes(1 << 20))
            written += 1

    thread = asyncio.create_task(asyncio.to_thread(work))
    await asyncio.sleep(0.1)
    assert 4 <= written <= 6
    assert len(await bridge.get(100)) == 100
    bridge.leave()
    with pytest.raises(Closed):
        await asyncio.wait_for(thread, 5)
    other = Bridge()
    reading = asyncio.create_task(asyncio.to_thread(other.read, 10))
    await other.put(b"abc")
    assert await asyncio.wait_for(reading, 5) == b"abc"
    reading = asyncio.create_task(asyncio.to_thread(other.read, 10))
    await asyncio.sleep(0.01)
    other.leave()
    with pytest.raises(Closed):
        await asyncio.wait_for(reading, 5)
    assert issubclass(InvalidRequest, DsecError)
