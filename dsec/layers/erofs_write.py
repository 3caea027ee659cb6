"""Write an EROFS image in one pass: data blocks as the files are read, inodes and directories behind them. Pure but for the output.

mkfs.erofs takes a path and packs what it finds there. A sandbox's upper has no path (its mount is attached nowhere), its owners are
those of a user namespace, and some of its attributes must not be kept, so `diff` would have to copy it first, twice the work while
the sandbox stands still. The format (Linux, fs/erofs/erofs_fs.h): a superblock at 1024, extended inodes of 64 bytes at multiples of 32
from ``meta_blkaddr`` on, attributes behind the inode, then the tail of the data where it fits into the same block; directories are
blocks of (entry…, name…) in the order of their names. Uncompressed, without chunks: any kernel with EROFS mounts it.

The same tree gives the same image: nothing of the clock or of inode numbers gets in.
"""

from __future__ import annotations

import os
import queue
import stat
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from dsec.errors import InvalidRequest, NodeError

BLOCK = 4096
_SLOT = 32
_ROOT_NID = 2  # 0 would become the inode number 0, which readdir(3) takes for a deleted entry
_PLAIN, _INLINE = 0, 2
_COMPAT_MTIME = 0x2
_INCOMPAT_DEVICES = 0x8
_DEVICE_SLOT = 128  # bytes; the table stands behind the superblock
DEVICE_BLOCK = 1 << 24  # where the blocks of a second device begin in the image's addresses: 64 GiB of metadata is more than there will be
_MAGIC = 0xE0F5E1E2
_UUID = bytes.fromhex("6a1f5f2e64c54d5e8a0cd5ec00000001")
_BUFFER = 1 << 20
_BUFFERS = 64
_MAX_TAIL = 1024  # of a regular file kept beside its inode; directories and links as far as they fit
_PREFIXES = (
    ("user.", 1),
    ("system.posix_acl_access", 2),
    ("system.posix_acl_default", 3),
    ("trusted.", 4),
    ("security.", 6),
)
_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFSOCK: 6, stat.S_IFLNK: 7}
_SUPERBLOCK = struct.Struct("<I I I B B H Q Q I I I I 16s 16s I H H H B B I Q 24x")
_INODE = struct.Struct("<H H H H Q I I I I Q I I 16x")
_DIRENT = struct.Struct("<Q H B B")
_XATTR = struct.Struct("<B B H")


class Node:
    """One file to be written. ``names`` counts its hard links; a directory's ``children`` are filled by whoever scans."""

    __slots__ = ("block", "children", "gid", "layout", "mode", "mtime_ns", "names", "nid", "rdev", "size", "tail", "uid", "xattrs")

    def __init__(self, mode: int, uid: int, gid: int, mtime_ns: int, *, rdev: int = 0, xattrs: bytes = b"") -> None:
        self.mode, self.uid, self.gid, self.mtime_ns, self.rdev, self.xattrs = mode, uid, gid, mtime_ns, rdev, xattrs
        self.names = 1
        self.size = 0
        self.block = 0
        self.tail = b""
        self.layout = _PLAIN
        self.nid = 0
        self.children: dict[bytes, Node] = {}


def pack_xattrs(xattrs: Mapping[str, bytes]) -> bytes:
    """The attributes as they stand behind an inode, b"" for none. Raises `InvalidRequest` for more than an inode can hold."""
    if not xattrs:
        return b""
    out = bytearray(12)  # h_name_filter, h_shared_count: no shared ones
    for key in sorted(xattrs):
        value = xattrs[key]
        index, name = _short(key)
        if len(value) > 0xFFFF or len(name) > 0xFF:
            raise InvalidRequest("an extended attribute that is too large for a layer", field="path", value=key, fix="remove it")
        out += _XATTR.pack(len(name), index, len(value)) + name + value
        out += bytes(-len(out) % 4)
    if len(out) - 12 > 4 * 0xFFFE:
        raise InvalidRequest("more extended attributes than a layer can hold", field="path", fix="remove some")
    return bytes(out)


def _short(key: str) -> tuple[int, bytes]:
    """An attribute's name as the format keeps it: the number of its prefix and the rest."""
    for prefix, index in _PREFIXES:
        if key.startswith(prefix):
            return index, os.fsencode(key[len(prefix) :])
    raise InvalidRequest("an extended attribute that a layer cannot hold", field="path", value=key, fix="remove it")


