"""pack_diff: the upper of an overlay becomes a layer. Blocking; runs in a thread while the sandbox stands still.

The upper is reached by a descriptor of its directory (its mount is attached nowhere). What the overlay wrote for itself is left out,
whiteouts and opaque directories stay: they are what the layer takes away from those below it. Owners are those of the sandbox: ids that
the node sees as base…base+65535 become 0…65535, in access lists and file capabilities too, so the layer is right under any range.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from dsec.errors import InvalidRequest, NodeError
from dsec.layers import erofs_write
from dsec.layers.erofs_write import Node, Writer

# What belongs to a run and not to its result. Mount points of the sandbox, and what the agent's own layer covers.
OWN = ("/dev", "/proc", "/sys", "/.dsec")  # where the node mounts
# The same, without what processes share there: they go on with it.
OWN_BUT_SHARED = ("/dev/[!s]*", "/dev/s", "/dev/s[!h]*", "/dev/sh", "/dev/sh[!m]*", "/dev/shm?*", "/proc", "/sys", "/.dsec")
SCRUB = ("/tmp/*", "/var/tmp/*", "/run/*", "/dev", "/proc", "/sys", "/.dsec", "/var/lib/apt/lists/*_*", "/var/cache/apt/archives/*.deb")
# Of the overlay's attributes these say what the layer does to others; the rest (origin, impure, nlink, uuid …) is about this very mount.
_KEPT = frozenset({"opaque", "redirect", "whiteout", "whiteouts"})
_OVERLAY = "trusted.overlay."
_ACL = ("system.posix_acl_access", "system.posix_acl_default")
_CAPABILITY = "security.capability"
_CAP_V2, _CAP_V3 = 0x02000000, 0x03000000
_MAX_GLOBS = 256
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[[!^]?\]?[^\]]*\]|.", re.DOTALL)
_WILD = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a packed layer may hold: names, and bytes in regular files as ``ls`` counts them (holes too)."""

    entries: int = 1_000_000
    bytes: int = 16 << 30


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: names, bytes in regular files, names left out by the scrub list, the image's size."""

    entries: int
    bytes: int
    scrubbed: int
    size: int


def compile_globs(globs: Iterable[str]) -> Callable[[str], bool]:
    """Does a path inside the sandbox match any of the globs?

    ``*`` and ``?`` stay within one name, ``**`` crosses directories. A glob with a slash is about the whole path, one without is about a
    name anywhere (``*.pyc``, ``__pycache__``). Whoever matches is left out with all that is in it. Raises `InvalidRequest`.
    """
    patterns = []
    for number, glob in enumerate(globs):
        if number >= _MAX_GLOBS:
            raise InvalidRequest(f"more than {_MAX_GLOBS} globs", field="scrub", fix="join some of them")
        if not glob or "\0" in glob or len(glob) > 1024 or glob.strip("/") == "":
            raise InvalidRequest("not a usable glob", field=f"scrub[{number}]", value=glob, fix="such as /tmp/* or *.pyc")
        patterns.append(_pattern(glob))
    if not patterns:
        return lambda _: False
    try:
        program = re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.DOTALL)
    except re.error as error:
        raise InvalidRequest(f"not usable globs: {error}", field="scrub", fix="such as /tmp/* or *.pyc") from None
    return lambda path: program.fullmatch(path) is not None


def _pattern(glob: str) -> str:
    body = glob.rstrip("/")
    out = "/" if "/" in body else "(?:/.*)?/"
    for token in _TOKEN.findall(body.lstrip("/")):
        if token in _WILD:
            out += _WILD[token]
        elif token[0] == "[" and len(token) > 2:
            inner = token[1:-1].replace("\\", "\\\\").replace("[", "\\[")
            out += "(?!/)[" + ("^" + inner[1:] if inner[0] in "!^" else inner) + "]"
        else:
            out += re.escape(token)
    return out


