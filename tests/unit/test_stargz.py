"""Tables of contents of eStargz layers, and manifests that say where chunks of such a layer are."""

from __future__ import annotations

import random
import stat
from typing import Any

import pytest

from dsec.errors import InvalidRequest, NodeError, Unsupported
from dsec.layers import manifest, stargz
from dsec.layers.erofs_write import BLOCK, DEVICE_BLOCK
from dsec.layers.manifest import Manifest, Origin


def entry(name: str, **more: Any) -> stargz.Entry:
    return stargz.Entry(**{"name": name, "type": "reg", "size": 10, "offset": 5, "chunk_digest": "sha256:" + "0" * 64, **more})


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ([entry("../up")], InvalidRequest),
        ([entry("a", chunk_digest="")], Unsupported),
        ([entry("a", chunk_size=5)], Unsupported),  # the rest would be zeros
        ([entry("a", chunk_offset=5)], Unsupported),
        ([entry("a", chunk_size=5), entry("a", type="chunk", chunk_offset=6, chunk_size=4)], Unsupported),
        ([entry("b", type="chunk")], Unsupported),
        ([entry("a"), entry("a")], Unsupported),
        ([entry("l", type="symlink", link_name="/etc"), entry("l/in")], Unsupported),
        ([entry("h", type="hardlink", link_name="nothing")], Unsupported),
        ([entry("a", offset=100)], Unsupported),
        ([entry("a", uid=70_000)], Unsupported),
        ([entry("s", type="symlink")], InvalidRequest),
        ([entry("a", inner_offset=-1)], Unsupported),
        ([entry("a", inner_offset=1 << 40)], Unsupported),
        ([entry("d/" * 1000 + "a")], InvalidRequest),
        ([entry("a", xattrs={"user.a": "a"})], Unsupported),
    ],
)
def test_tables_that_cannot_be_believed(entries: list[stargz.Entry], error: type[Exception]) -> None:
    """What would give other bytes or another tree than the archive is refused."""
    with pytest.raises(error):
        stargz.layer(entries, 50)


def test_what_is_fetched_for_a_chunk_is_bounded() -> None:
    """A table that makes a reader of ten bytes fetch half of a huge blob is refused; the layer is unpacked instead."""
    table = [entry("a"), entry("b", offset=5 + stargz.MAX_MEMBER)]
    assert len(stargz.layer(table, 10 + stargz.MAX_MEMBER).digests) == 2
    table = [entry("a"), entry("b", offset=6 + stargz.MAX_MEMBER)]
    with pytest.raises(Unsupported):
        stargz.layer(table, 10 + stargz.MAX_MEMBER)


def test_a_table_becomes_a_tree() -> None:
    """Chunks stand one behind the other, files begin at blocks, whiteouts and opaque directories are the overlay's own."""
    table = [
        entry("d/", type="dir", size=0, mode=0o750, uid=3),
        entry("d/a", size=BLOCK + 10, chunk_size=BLOCK, offset=5, modtime="2020-09-13T12:26:40Z"),
        entry("d/a", type="chunk", chunk_offset=BLOCK, chunk_size=10, offset=9, inner_offset=4),
        entry("d/.wh.gone", size=0),
        entry("d/.wh..wh..opq", size=0),
        entry("x/y/h", type="hardlink", link_name="d/a"),
        entry("b", offset=20),
        entry("stargz.index.json", offset=30),
    ]
    found = stargz.layer(table, 50)
    folder = found.root.children[b"d"]
    assert (stat.S_IMODE(folder.mode), folder.uid, b"opaque" in folder.xattrs) == (0o750, 3, True)
    file = folder.children[b"a"]
    assert found.root.children[b"x"].children[b"y"].children[b"h"] is file
    assert (file.names, file.block, file.mtime_ns) == (2, DEVICE_BLOCK, 1_600_000_000_000_000_000)
    assert found.root.children[b"b"].block == DEVICE_BLOCK + 2
    assert stat.S_ISCHR(folder.children[b"gone"].mode)
    assert found.implicit == ("x", "x/y")
    assert found.origin == Origin(starts=(0, BLOCK, 2 * BLOCK), lengths=(BLOCK, 10, 10), at=(5, 9, 20), until=(9, 20, 50), skip=(0, 4, 0))
    assert found.size == 3 * BLOCK
    assert b"stargz.index.json" not in found.root.children