class Writer:
    """One image in the making. Feed data with `data`, then call `finish` with the root.

    ``fd`` is an empty regular file; what was written before an error stays for the caller to remove. `close` ends it in any case.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.block = 1  # next free; the first holds the superblock
        # A thread writes while the next files are read: whoever stands still meanwhile waits for the reading only. Buffers are used again:
        # fresh memory costs more than the copy into it.
        self._writer = ThreadPoolExecutor(1, "pack")
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._made = 1
        self._failed: BaseException | None = None
        self._buffer = memoryview(bytearray(_BUFFER))
        self._used = 0
        self._at = BLOCK  # where the buffer's beginning belongs

    def data(self, node: Node, source: int, size: int) -> None:
        """The content of a regular file from a descriptor. Raises `NodeError` when it is shorter than ``size``."""
        node.size = size
        rest = size % BLOCK
        whole = size - rest
        if 0 < rest <= _MAX_TAIL and whole == 0:
            node.tail = _read(source, 0, rest)
            return
        blocks = (size + BLOCK - 1) // BLOCK
        node.block = self.block if size else 0
        if size <= _BUFFER // 8:
            if self._used + blocks * BLOCK > _BUFFER:
                self._flush()
            self._gather(source, size, blocks * BLOCK)
        else:
            self._flush()
            self._copy(source, size)
            self._at = (self.block + blocks) * BLOCK
        self.block += blocks

    def _gather(self, source: int, size: int, room: int) -> None:
        done = 0
        while done < size:
            got = os.preadv(source, [self._buffer[self._used + done : self._used + size]], done)
            if not got:
                raise NodeError("a file became shorter while it was packed", retryable=True)
            done += got
        self._buffer[self._used + size : self._used + room] = bytes(room - size)
        self._used += room

    def _copy(self, source: int, size: int) -> None:
        """Only what holds data: holes stay holes in the image's file, and read as zeros."""
        start = self.block * BLOCK
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
                end = min(os.lseek(source, at, os.SEEK_HOLE), size)
            except OSError:  # ENXIO: nothing but a hole is left
                break
            os.lseek(self.fd, start + at, os.SEEK_SET)
            while at < end:
                done = os.sendfile(self.fd, source, at, end - at)
                if done == 0:
                    raise NodeError("a file became shorter while it was packed", retryable=True)
                at += done

    def _flush(self) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._used:
            return
        self._writer.submit(self._put, self._buffer, self._used, self._at)
        self._at += self._used
        self._used = 0
        if self._made < _BUFFERS and self._free.empty():
            self._made += 1
            self._buffer = memoryview(bytearray(_BUFFER))
        else:
            self._buffer = self._free.get()

    def _put(self, buffer: memoryview, used: int, at: int) -> None:
        try:
            _write(self.fd, buffer[:used], at)
        except OSError as error:
            self._failed = error
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Ends the thread; what it still had to write is written."""
        self._writer.shutdown()

    def finish(self, root: Node, device_blocks: int = 0) -> int:
        """Inodes, directories and superblock; the image's size in bytes. Nothing is read for it any more. ``device_blocks``: the size of
        a second device, for nodes whose ``block`` (`DEVICE_BLOCK` and more) lies there."""
        self._flush()
        self._writer.shutdown()
        if self._failed is not None:
            raise self._failed
        order = list(_walk(root))
        for node, _ in order:
            if stat.S_ISDIR(node.mode):
                node.size = _directory_size(node.children)
        at = _ROOT_NID * _SLOT
        seen: set[int] = set()
        unique: list[tuple[Node, Node]] = []
        for node, parent in order:
            if id(node) not in seen:
                seen.add(id(node))
                unique.append((node, parent))
                at = self._place(node, at)
        meta_block = self.block
        meta = bytearray(at + (-at % BLOCK))
        self.block += len(meta) // BLOCK
        extra = bytearray()  # whole blocks of directories and links that did not fit beside their inodes
        for node, parent in unique:
            if stat.S_ISDIR(node.mode):
                content = _directory(node, parent)
                whole = node.size - (node.size % BLOCK if node.layout == _INLINE else 0)
                node.tail = content[whole:]
                if whole:
                    node.block = self.block + len(extra) // BLOCK
                    extra += content[:whole] + bytes(-whole % BLOCK)
            elif node.layout == _PLAIN and node.tail:
                node.block = self.block + len(extra) // BLOCK
                extra += node.tail + bytes(-len(node.tail) % BLOCK)
            _emit(meta, node)
        self.block += len(extra) // BLOCK
        newest = max(node.mtime_ns for node, _ in unique)
        superblock = _SUPERBLOCK.pack(
            *(_MAGIC, 0, _COMPAT_MTIME, 12, 0, _ROOT_NID, len(unique), newest // 1_000_000_000, 0, self.block, meta_block, 0),
            *(_UUID, bytes(16), _INCOMPAT_DEVICES if device_blocks else 0, 0),
            *((1, (1024 + _SUPERBLOCK.size) // _DEVICE_SLOT) if device_blocks else (0, 0)),
            *(0, 0, 0, 0),
        )
        if device_blocks:  # struct erofs_deviceslot: tag, blocks, where they begin
            superblock += struct.pack("<64sII56x", b"", device_blocks, DEVICE_BLOCK)
        _write(self.fd, bytes(meta) + bytes(extra), meta_block * BLOCK)
        _write(self.fd, superblock, 1024)
        os.truncate(self.fd, self.block * BLOCK)
        return self.block * BLOCK

    def _place(self, node: Node, at: int) -> int:
        """Give a node its number; returns where the next may begin. What stands behind an inode must not cross a block's border."""
        head = _INODE.size + len(node.xattrs)
        rest = node.size % BLOCK
        if stat.S_ISLNK(node.mode) or stat.S_ISDIR(node.mode):
            inline = rest > 0 and head % BLOCK + rest <= BLOCK
        else:
            inline = bool(node.tail)
        node.layout = _INLINE if inline else _PLAIN
        if inline:
            tail_at = at + head
            if tail_at // BLOCK != (tail_at + rest - 1) // BLOCK:
                # Begin so that the tail has a block's beginning, or the whole a new block.
                at += -at % BLOCK
                tail_at = at + head
                if tail_at // BLOCK != (tail_at + rest - 1) // BLOCK:
                    at += -(-(-tail_at % BLOCK) // _SLOT) * _SLOT
            node.nid = at // _SLOT
            end = at + head + rest
        else:
            node.nid = at // _SLOT
            end = at + head
        return end + (-end % _SLOT)


def _walk(root: Node) -> Iterator[tuple[Node, Node]]:
    """Every name with its parent directory, parents first, in the order of names."""
    stack = [(root, root)]
    while stack:
        node, parent = stack.pop()
        yield node, parent
        stack += [(node.children[name], node) for name in sorted(node.children, reverse=True)]


def _names(children: Mapping[bytes, Node]) -> list[list[bytes]]:
    """The names of a directory in blocks."""
    blocks: list[list[bytes]] = [[]]
    used = 0
    for name in sorted([b".", b"..", *children]):
        need = _DIRENT.size + len(name)
        if used + need > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append(name)
        used += need
    return blocks


def _directory_size(children: Mapping[bytes, Node]) -> int:
    blocks = _names(children)
    return (len(blocks) - 1) * BLOCK + sum(_DIRENT.size + len(name) for name in blocks[-1])


def _directory(node: Node, parent: Node) -> bytes:
    blocks = _names(node.children)
    out = bytearray()
    for number, names in enumerate(blocks):
        offset = len(names) * _DIRENT.size
        for name in names:
            target = node if name == b"." else parent if name == b".." else node.children[name]
            out += _DIRENT.pack(target.nid, offset, _TYPES[stat.S_IFMT(target.mode)], 0)
            offset += len(name)
        out += b"".join(names)
        if number < len(blocks) - 1:
            out += bytes(-len(out) % BLOCK)
    return bytes(out)


def _emit(meta: bytearray, node: Node) -> None:
    at = node.nid * _SLOT
    count = 1 + (len(node.xattrs) - 12) // 4 if node.xattrs else 0
    kind = stat.S_IFMT(node.mode)
    union = node.rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else node.block
    links = 2 + sum(stat.S_ISDIR(child.mode) for child in node.children.values()) if kind == stat.S_IFDIR else node.names
    seconds, nanoseconds = divmod(node.mtime_ns, 1_000_000_000)
    _INODE.pack_into(
        *(meta, at, 1 | node.layout << 1, count, node.mode, 0, node.size, union, node.nid & 0xFFFFFFFF),
        *(node.uid, node.gid, seconds & 0xFFFFFFFFFFFFFFFF, nanoseconds, links),
    )
    at += _INODE.size
    meta[at : at + len(node.xattrs)] = node.xattrs
    if node.layout == _INLINE:
        at += len(node.xattrs)
        meta[at : at + len(node.tail)] = node.tail


def _read(fd: int, at: int, size: int) -> bytes:
    data = os.pread(fd, size, at)
    while len(data) < size:
        more = os.pread(fd, size - len(data), at + len(data))
        if not more:
            raise NodeError("a file became shorter while it was packed", retryable=True)
        data += more
    return data


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