class _Scan:
    """One walk over an upper. Every file is opened once, by its directory's descriptor, and never through a link."""

    def __init__(self, writer: Writer, scrub: Callable[[str], bool], limits: Limits, base: int, count: int, stop: threading.Event) -> None:
        self.writer, self.scrub, self.limits, self.base, self.count, self.stop = writer, scrub, limits, base, count, stop
        self.entries = self.bytes = self.scrubbed = 0
        self.links: dict[tuple[int, int], Node] = {}

    def directory(self, fd: int, path: str, node: Node) -> None:
        if self.stop.is_set():
            raise NodeError("packing was given up", retryable=True)
        with os.scandir(fd) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            where = f"{path}/{entry.name}"
            if self.scrub(where):
                self.scrubbed += 1
                continue
            self.entries += 1
            if self.entries > self.limits.entries:
                raise InvalidRequest(
                    f"the sandbox changed more than {self.limits.entries} entries",
                    field="max_entries",
                    value=self.limits.entries,
                    fix="scrub more, or raise it",
                )
            node.children[os.fsencode(entry.name)] = self._entry(fd, entry, where)

    def _entry(self, fd: int, entry: os.DirEntry[str], where: str) -> Node:
        status = entry.stat(follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind != stat.S_IFDIR and status.st_nlink > 1:
            key = (status.st_dev, status.st_ino)
            if (twin := self.links.get(key)) is not None:
                twin.names += 1
                return twin
            node = self.links[key] = self._file(fd, entry.name, status, where)
            return node
        if kind == stat.S_IFDIR:
            below = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                node = self.node(status, below, where)
                self.directory(below, where, node)
            finally:
                os.close(below)
            return node
        return self._file(fd, entry.name, status, where)

    def _file(self, fd: int, name: str, status: os.stat_result, where: str) -> Node:
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=fd)
            try:
                self.bytes += status.st_size
                if self.bytes > self.limits.bytes:
                    raise InvalidRequest(
                        f"the sandbox changed more than {self.limits.bytes} bytes",
                        field="max_bytes",
                        value=self.limits.bytes,
                        fix="scrub more, or raise it",
                    )
                node = self.node(status, source, where)
                self.writer.data(node, source, status.st_size)
            finally:
                os.close(source)
            return node
        if kind == stat.S_IFBLK or (kind == stat.S_IFCHR and status.st_rdev != 0):
            raise InvalidRequest("a layer must not hold device nodes", field="path", value=where, fix="remove it, or scrub it")
        node = self.node(status, f"/proc/self/fd/{fd}/{name}", where)
        if kind == stat.S_IFLNK:
            node.tail = os.fsencode(os.readlink(name, dir_fd=fd))
            node.size = len(node.tail)
        return node

    def node(self, status: os.stat_result, subject: int | str, where: str, more: Mapping[str, bytes] = MappingProxyType({})) -> Node:
        """``subject``: a descriptor, or a path whose last name is not followed, to read the attributes of."""
        found: dict[str, bytes] = dict(more)
        follow = isinstance(subject, int)
        for key in os.listxattr(subject, follow_symlinks=follow):
            if key.startswith(_OVERLAY):
                if key[len(_OVERLAY) :] == "metacopy":
                    raise NodeError("the overlay holds a file without its data (metacopy)", value=where, retryable=False)
                if key[len(_OVERLAY) :] not in _KEPT:
                    continue
            elif key in found or (key not in _ACL and not key.startswith(("user.", "trusted.", "security."))):
                continue
            value = os.getxattr(subject, key, follow_symlinks=follow)
            if key == _CAPABILITY:
                value = capability_inside(value)
            elif key in _ACL:
                value = acl_inside(value, self.inside, where)
            found[key] = value
        uid, gid = self.inside(status.st_uid, where), self.inside(status.st_gid, where)
        packed = erofs_write.pack_xattrs(found) if found else b""
        return Node(status.st_mode, uid, gid, status.st_mtime_ns, xattrs=packed)

    def inside(self, number: int, where: str) -> int:
        """An id as the sandbox sees it."""
        if not self.count:
            return number
        if not self.base <= number < self.base + self.count:
            raise NodeError(f"an owner outside of the sandbox's ids: {number}", value=where, retryable=False)
        return number - self.base


def draw(
    upper: int,
    image: str,
    *,
    scrub: Callable[[str], bool],
    limits: Limits,
    ids: tuple[int, int] = (0, 0),
    stop: threading.Event | None = None,
    mark: bytes = b"",
    read: Callable[[], object] = lambda: None,
) -> Drawn:
    """Write the upper that ``upper`` (a directory's descriptor, O_PATH will do) holds as a new EROFS image.

    ``ids`` = (base, count) of the sandbox's user namespace, (0, 0) for none. ``stop``, once set, ends it with `NodeError`.
    ``read`` is called when nothing more is read of the upper, before the image is complete.
    ``mark`` becomes an attribute of the root that no sandbox sees (trusted.dsec.image), for contents that must differ.
    Raises `InvalidRequest` for limits and for entries that no layer may hold, `NodeError`; the image of a failure is removed.
    """
    stop = stop or threading.Event()
    try:
        writer: Writer | None = None
        out = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            writer = Writer(out)
            scan = _Scan(writer, scrub, limits, *ids, stop)
            top = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=upper)
            try:
                root = scan.node(os.fstat(top), top, "/", {"trusted.dsec.image": mark} if mark else {})
                if mark:  # the same image built again is the same: when its last sandbox began says nothing
                    root.mtime_ns = 0
                scan.directory(top, "", root)
            finally:
                os.close(top)
            read()
            size = writer.finish(root)
        finally:
            if writer is not None:
                writer.close()
            os.close(out)
    except OSError as error:
        _discard(image)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise NodeError(f"cannot pack: {error}", reason="disk" if full else "pack", retryable=full) from error
    except BaseException:
        _discard(image)
        raise
    return Drawn(entries=scan.entries, bytes=scan.bytes, scrubbed=scan.scrubbed, size=size)


def _discard(image: str) -> None:
    if os.path.lexists(image):
        os.unlink(image)


