"""Tars that nobody vouches for."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsec.errors import InvalidRequest, NodeError
from dsec.layers import untar

Build = Callable[[tarfile.TarFile], object]


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    info.uid, info.gid, info.mtime = os.geteuid(), os.getegid(), 1_000_000_000
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def put(archive: tarfile.TarFile, name: str, content: bytes = b"x", **fields: object) -> None:
    archive.addfile(member(name, size=len(content), **fields), io.BytesIO(content))


def link(archive: tarfile.TarFile, name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> None:
    archive.addfile(member(name, kind, linkname=target))


def make(build: Build, mode: str = "w") -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        build(archive)
    stream.seek(0)
    return stream


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    """A target beside a file that must stay as it is."""
    (tmp_path / "outside").write_text("untouched")
    target = tmp_path / "target"
    target.mkdir()
    yield target
    assert (tmp_path / "outside").read_text() == "untouched"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "target"]


def extract(stream: io.BytesIO, box: Path, **limits: int) -> untar.Done:
    return untar.extract(stream, box, untar.Limits(**limits), untar.Stop())


HOSTILE: dict[str, Build] = {
    "dotdot": lambda a: put(a, "../outside"),
    "dotdot_inside": lambda a: put(a, "a/../../outside"),
    "dotdot_dir": lambda a: a.addfile(member("..", tarfile.DIRTYPE)),
    "hard_link_outside": lambda a: link(a, "l", "../outside", tarfile.LNKTYPE),
    "hard_link_absolute": lambda a: link(a, "l", "/etc/passwd", tarfile.LNKTYPE),
    "hard_link_absent": lambda a: link(a, "l", "nothing", tarfile.LNKTYPE),
    "hard_link_to_directory": lambda a: (a.addfile(member("d", tarfile.DIRTYPE)), link(a, "l", "d", tarfile.LNKTYPE))[1],
    "character_device": lambda a: a.addfile(member("null", tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block_device": lambda a: a.addfile(member("sda", tarfile.BLKTYPE, devmajor=8, devminor=0)),
    "file_as_parent": lambda a: (put(a, "f"), put(a, "f/child"))[1],
    "dangling_link_as_parent": lambda a: (link(a, "l", "/nowhere"), put(a, "l/child"))[1],
    "link_loop_as_parent": lambda a: (link(a, "a", "b"), link(a, "b", "a"), put(a, "a/child"))[2],
    "file_over_full_directory": lambda a: (put(a, "d/f"), put(a, "d"))[1],
    "root_is_a_file": lambda a: put(a, "."),
    "long_component": lambda a: put(a, "x" * 256),
    "long_path": lambda a: put(a, "/".join(["x" * 200] * 30)),
    "foreign_owner": lambda a: put(a, "f", uid=70_000),
    "too_many_bytes": lambda a: put(a, "big", b"x" * 2_000_000),
    "too_many_members": lambda a: all(put(a, f"f{n}") is None for n in range(60)),
    "unknown_type": lambda a: a.addfile(member("odd", b"Z")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_c43_hostile_archives_are_refused_and_nothing_lands_outside(name: str, box: Path) -> None:
    """Each is a typed error."""
    if name == "foreign_owner" and os.geteuid() != 0:
        pytest.skip("only root keeps owners")
    with pytest.raises(InvalidRequest):
        extract(make(HOSTILE[name]), box, bytes=1_000_000, members=50)


def test_c43_a_member_through_a_link_out_lands_inside(box: Path) -> None:
    """A link to the parent, an absolute link and a link to a real host directory resolve as inside a root."""

    def build(archive: tarfile.TarFile) -> None:
        archive.addfile(member("tmp", tarfile.DIRTYPE))
        link(archive, "up", "../../..")
        link(archive, "absolute", "/tmp")
        put(archive, "up/one", b"1")
        put(archive, "absolute/two", b"2")

    host = Path(tempfile.gettempdir()) / "two"
    existed = host.exists()
    extract(make(build), box)
    assert (box / "one").read_bytes() == b"1"
    assert (box / "tmp/two").read_bytes() == b"2"
    assert host.exists() == existed


def test_c43_writing_over_a_link_replaces_the_link(box: Path) -> None:
    """The link's target is not written to."""

    def build(archive: tarfile.TarFile) -> None:
        link(archive, "f", "../outside")
        put(archive, "f", b"mine")
        link(archive, "d", "..")
        archive.addfile(member("d", tarfile.DIRTYPE, mode=0o700))

    extract(make(build), box)
    assert not (box / "f").is_symlink()
    assert (box / "f").read_bytes() == b"mine"
    assert not (box / "d").is_symlink()


