"""What to fetch beside what is read: the rest of the same file, or of the small files in the same directory, the more of it the more was
read of it already. So a program is there soon after its first pages, and a library of which little is needed stays where it is.

The units come from the metadata image (``native/files.c``). Without the library, or an image that it understands, they are the blob's
stretches of `STRETCH` chunks. Pure, but for `read`.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterator, Sequence

from dsec.layers.hand import LIBRARY, load

LARGE = 512 * 1024  # a larger file is a unit of its own
STRETCH = 16  # chunks
SOON = 8  # a file of so many chunks comes as a whole
STEP = 8  # chunks at once, beside what is read
FILE, FOLDER, ANYTHING = 3.0, 2.0, 1.5  # of what was read, what may be there: of one file, of small files, of who knows what
MOST = 64  # chunks of a unit that are there and were not read
_PROGRAM, _FOLDER = 1, 2


class Extent(ctypes.Structure):
    """``struct extent``."""

    _fields_ = (
        *(("start", ctypes.c_uint64), ("end", ctypes.c_uint64), ("unit", ctypes.c_uint32), ("flags", ctypes.c_uint32)),
        *(("nid", ctypes.c_uint64), ("at", ctypes.c_uint64)),
    )


class Unit:
    """``chunks`` in order. ``times``: so many times what was read may be there; ``program``: its end is needed as soon as its beginning is
    read."""

    def __init__(self, chunks: Sequence[int], times: float, *, program: bool = False) -> None:
        self.chunks = chunks
        self.times = times
        self.program = program
        self.read: set[int] = set()
        self.asked: set[int] = set()

    def more(self, wanted: range, has: Callable[[int], bool]) -> list[int]:
        """Chunks to fetch, when ``wanted`` are read for the first time: the nearest, of those that follow two for one that does not. In
        order, behind what is needed at once."""
        found: list[int] = []
        urgent = self.chunks[-1:] if self.program and not self.read and not has(self.chunks[-1]) else ()
        self.read.update(wanted)
        self.asked.update(wanted, urgent)
        most = min(int(self.times * len(self.read)), len(self.read) + MOST)
        if len(self.chunks) <= SOON and self.times == FILE:
            most = len(self.chunks)
        for number in self._near(wanted):
            if len(self.asked) >= most or len(found) >= STEP:
                break
            if number not in self.asked:
                self.asked.add(number)
                if not has(number):
                    found.append(number)
        return [*urgent, *sorted(found)]

    def _near(self, wanted: range) -> Iterator[int]:
        before, behind = bisect.bisect_left(self.chunks, wanted[0]) - 1, bisect.bisect_right(self.chunks, wanted[-1])
        while before >= 0 or behind < len(self.chunks):
            yield from self.chunks[behind : behind + 2]
            behind += 2
            if before >= 0:
                yield self.chunks[before]
                before -= 1


class Units:
    """``extents``: (start, end, unit, flags) in order; none: stretches. ``chunk``: bytes; ``count``: chunks of the blob."""

    def __init__(self, extents: Sequence[tuple[int, int, int, int]], chunk: int, count: int) -> None:
        self._chunk, self._count = chunk, count
        self._extents = extents
        self._starts = [extent[0] for extent in extents]
        self._of: dict[int, list[int]] = {}
        for number, extent in enumerate(extents):
            self._of.setdefault(extent[2], []).append(number)
        self._units: dict[int, Unit] = {}
        self._seen = bytearray(count)

    def read(self, offset: int, wanted: range, has: Callable[[int], bool]) -> list[int]:
        """Somebody reads from ``offset`` on, which are the chunks ``wanted``; returns what else should be fetched."""
        if not wanted or all(self._seen[number] for number in wanted):
            return []
        for number in wanted:
            self._seen[number] = 1
        return self._unit(offset).more(wanted, has)

    def _unit(self, offset: int) -> Unit:
        place = bisect.bisect_right(self._starts, offset) - 1
        if place < 0:
            number = -1 - offset // (self._chunk * STRETCH)
        else:
            number = self._extents[place][2]
        if (unit := self._units.get(number)) is None:
            unit = self._units[number] = self._make(number)
        return unit

    def _make(self, number: int) -> Unit:
        if number < 0:
            first = (-1 - number) * STRETCH
            return Unit(range(first, min(first + STRETCH, self._count)), ANYTHING)
        chunks: set[int] = set()
        flags = 0
        for place in self._of[number]:
            start, end, _, flags = self._extents[place]
            chunks.update(range(start // self._chunk, min((end - 1) // self._chunk + 1, self._count)))
        return Unit(sorted(chunks), FOLDER if flags & _FOLDER else FILE, program=bool(flags & _PROGRAM))


def read(meta: str, library: str = str(LIBRARY)) -> list[tuple[int, int, int, int]]:
    """The extents of a metadata image; [] without the library, or of an image that it does not understand. Some milliseconds."""
    found, count = extents(meta, LARGE, library)
    return [(each.start, each.end, each.unit, each.flags) for each in found[:count]]


def extents(meta: str, large: int, library: str = str(LIBRARY)) -> tuple[ctypes.Array[Extent], int]:
    """`read` as the library has it, and how many; ``large``: bytes above which a file is a unit of its own."""
    if (loaded := load(library)) is None:
        return (Extent * 0)(), 0
    try:
        with open(meta, "rb") as file:
            data = file.read()
    except OSError:
        return (Extent * 0)(), 0
    call = loaded.files_read
    call.restype = ctypes.c_int64
    call.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
    room = len(data) // 32  # as many as an image can have inodes: most files are one piece
    found = (Extent * room)()
    return found, max(call(data, len(data), large, ctypes.addressof(found), room), 0)


class Mounted:
    """The files of a metadata image and of its mount, by where they are in the blob: so the kernel can be asked to read some."""

    LEAST = 16 * 1024  # bytes of a file: to read less of it ahead costs more than it spares

    def __init__(self, meta: str, mount: int, library: str = str(LIBRARY)) -> None:
        self._mount = mount
        self._library = load(library)
        self._extents, self._count = extents(meta, 0, library)
        if self._library is not None:
            self._library.files_warm.restype = ctypes.c_int64
            self._library.files_warm.argtypes = (ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint64,) * 4)

    def read(self, start: int, end: int) -> int:
        """These bytes of the blob, into the memory of those who read the files; returns how many there are of files. Waits for them."""
        if self._library is None or not self._count:
            return 0
        where = ctypes.addressof(self._extents)
        return int(self._library.files_warm(self._mount, where, self._count, start, end, self.LEAST))
