"""Read an EROFS image without the kernel's help, to unpack it where the kernel cannot mount it.

fsck.erofs 1.5 could extract too, but it loses set-id bits, hard links and extended attributes, so a base's sudo or ping would
break without a word. The format is small (Linux, fs/erofs/erofs_fs.h): a superblock at 1024, inodes of 32 or 64 bytes at multiples of
32, directories as blocks of (entry…, name…), data in whole blocks with the tail behind the inode. Images of this project are
uncompressed, and either whole or spread over metadata and one blob; compressed ones are refused. Blocking: run it in a thread.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsec.errors import NodeError, Unsupported

_SUPERBLOCK = struct.Struct("<4s I I B B H Q Q I I I I 16s 16s I")
_COMPACT = struct.Struct("<H H H H I I I I H H I")
_EXTENDED = struct.Struct("<H H H H Q I I I I Q I I 16x")
_DIRENT = struct.Struct("<Q H B B")
_PLAIN, _INLINE, _CHUNKED = 0, 2, 4  # data layouts: whole blocks; whole blocks and a tail behind the inode; pieces, by an index
_ZERO_PADDING, _CHUNKED_FILE, _DEVICE_TABLE = 0x1, 0x4, 0x8
_CHUNK = struct.Struct("<H H I")
_HOLE = 0xFFFFFFFF
_PREFIXES = {1: "user.", 2: "system.posix_acl_access", 3: "system.posix_acl_default", 4: "trusted.", 6: "security."}
_MAX_NAME = 255


class Inode(msgspec.Struct, frozen=True):
    """One file as the image holds it; ``tail`` is where what follows the inode and its attributes begins."""

    nid: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    nlink: int
    layout: int
    start: int  # of the whole blocks, in bytes; the device number for devices; log2 of a chunk's blocks for chunked files
    tail: int
    xattrs: tuple[tuple[str, bytes], ...]


class Image:
    """An image's files by inode number. Raises `NodeError` for a damaged image, `Unsupported` for a kind that it cannot read."""

    def __init__(self, data: bytes | mmap.mmap, blob: bytes | mmap.mmap = b"") -> None:
        self._data = data
        self._blob = blob
        try:
            (_, _, _, bits, _, self.root, _, self._built, _, _, meta, xattr, _, _, needs) = _SUPERBLOCK.unpack_from(data, 1024)
        except struct.error as error:
            raise NodeError("the image is truncated", retryable=False) from error
        if needs & ~(_ZERO_PADDING | _CHUNKED_FILE | _DEVICE_TABLE):  # zero padding says nothing about uncompressed data
            raise Unsupported("the image is compressed, or of a kind unknown here", reason=f"feature_incompat {needs:#x}")
        self._block = 1 << bits
        self._meta = meta << bits
        self._shared = xattr << bits

    def inode(self, nid: int) -> Inode:
        at = self._meta + nid * 32
        try:
            form = struct.unpack_from("<H", self._data, at)[0]
            if form & 1:
                _, icount, mode, _, size, union, _, uid, gid, mtime, nsec, nlink = _EXTENDED.unpack_from(self._data, at)
                at += _EXTENDED.size
            else:
                _, icount, mode, nlink, size, _, union, _, uid, gid, _ = _COMPACT.unpack_from(self._data, at)
                mtime, nsec = self._built, 0
                at += _COMPACT.size
            xattrs = tuple(self._xattrs(at, icount))
        except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
            raise NodeError(f"the image is damaged at inode {nid}", retryable=False) from error
        layout = form >> 1 & 7
        if layout not in (_PLAIN, _INLINE, _CHUNKED):
            raise Unsupported("the image is compressed", reason=f"inode {nid} has data layout {layout}")
        device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        tail = at + (12 + 4 * (icount - 1) if icount else 0)
        if layout == _CHUNKED and not device:
            if not union & 0x20:
                raise Unsupported("the image's chunks have no index", reason=f"inode {nid} has chunk format {union & 0xFFFF:#x}")
            return Inode(nid, mode, uid, gid, size, mtime * 1_000_000_000 + nsec, nlink, layout, union & 0x1F, tail, xattrs)
        return Inode(
            nid, mode, uid, gid, size, mtime * 1_000_000_000 + nsec, nlink, layout, union if device else union * self._block, tail, xattrs
        )

    def _xattrs(self, at: int, icount: int) -> Iterator[tuple[str, bytes]]:
        if not icount:
            return
        end = at + 12 + 4 * (icount - 1)
        shared = self._data[at + 4]
        at += 12
        for number in range(shared):
            (place,) = struct.unpack_from("<I", self._data, at + 4 * number)
            yield self._xattr(self._shared + 4 * place)[:2]
        at += 4 * shared
        while at + 4 <= end:
            name, value, at = self._xattr(at)
            yield name, value

    def _xattr(self, at: int) -> tuple[str, bytes, int]:
        length, prefix, size = struct.unpack_from("<BBH", self._data, at)
        at += 4
        name = _PREFIXES[prefix] + bytes(self._data[at : at + length]).decode()
        value = bytes(self._data[at + length : at + length + size])
        return name, value, at + (length + size + 3 & ~3)

    def content(self, inode: Inode) -> Iterator[bytes]:
        """The file's bytes in pieces of at most 1 MiB."""
        if inode.layout == _CHUNKED:
            yield from self._chunks(inode)
            return
        inline = inode.size % self._block if inode.layout == _INLINE else 0
        whole = inode.size - inline
        if max(inode.start + whole if whole else 0, inode.tail + inline if inline else 0) > len(self._data):
            raise NodeError(f"the image is truncated: inode {inode.nid} lies beyond its end", retryable=False)
        for offset in range(0, whole, 1 << 20):
            yield bytes(self._data[inode.start + offset : inode.start + min(offset + (1 << 20), whole)])
        if inline:
            yield bytes(self._data[inode.tail : inode.tail + inline])

    def _chunks(self, inode: Inode) -> Iterator[bytes]:
        size = self._block << inode.start
        at = (inode.tail + 7) & ~7
        for number in range(-(-inode.size // size)):
            length = min(size, inode.size - number * size)
            try:
                _, device, block = _CHUNK.unpack_from(self._data, at + number * _CHUNK.size)
            except struct.error as error:
                raise NodeError(f"the image is damaged at inode {inode.nid}", retryable=False) from error
            if block == _HOLE:
                yield bytes(length)
                continue
            source = self._blob if device else self._data
            piece = bytes(source[block * self._block : block * self._block + length])
            if len(piece) != length:
                raise NodeError(f"the image is truncated: inode {inode.nid} lies beyond its end", retryable=False)
            yield piece

    def entries(self, inode: Inode) -> Iterator[tuple[bytes, int]]:
        """A directory's names with their inode numbers, without ``.`` and ``..``."""
        data = b"".join(self.content(inode))
        for start in range(0, len(data), self._block):
            block = data[start : start + self._block]
            try:
                count = _DIRENT.unpack_from(block)[1] // _DIRENT.size
                rows = [_DIRENT.unpack_from(block, n * _DIRENT.size) for n in range(count)]
            except struct.error as error:
                raise NodeError(f"the image is damaged in directory {inode.nid}", retryable=False) from error
            for n, (nid, offset, _, _) in enumerate(rows):
                end = rows[n + 1][1] if n + 1 < count else len(block)
                name = block[offset:end].split(b"\0")[0]
                if name in (b".", b".."):
                    continue
                if not name or b"/" in name or len(name) > _MAX_NAME:
                    raise NodeError(f"the image is damaged in directory {inode.nid}: an impossible name", retryable=False)
                yield name, nid


def unpack(path: str, target: Path, blob: str = "") -> None:
    """Unpack an image (with its ``blob``, when its data lies apart) into a new directory, as root, with everything that the image says of
    each file.

    Raises `NodeError` (damaged image, disk) and `Unsupported`; what was unpacked before an error stays for the caller to remove.
    """
    with contextlib.ExitStack() as stack:
        data = _map(stack, path)
        image = Image(data, _map(stack, blob) if blob else b"")
        made: dict[int, bytes] = {}
        open_directories: set[int] = set()

        def place(nid: int, where: bytes) -> None:
            inode = image.inode(nid)
            if stat.S_ISDIR(inode.mode):
                if nid in open_directories:
                    raise NodeError(f"the image is damaged: directory {nid} is inside itself", retryable=False)
                open_directories.add(nid)
                os.mkdir(where, 0o700)
                for name, child in image.entries(inode):
                    place(child, where + b"/" + name)
            elif inode.nlink > 1 and nid in made:
                os.link(made[nid], where, follow_symlinks=False)
                return
            else:
                made[nid] = where
                _make(image, inode, where)
            _finish(inode, where)

        try:
            place(image.root, os.fsencode(target))
        except OSError as error:
            raise NodeError(f"cannot unpack the image: {error}") from error


def _map(stack: contextlib.ExitStack, path: str) -> bytes | mmap.mmap:
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        return stack.enter_context(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _make(image: Image, inode: Inode, where: bytes) -> None:
    if stat.S_ISREG(inode.mode):
        fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            for piece in image.content(inode):
                view = memoryview(piece)
                while view:
                    view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
    elif stat.S_ISLNK(inode.mode):
        os.symlink(b"".join(image.content(inode)), where)
    elif stat.S_ISFIFO(inode.mode):
        os.mkfifo(where, 0o600)
    elif stat.S_ISCHR(inode.mode) and inode.start == 0:
        os.mknod(where, stat.S_IFCHR, 0)  # overlayfs's whiteout
    elif stat.S_ISSOCK(inode.mode):
        os.mknod(where, stat.S_IFSOCK | 0o600)
    else:
        raise Unsupported("the image holds a device node", value=os.fsdecode(where), reason=f"mode {inode.mode:o}")


def _finish(inode: Inode, where: bytes) -> None:
    """Owner before mode (chown clears set-id bits) before attributes (chown drops capabilities) before time."""
    os.chown(where, inode.uid, inode.gid, follow_symlinks=False)
    if not stat.S_ISLNK(inode.mode):
        os.chmod(where, stat.S_IMODE(inode.mode))
    for key, value in inode.xattrs:
        os.setxattr(where, key, value, follow_symlinks=False)
    os.utime(where, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=False)