def capability_inside(value: bytes) -> bytes:
    """A file capability without the user namespace that it was given in: version 3 names that namespace's root, version 2 nobody."""
    if len(value) == 24 and struct.unpack_from("<I", value)[0] & 0xFF000000 == _CAP_V3:
        (magic,) = struct.unpack_from("<I", value)
        return struct.pack("<I", magic & 0x00FFFFFF | _CAP_V2) + value[4:20]
    return value


def acl_inside(value: bytes, inside: Callable[[int, str], int], where: str) -> bytes:
    """An access list with its ids as the sandbox sees them (linux/posix_acl_xattr.h: version, then tag, permissions, id)."""
    out = bytearray(value[:4])
    for tag, permissions, number in struct.iter_unpack("<HHI", value[4:]):
        named = tag in (0x02, 0x08)  # ACL_USER, ACL_GROUP
        out += struct.pack("<HHI", tag, permissions, inside(number, where) if named else number)
    return bytes(out)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A name in a layer: what it does to the layers below."""

    path: str
    kind: str  # file dir link fifo socket char block, whiteout (the name is taken away), opaque (a directory that hides those below)
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int = 0


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}
_KINDS |= {stat.S_IFCHR: "char", stat.S_IFBLK: "block"}


def entries(path: str) -> Iterator[Entry]:
    """Every name in a layer, in order, without mounting it: of an EROFS image, or of a directory. Raises as `erofs_read.Image`."""
    import mmap

    from dsec.layers.erofs_read import Image

    if os.path.isdir(path):
        yield from _tree_entries(path)
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        image = Image(data)
        stack = [("", image.root)]
        while stack:
            where, nid = stack.pop()
            inode = image.inode(nid)
            opaque = dict(inode.xattrs).get(_OVERLAY + "opaque") == b"y"
            if stat.S_ISDIR(inode.mode):
                below = sorted(image.entries(inode), reverse=True)
                stack += [(f"{where}/{name.decode(errors='surrogateescape')}", child) for name, child in below]
            if where:
                device = inode.start if stat.S_ISCHR(inode.mode) else 0
                yield _entry(where, inode.mode, inode.size, inode.uid, inode.gid, inode.mtime_ns, device, opaque)


def _tree_entries(top: str) -> Iterator[Entry]:
    stack = [top]
    while stack:
        path = stack.pop()
        status = os.lstat(path)
        opaque = False
        if stat.S_ISDIR(status.st_mode):
            stack += [os.path.join(path, name) for name in sorted(os.listdir(path), reverse=True)]
            opaque = _OVERLAY + "opaque" in os.listxattr(path)
        if path != top:
            where = path[len(top.rstrip("/")) :]
            size, owner = status.st_size, (status.st_uid, status.st_gid)
            yield _entry(where, status.st_mode, size, *owner, status.st_mtime_ns, status.st_rdev, opaque)


def _entry(path: str, mode: int, size: int, uid: int, gid: int, mtime_ns: int, device: int, opaque: bool) -> Entry:
    kind = _KINDS.get(stat.S_IFMT(mode), "file")
    if kind == "char" and device == 0:
        kind = "whiteout"
    elif kind == "dir" and opaque:
        kind = "opaque"
    size = size if kind in ("file", "link") else 0
    return Entry(path=path, kind=kind, size=size, mode=stat.S_IMODE(mode), uid=uid, gid=gid, mtime_ns=mtime_ns)


def compare(old: Iterable[Entry], new: Iterable[Entry]) -> list[tuple[str, str]]:
    """How a layer differs from another, by path: ("A" | "C" | "D", path). Files count as the same by kind, size, mode, owner and mtime."""
    before, after = {entry.path: entry for entry in old}, {entry.path: entry for entry in new}
    found = [("D", path) for path in before.keys() - after.keys()] + [("A", path) for path in after.keys() - before.keys()]
    found += [("C", path) for path in after.keys() & before.keys() if before[path] != after[path]]
    return sorted(found, key=lambda row: row[1])


def changes(layer: Iterable[Entry], below: Iterable[Iterable[Entry]]) -> list[tuple[str, str]]:
    """What a layer does to those below it (topmost first). Directories that are only on the way to a change are told as changed."""
    seen: set[str] = set()
    for lower in reversed([list(each) for each in below]):
        for entry in lower:
            if entry.kind in ("whiteout", "opaque"):
                hidden = entry.path + "/"
                seen = {path for path in seen if not path.startswith(hidden)}
            (seen.discard if entry.kind == "whiteout" else seen.add)(entry.path)
    found = []
    for entry in layer:
        if entry.kind == "whiteout":
            found.append(("D", entry.path))
            continue
        found.append(("C" if entry.path in seen else "A", entry.path))
        if entry.kind == "opaque":
            kept = entry.path + "/"
            found += [("D", path) for path in sorted(seen) if path.startswith(kept)]
    again = {path for change, path in found if change != "D"}  # in an opaque directory, made anew
    return [row for row in found if row[0] != "D" or row[1] not in again]
