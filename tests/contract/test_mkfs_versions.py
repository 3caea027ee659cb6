"""What both kinds of mkfs.erofs owe: Debian 12's 1.5, and the one that set-up puts beside our Python."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from dsec.doctor_probes import at_least, version_of
from dsec.errors import Unsupported
from dsec.layers import erofs, erofs_read, manifest

EPOCH = 1_600_000_000


@pytest.fixture(params=["older", "1.8"])
def mkfs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two makes layers here."""
    if request.param == "older":
        monkeypatch.setenv("DSEC_DISABLE", "erofs_utils")
    try:
        version = version_of(erofs.program(), "-V")[1]
    except Unsupported as error:
        pytest.skip(str(error))
    if at_least(version, 1, 8) != (request.param == "1.8"):
        pytest.skip(f"the mkfs.erofs here is {version}")
    return str(request.param)


def plant(tree: Path, order: int) -> Path:
    """The same files whatever the order in which they are made: links, holes, an attribute, times with nanoseconds."""
    random_ = random.Random(7)
    content = {f"d{n % 5}/f{n:02d}": random_.randbytes(random_.choice((0, 9, 4096, 5000, 70_000))) for n in range(60)}
    names = list(content)
    random.Random(order).shuffle(names)
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content[name])
    os.link(tree / "d0/f00", tree / "d1/link")
    (tree / "symlink").symlink_to("d2/f02")
    with open(tree / "holes", "wb") as file:
        file.truncate(1 << 20)
        file.seek(600_000)
        file.write(b"x")
    os.setxattr(tree / "d3/f03", "user.note", b"kept")
    for path in sorted(tree.rglob("*"), reverse=True):
        os.utime(path, ns=(0, EPOCH * 10**9 + 123_456_789), follow_symlinks=False)
    os.utime(tree, (EPOCH, EPOCH))
    return tree


async def made(tree: Path, place: Path) -> tuple[str, str, manifest.Manifest]:
    """Digests of the tree as one image and as a split layer."""
    place.mkdir()
    found = erofs.survey(str(tree))
    image, meta, blob = place / "image", place / "meta", place / "blob"
    blob.touch()
    await erofs.build(str(tree), str(image), found)
    await erofs.build(str(tree), str(meta), found, blob=str(blob))
    known = manifest.survey(meta, blob)
    return erofs.file_digest(image), manifest.digest(manifest.encode(known)), known


async def test_equal_trees_give_equal_digests(mkfs: str, tmp_path: Path) -> None:
    """Twice in a row, and for a tree that was made elsewhere in another order."""
    first, second = plant(tmp_path / "one", 1), plant(tmp_path / "another" / "place", 2)
    digests = [(await made(tree, tmp_path / f"made{n}"))[:2] for n, tree in enumerate((first, first, second))]
    assert len(set(digests)) == 1


async def test_mtimes_are_kept(mkfs: str, tmp_path: Path) -> None:
    """Set to 0 they would make every compiled Python file stale. Content, links and attributes are what they were, too."""
    tree = plant(tmp_path / "tree", 1)
    await made(tree, tmp_path / "made")
    erofs_read.unpack(str(tmp_path / "made/meta"), tmp_path / "out", str(tmp_path / "made/blob"))
    for path in (tree / "d0/f00", tree / "holes", tree / "d4"):
        twin = tmp_path / "out" / path.relative_to(tree)
        assert int(twin.stat().st_mtime) == EPOCH
        if path.is_file():
            assert hashlib.sha256(twin.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()
    assert os.getxattr(tmp_path / "out/d3/f03", "user.note") == b"kept"
    assert (tmp_path / "out/d0/f00").stat().st_ino == (tmp_path / "out/d1/link").stat().st_ino


async def test_holes_cost_nothing_from_1_8_on(mkfs: str, tmp_path: Path) -> None:
    """A file of 64 MiB with one byte in it; 1.5 stores one unit of zeros for all of its holes."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "holes").write_bytes(b"x")
    os.truncate(tree / "holes", 64 << 20)
    _, _, known = await made(tree, tmp_path / "made")
    assert known.size == (1 << 16 if mkfs == "1.8" else 2 << 16)


def test_set_up_has_put_a_recent_one_here_where_that_is_promised() -> None:
    """On Debian 12 with its sources in reach; elsewhere the release's own."""
    own = Path(erofs.program())
    if own.parent.name != "bin" or not at_least(version_of(str(own), "-V")[1], 1, 8):
        pytest.skip("there is no source of it in reach, or another release")
    done = subprocess.run([str(own), "--help"], capture_output=True, text=True, check=False)
    assert "--tar" in done.stdout
    assert "--mkfs-time" in done.stdout