def test_what_is_taken_away_stays_away_below_a_name_that_is_only_implied() -> None:
    """A whiteout followed by a file below its name is a directory that hides what lower layers have there."""
    table = [entry("d/.wh.e", size=0), entry("d/e/f", offset=5)]
    found = stargz.layer(table, 50)
    folder = found.root.children[b"d"].children[b"e"]
    assert stat.S_ISDIR(folder.mode)
    assert b"opaque" in folder.xattrs
    assert list(folder.children) == [b"f"]


def test_a_footer_says_where_the_table_is() -> None:
    """As the format's document has it; anything else is no eStargz."""
    assert stargz.toc_offset(stargz.footer(0x1234)) == 0x1234
    for wrong in (b"", bytes(51), stargz.footer(1)[:-1], b"x" + stargz.footer(1)[1:]):
        with pytest.raises(Unsupported):
            stargz.toc_offset(wrong)


def test_a_prefetch_list_is_a_hint_of_a_store_that_nobody_trusts() -> None:
    """Its order stays; what is no chunk, or was there already, and what is too much for one message goes."""
    assert manifest.ahead([5, -1, 3, 5, 10, 2**80, 0], 10) == (5, 3, 0)
    assert manifest.ahead([]) == ()
    assert manifest.ahead(range(10**6), 10**6) == tuple(range(manifest.MOST_AHEAD))
    assert manifest.ahead([2**31, 2**31 - 1]) == (2**31 - 1,)


def test_which_chunks_a_read_touches() -> None:
    """Of chunks of one size and of chunks as an image has them: those that share a byte with it, no others."""
    random_ = random.Random(3)
    starts, lengths, at = [], [], 0
    for _ in range(40):
        at += random_.choice((0, 0, 7, 4096))
        starts.append(at)
        lengths.append(random_.randrange(1, 5000))
        at += lengths[-1]
    count = len(starts)
    origin = Origin(starts=tuple(starts), lengths=tuple(lengths), at=tuple(range(count)), until=(99,) * count, skip=(0,) * count)
    digests = ("0" * 64,) * count
    odd = Manifest(v=2, meta="", meta_size=0, size=at, chunks=digests, origin=origin)
    even = Manifest(v=1, meta="", meta_size=0, size=40 * 100 - 50, chunk=100, chunks=digests)
    for known in (odd, even):
        assert manifest.decode(manifest.encode(known), manifest.digest(manifest.encode(known))) == known
        spans = [known.span(number) for number in range(count)]
        for _ in range(2000):
            offset, length = random_.randrange(known.size), random_.randrange(1, 9000)
            touched = [n for n, (start, size) in enumerate(spans) if start < offset + length and offset < start + size]
            assert list(known.covering(offset, length)) == touched, (offset, length)


def test_a_manifest_whose_chunks_cannot_be_is_refused() -> None:
    """Overlapping, empty, outside of the blob, or not as many as it has digests."""
    good: dict[str, Any] = {"starts": (0, 10), "lengths": (10, 5), "at": (0, 4), "until": (4, 9), "skip": (0, 0)}
    for wrong in ({"starts": (0, 9)}, {"lengths": (10, 0)}, {"lengths": (10, 50)}, {"until": (4, 4)}, {"skip": (0,)}, {"skip": (0, -1)}):
        known = Manifest(v=2, meta="", meta_size=0, size=20, chunks=("0" * 64,) * 2, origin=Origin(**(good | wrong)))
        data = manifest.encode(known)
        with pytest.raises(NodeError):
            manifest.decode(data, manifest.digest(data))
