"""What of a process is sent to swap, in which pieces, and how a swap area is known as our own (no swap is touched)."""

from __future__ import annotations

import pytest

from dsec.errors import InvalidRequest
from dsec.qos import pages, swap

MAPS = """\
00400000-00401000 r--p 00000000 fe:00 100        /bin/x
00401000-00402000 rw-p 00001000 fe:00 100        /bin/x
01000000-01021000 rw-p 00000000 00:00 0          [heap]
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000200000-7f0000300000 r--s 00000000 fe:00 7  /lib/locale
7f0000300000-7f0000400000 rw-s 00000000 00:01 9  /dev/zero (deleted)
7f0000400000-7f0000500000 r-xp 00000000 fe:00 8  /lib/libc.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0  [stack]
7ffc00030000-7ffc00034000 r--p 00000000 00:00 0  [vvar]
7ffc00034000-7ffc00036000 r-xp 00000000 00:00 0  [vdso]
"""


def test_only_memory_of_its_own_goes() -> None:
    """Anonymous memory, written data and shared memory; not the text that all who use a layer read, nor what the kernel maps."""
    assert pages.worthwhile(MAPS) == [
        (0x401000, 0x1000),
        (0x1000000, 0x21000),
        (0x7F0000000000, 0x200000),
        (0x7F0000300000, 0x100000),
        (0x7FFC00000000, 0x21000),
    ]


def test_pieces_cover_all_and_are_bounded() -> None:
    """Ranges are cut and gathered: nothing is left out, no piece is larger than asked for, none has more ranges than a call takes."""
    ranges = [(1 << 20, 10 << 20), (1 << 30, 4096), *((n << 32, 4096) for n in range(1, 3000))]
    made = list(pages.chunks(ranges, 4 << 20))
    assert sum(size for chunk in made for _, size in chunk) == sum(size for _, size in ranges)
    assert all(sum(size for _, size in chunk) <= 4 << 20 and len(chunk) <= pages.VECTOR for chunk in made)
    assert made[0] == [(1 << 20, 4 << 20)]
    assert list(pages.chunks([], 4096)) == []


def test_a_range_that_is_gone_does_not_stop_the_rest() -> None:
    """After a call that stopped early, the range that stopped it is left out and the others are tried."""
    ranges = [(0, 10), (100, 10), (200, 10)]
    assert pages._after(ranges, 0) == ranges[1:]
    assert pages._after(ranges, 10) == ranges[2:]
    assert pages._after(ranges, 15) == ranges[2:]
    assert pages._after(ranges, 30) == []


def test_a_swap_area_bears_its_owner_s_name() -> None:
    """The label in the signature derives from the state directory; what is no swap area, or another one's, is not taken for ours."""
    mine, other = (swap.Swap("zram", 1 << 20, place) for place in ("/a", "/b"))
    first = swap.signature(256, mine.label)
    assert len(first) == swap.PAGE
    assert first.endswith(swap.MAGIC)
    assert swap.label_of(first) == mine.label != other.label
    assert swap.label_of(bytes(swap.PAGE)) == swap.label_of(b"") == ""
    assert int.from_bytes(first[1024:1028], "little") == 1
    assert int.from_bytes(first[1028:1032], "little") == 255
    for pages_, label in ((9, "x"), (256, "x" * 16)):
        with pytest.raises(ValueError, match="pages"):
            swap.signature(pages_, label)
    with pytest.raises(InvalidRequest):
        swap.Swap("disk", 0, "/a")


def test_swap_in_use_is_read_from_the_kernel() -> None:
    """Sizes are bytes; a blank in a path is one again; a kernel without swap has none."""
    text = "Filename Type Size Used Priority\n/dev/zram0 partition 1024 4 16\n/a\\040b/swap file 2048 0 -2\n"
    assert swap.areas(text) == (swap.Area("/dev/zram0", 1 << 20, 4096), swap.Area("/a b/swap", 2 << 20, 0))
    assert swap.areas("Filename Type Size Used Priority\n") == ()
