"""A local tree as a tar stream (PAX), written by a thread: links, modes, owners, times to the nanosecond, ``user.*`` attributes, holes."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dsec.errors import InvalidRequest
from dsec.tar import Stop

BLOCK = tarfile.BLOCKSIZE
CHUNK = 1 << 18
MOST_PIECES = 4096  # of one sparse file; one with more is sent whole


def pack(write: Callable[[bytes], object], source: Path, name: str, stop: Stop, tell: Callable[[int], object]) -> int:
    """Write ``source`` (a directory, file or link) under ``name`` in the archive ("." = the archive's root); bytes of content.

    ``tell`` gets the bytes so far. Sockets and device nodes are refused with `InvalidRequest`; what disappears meanwhile is left out.
    """
    buffer = bytearray()

    def gathered(data: bytes) -> None:  # headers of small files go together
        nonlocal buffer
        buffer += data
        if len(buffer) >= CHUNK:
            write(bytes(buffer))
            buffer = bytearray()

    packer = _Packer(gathered, stop, tell)
    packer.member(os.fsencode(source), name)
    write(bytes(buffer + bytes(2 * BLOCK)))
    return packer.bytes


class _Packer:
    def __init__(self, write: Callable[[bytes], object], stop: Stop, tell: Callable[[int], object]) -> None:
        self._write = write
        self._stop = stop
        self._tell = tell
        self._links: dict[tuple[int, int], str] = {}
        self.bytes = 0

    def member(self, path: bytes, name: str) -> None:
        todo = [(path, name)]
        while todo:
            here, called = todo.pop()
            if self._stop.is_set():
                return
            try:
                info = os.lstat(here)
                if stat.S_ISDIR(info.st_mode):
                    self._write(self._header(here, called, info, tarfile.DIRTYPE))
                    below = "" if called == "." else f"{called}/"
                    names = sorted(os.listdir(here), reverse=True)
                    todo += [(os.path.join(here, entry), below + os.fsdecode(entry)) for entry in names]
                else:
                    self._other(here, called, info)
            except FileNotFoundError:
                if here == path:
                    raise

    def _other(self, path: bytes, name: str, info: os.stat_result) -> None:
        if stat.S_ISLNK(info.st_mode):
            self._write(self._header(path, name, info, tarfile.SYMTYPE, link=os.fsdecode(os.readlink(path))))
            return
        if stat.S_ISFIFO(info.st_mode):
            self._write(self._header(path, name, info, tarfile.FIFOTYPE))
            return
        if not stat.S_ISREG(info.st_mode):
            raise InvalidRequest("is neither a file, a directory, a link nor a FIFO", field="source", value=os.fsdecode(path))
        key = (info.st_dev, info.st_ino)
        first = self._links.get(key) if info.st_nlink > 1 else None
        if first is not None:
            self._write(self._header(path, name, info, tarfile.LNKTYPE, link=first))
            return
        if info.st_nlink > 1:
            self._links[key] = name
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as file:
            self._file(file, path, name, os.fstat(file.fileno()))

    def _file(self, file: IO[bytes], path: bytes, name: str, info: os.stat_result) -> None:
        pieces = _pieces(file.fileno(), info) if getattr(info, "st_blocks", 0) * 512 < info.st_size else None
        if pieces is None:
            self._write(self._header(path, name, info, tarfile.REGTYPE, size=info.st_size))
            self._copy(file, 0, info.st_size)
            self._write(bytes(-info.st_size % BLOCK))
            return
        table = "".join(f"{number}\n" for number in (len(pieces), *(n for piece in pieces for n in piece))).encode()
        table += bytes(-len(table) % BLOCK)
        stored = sum(size for _, size in pieces)
        extra = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": name, "GNU.sparse.realsize": str(info.st_size)}
        self._write(self._header(path, name, info, tarfile.REGTYPE, size=len(table) + stored, extra=extra) + table)
        for at, size in pieces:
            self._copy(file, at, size)
        self._write(bytes(-stored % BLOCK))

    def _copy(self, file: IO[bytes], at: int, size: int) -> None:
        """Exactly ``size`` bytes: one that became shorter meanwhile is filled up, since its header is out."""
        left = size
        if at:
            file.seek(at)
        while left and not self._stop.is_set():
            data = file.read(min(left, CHUNK)) or bytes(min(left, CHUNK))
            self._write(data)
            left -= len(data)
            self.bytes += len(data)
            self._tell(self.bytes)

    def _header(
        self,
        path: bytes,
        name: str,
        info: os.stat_result,
        kind: bytes,
        *,
        size: int = 0,
        link: str = "",
        extra: dict[str, str] | None = None,
    ) -> bytes:
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, size, link
        member.mode, member.uid, member.gid = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid
        seconds, nanos = divmod(info.st_mtime_ns, 1_000_000_000)
        member.mtime = max(0, seconds)
        headers = dict(extra or {})
        if nanos and seconds >= 0:
            headers["mtime"] = f"{seconds}.{nanos:09}"
        if kind in (tarfile.REGTYPE, tarfile.DIRTYPE):
            headers |= _attributes(path)
        member.pax_headers = headers
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _pieces(fd: int, info: os.stat_result) -> list[tuple[int, int]] | None:
    """Where the data of a file with holes is; None: it has none, or too many."""
    found: list[tuple[int, int]] = []
    at = 0
    try:
        while at < info.st_size and len(found) < MOST_PIECES:
            begin = os.lseek(fd, at, os.SEEK_DATA)
            at = min(os.lseek(fd, begin, os.SEEK_HOLE), info.st_size)
            found.append((begin, at - begin))
    except OSError as error:
        if error.errno != errno.ENXIO:  # this file system does not tell; ENXIO: only a hole is left
            return None
    finally:
        os.lseek(fd, 0, os.SEEK_SET)
    if len(found) == MOST_PIECES or found == [(0, info.st_size)]:
        return None
    return [*found, (info.st_size, 0)]


def _attributes(path: bytes) -> dict[str, str]:
    if not hasattr(os, "listxattr"):
        return {}
    try:
        names = os.listxattr(path, follow_symlinks=False)
        wanted = [name for name in names if name.startswith("user.") or name == "security.capability"]
        raw = {name: os.getxattr(path, name, follow_symlinks=False) for name in wanted}
    except OSError:  # a file system without them, or the file went away
        return {}
    return {f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in raw.items()}