def test_a_leading_slash_is_dropped(box: Path) -> None:
    """As GNU tar does."""
    extract(make(lambda a: put(a, "/etc/x", b"in")), box)
    assert (box / "etc/x").read_bytes() == b"in"


def test_c44_honest_links_survive(box: Path) -> None:
    """Absolute and relative targets are kept as they are."""
    extract(make(lambda a: (link(a, "sh", "/bin/busybox"), link(a, "up", "../lib"))[1]), box)
    assert os.readlink(box / "sh") == "/bin/busybox"
    assert os.readlink(box / "up") == "../lib"


def test_modes_times_hard_links_fifos_and_attributes_are_kept(box: Path) -> None:
    """What a tar can say, the tree has: set-id bits, a read-only directory with files in it, one inode under two names."""

    def build(archive: tarfile.TarFile) -> None:
        archive.addfile(member("ro", tarfile.DIRTYPE, mode=0o555, mtime=5))
        put(archive, "ro/su", b"s", mode=0o4755)
        link(archive, "again", "ro/su", tarfile.LNKTYPE)
        archive.addfile(member("pipe", tarfile.FIFOTYPE, mode=0o622))
        put(archive, "noted", pax_headers={"SCHILY.xattr.user.note": "hi", "SCHILY.xattr.trusted.overlay.opaque": "y"})

    done = extract(make(build), box)
    assert done.members == 5
    assert (box / "ro").stat().st_mode & 0o7777 == 0o555
    assert (box / "ro").stat().st_mtime == 5
    assert (box / "again").stat().st_ino == (box / "ro/su").stat().st_ino
    assert (box / "ro/su").stat().st_mode & 0o7777 == 0o4755
    assert (box / "pipe").is_fifo()
    assert (box / "noted").stat().st_mtime == 1_000_000_000
    attributes = os.listxattr(box / "noted")
    assert "trusted.overlay.opaque" not in attributes
    assert any("trusted" in note for note in done.notes)
    if "user.note" in attributes:
        assert os.getxattr(box / "noted", "user.note") == b"hi"
    os.chmod(box / "ro", 0o755)


def test_a_later_member_replaces_an_earlier_one(box: Path) -> None:
    """Duplicates are what an appended tar holds."""
    extract(make(lambda a: (put(a, "f", b"old"), put(a, "f", b"new"))[1]), box)
    assert (box / "f").read_bytes() == b"new"


@pytest.mark.parametrize("compression", ["gz", "bz2", "xz"])
def test_compressed_archives(compression: str, box: Path) -> None:
    """The kind is found from the content."""
    extract(make(lambda a: put(a, "f", b"packed"), f"w:{compression}"), box)
    assert (box / "f").read_bytes() == b"packed"


@pytest.mark.parametrize("keep", [0, 10, 600, 5_000])
def test_truncated_and_garbage_archives_are_the_callers_fault(keep: int, box: Path) -> None:
    """Cut anywhere, plain or compressed."""
    for mode in ("w", "w:gz"):
        whole = make(lambda a: put(a, "f", os.urandom(20_000)), mode).getvalue()
        with pytest.raises(InvalidRequest):
            extract(io.BytesIO(whole[:keep]), box)
    with pytest.raises(InvalidRequest):
        extract(io.BytesIO(os.urandom(4_096)), box)


def test_a_header_that_would_fill_the_memory_is_refused(box: Path) -> None:
    """An extended header of 8 GiB is refused before it is read."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 8 << 30
    with pytest.raises(InvalidRequest):
        extract(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)), box)


def test_a_set_stop_ends_the_extraction(box: Path) -> None:
    """A cancelled import does not run on in its thread."""
    stop = untar.Stop()
    stop.set()
    with pytest.raises(NodeError):
        untar.extract(make(lambda a: put(a, "f")), box, untar.Limits(), stop)
