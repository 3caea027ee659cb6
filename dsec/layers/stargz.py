"""eStargz: image layers that can be read in parts (github.com/containerd/stargz-snapshotter, docs/estargz.md).

Such a layer is a tar.gz of many gzip members, one or more for each file, with a table of contents at its end. The table says where each
chunk of each file is and what its sha256 is; the image's manifest says what the table's is. So a layer's tree can be made of the table
alone, and every chunk can be checked when it is fetched. Pure: bytes in, a tree of nodes and a manifest's `Origin` out.
"""

from __future__ import annotations

import base64
import datetime as dt
import io
import re
import stat
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from dsec.errors import InvalidRequest, Unsupported
from dsec.layers import erofs_write
from dsec.layers.erofs_write import BLOCK, DEVICE_BLOCK, Node
from dsec.layers.manifest import Origin
from dsec.layers.oci_model import Descriptor, digest_of

TOC_DIGEST = "containerd.io/snapshot/stargz/toc.digest"
FOOTER = 51  # bytes
MAX_TOC = 256 << 20
MAX_PACKED_TOC = 64 << 20
MAX_CHUNK = 64 << 20
MAX_MEMBER = 2 * MAX_CHUNK  # bytes of a blob that must be fetched for one chunk
MAX_DEPTH = 256  # directories in a name
_TOC_NAME = "stargz.index.json"
_OWN = frozenset({_TOC_NAME, ".prefetch.landmark", ".no.prefetch.landmark"})
_PAYLOAD = re.compile(rb"([0-9a-f]{16})STARGZ")
_OPAQUE = ".wh..wh..opq"
_WHITEOUT = ".wh."


class Entry(msgspec.Struct, frozen=True, rename="camel"):
    """A line of the table: a name in the tar, or one more chunk of the file before it."""

    name: str
    type: str
    size: int = 0
    modtime: str = ""
    link_name: str = ""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    offset: int = 0
    xattrs: dict[str, str] = {}
    chunk_offset: int = 0
    chunk_size: int = 0
    chunk_digest: str = ""
    inner_offset: int = 0


class _Toc(msgspec.Struct, frozen=True):
    entries: list[msgspec.Raw] = []


class Layer(msgspec.Struct, frozen=True):
    """A layer's tree, the directories that its archive only implies, where its chunks are, and the blob's bytes."""

    root: Node
    implicit: tuple[str, ...]
    origin: Origin
    digests: tuple[str, ...]  # of the chunks, hex
    size: int


def offered(layers: Sequence[Descriptor]) -> bool:
    """Whether an image says of all its layers that they are eStargz."""
    return bool(layers) and all((layer.annotations or {}).get(TOC_DIGEST) for layer in layers)


def toc_offset(footer: bytes) -> int:
    """Where the table begins, by a blob's last `FOOTER` bytes: an empty gzip member whose extra field says so. Raises `Unsupported`."""
    found = _PAYLOAD.fullmatch(footer[16:38])
    if len(footer) != FOOTER or footer[:4] != b"\x1f\x8b\x08\x04" or footer[12:14] != b"SG" or found is None:
        raise Unsupported("the layer is not eStargz, though its image says so", reason="estargz")
    return int(found[1], 16)


def read_toc(packed: bytes, digest: str) -> Iterator[Entry]:
    """The lines of the table in its gzip member, which is held until the last of them was taken; its lines are made one after another.

    Raises `InvalidRequest` when it is not the one that the image names, and, on the way, for a line that cannot be read.
    """
    try:
        data = zlib.decompressobj(31).decompress(packed, MAX_TOC)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            member = archive.getmember(_TOC_NAME)
        text = memoryview(data)[member.offset_data : member.offset_data + member.size]
    except (zlib.error, tarfile.TarError, KeyError, EOFError) as error:
        raise InvalidRequest(f"the layer's table cannot be read: {error}", field="image") from error
    if digest_of(text) != digest:
        raise InvalidRequest("the layer's table is not the one that the image names", field="image", value=digest)
    return _lines(text)


def _lines(text: memoryview) -> Iterator[Entry]:
    decode = msgspec.json.Decoder(Entry).decode
    try:
        for line in msgspec.json.decode(text, type=_Toc).entries:
            yield decode(line)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the layer's table cannot be read: {error}", field="image") from error


def layer(table: Iterable[Entry], end: int) -> Layer:
    """The tree of a ``table``'s lines, which are taken in their order. ``end``: where the compressed files end.

    Raises `Unsupported` for what a tree of nodes cannot say (the layer must then be unpacked), `InvalidRequest` for names that lead out.
    """
    return _Tree(end).build(table)


class _Row(NamedTuple):
    """A chunk: where it is in the uncompressed blob, its digest, where its member is in the compressed one, and where its file ends."""

    start: int
    length: int
    digest: str
    at: int
    skip: int
    end: int


class _Tree:
    def __init__(self, end: int) -> None:
        self.root = _directory()
        self.made: dict[str, Node] = {"": self.root}
        self.implicit: set[str] = set()
        self.end = end
        self.opaque: list[str] = []
        self.xattrs: dict[str, dict[str, bytes]] = {}
        self.rows: list[_Row] = []
        self.blob = 0

    def build(self, entries: Iterable[Entry]) -> Layer:
        file: tuple[Entry, int] | None = None  # the file whose chunks may follow, and where it is in the blob
        for entry in entries:
            if entry.type == "chunk":
                if file is None or entry.name != file[0].name:
                    raise Unsupported("a chunk without its file", reason="estargz")
                self._chunk(entry, *file)
                continue
            file = None
            name = _clean(entry.name)
            if not name or name in _OWN:  # the root is everybody's: see `oci.unpack_layer`
                continue
            parent, _, leaf = name.rpartition("/")
            if leaf == _OPAQUE:
                self._parent(parent)
                self.opaque.append(parent)
            elif leaf.startswith(_WHITEOUT):
                if not leaf.startswith(".wh..wh."):
                    self._take_away(parent, leaf.removeprefix(_WHITEOUT))
            else:
                node = self._node(entry, name)
                if node is None:
                    continue
                self._put(parent, leaf, name, node)
                if entry.type == "reg" and entry.size:
                    if entry.chunk_offset:
                        raise Unsupported("a file without its beginning", value=name, reason="estargz")
                    file = (entry, self.blob)
                    node.block = DEVICE_BLOCK + self.blob // BLOCK
                    self._chunk(entry, *file)
                    self.blob += -(-entry.size // BLOCK) * BLOCK
        for name in self.opaque:
            self.made[name].xattrs = erofs_write.pack_xattrs(self.xattrs.get(name, {}) | {"trusted.overlay.opaque": b"y"})
        return self._finish()

    def _finish(self) -> Layer:
        self._check_whole()
        cuts = sorted({row.at for row in self.rows})
        following = dict(pairwise([*cuts, self.end]))
        if any(until - at > MAX_MEMBER for at, until in following.items()):
            raise Unsupported("a chunk that can only be fetched with too much beside it", reason="estargz")
        origin = Origin(
            starts=tuple(row.start for row in self.rows),
            lengths=tuple(row.length for row in self.rows),
            at=tuple(row.at for row in self.rows),
            until=tuple(following[row.at] for row in self.rows),
            skip=tuple(row.skip for row in self.rows),
        )
        return Layer(self.root, tuple(sorted(self.implicit)), origin, tuple(row.digest for row in self.rows), self.blob)

    def _take_away(self, parent: str, leaf: str) -> None:
        key = leaf.encode("utf-8", "surrogateescape")
        children = self._parent(parent).children
        if (old := children.get(key)) is None:
            children[key] = _whiteout()
        elif stat.S_ISDIR(old.mode):  # taken away, and made anew by this layer
            self.opaque.append(f"{parent}/{leaf}".lstrip("/"))

    def _check_whole(self) -> None:
        """Every byte of every file is in a chunk: a hole would read as zeros."""
        for row, after in zip(self.rows, [*self.rows, None][1:], strict=True):
            until = after.start if after is not None and after.end == row.end else row.end
            if row.start + row.length != until or row.at >= self.end:
                raise Unsupported("the layer's table leaves out parts of files", reason="estargz")

    def _chunk(self, entry: Entry, file: Entry, blob: int) -> None:
        length = entry.chunk_size or file.size - entry.chunk_offset
        if not entry.chunk_digest.startswith("sha256:") or len(entry.chunk_digest) != 71:
            raise Unsupported("the layer's table gives no digest of a chunk", reason="estargz")
        if (
            not (0 < length <= MAX_CHUNK and entry.chunk_offset >= 0 and entry.chunk_offset + length <= file.size and entry.offset > 0)
            or not 0 <= entry.inner_offset <= MAX_CHUNK
        ):
            raise Unsupported("a chunk that cannot be", reason="estargz")
        digest = entry.chunk_digest.removeprefix("sha256:")
        self.rows.append(_Row(blob + entry.chunk_offset, length, digest, entry.offset, entry.inner_offset, blob + file.size))

    def _node(self, entry: Entry, name: str) -> Node | None:
        if not (0 <= entry.uid < 65_536 and 0 <= entry.gid < 65_536):
            raise Unsupported("an owner outside of 0…65535", value=name, reason="estargz")
        kinds = {"dir": stat.S_IFDIR, "reg": stat.S_IFREG, "symlink": stat.S_IFLNK, "fifo": stat.S_IFIFO}
        if entry.type in ("char", "block"):  # device nodes are left out of every layer
            return None
        if entry.type == "hardlink":
            twin = self.made.get(_clean(entry.link_name))
            if twin is None or stat.S_ISDIR(twin.mode):
                raise Unsupported("a hard link to what is not in the table", value=name, reason="estargz")
            twin.names += 1
            return twin
        if entry.type not in kinds:
            raise Unsupported(f"a name of unknown kind {entry.type!r}", value=name, reason="estargz")
        mode = kinds[entry.type] | (0o777 if entry.type == "symlink" else entry.mode & 0o7777)
        node = Node(mode, entry.uid, entry.gid, _time(entry.modtime))
        self.xattrs[name] = _xattrs(entry.xattrs)
        node.xattrs = erofs_write.pack_xattrs(self.xattrs[name])
        if entry.type == "symlink":
            node.tail = entry.link_name.encode("utf-8", "surrogateescape")
            node.size = len(node.tail)
            if not 0 < node.size < 4096 or b"\0" in node.tail:
                raise InvalidRequest("a symbolic link without a usable target", field="image", value=name)
        elif entry.type == "reg":
            node.size = entry.size
        return node

    def _put(self, parent: str, leaf: str, name: str, node: Node) -> None:
        where = self._parent(parent)
        key = leaf.encode("utf-8", "surrogateescape")
        old = where.children.get(key)
        if old is not None and name in self.made:
            if not (stat.S_ISDIR(old.mode) and stat.S_ISDIR(node.mode)):
                raise Unsupported("a name that is there twice", value=name, reason="estargz")
            node.children = old.children  # a directory that was only implied so far
            self.implicit.discard(name)
        elif old is not None and stat.S_ISDIR(node.mode):  # taken away, and made anew by this layer
            self.opaque.append(name)
        where.children[key] = node
        self.made[name] = node

    def _parent(self, path: str) -> Node:
        node = self.made.get(path)
        if node is None:
            above, _, leaf = path.rpartition("/")
            node = self.made[path] = _directory()
            self.implicit.add(path)
            key, children = leaf.encode("utf-8", "surrogateescape"), self._parent(above).children
            if key in children:  # a whiteout: taken away, and made anew by this layer
                self.opaque.append(path)
            children[key] = node
        if not stat.S_ISDIR(node.mode):
            raise Unsupported("a name below a link", value=path, reason="estargz")
        return node


# What a directory passes on to the layers above: mode, owner, group, time.
Below = dict[str, tuple[int, int, int, int]]


def inherit(layer: Layer, below: Below) -> None:
    """As `oci._inherit`, a layer at a time from the lowest on: directories that it only implies are those of the layers ``below``, to
    which its own are added."""
    directories = _paths(layer.root)
    for name in layer.implicit:
        if name in below and (node := directories.get(name)) is not None:
            node.mode, node.uid, node.gid, node.mtime_ns = below[name]
    below.update({name: (node.mode, node.uid, node.gid, node.mtime_ns) for name, node in directories.items()})


def _paths(root: Node) -> dict[str, Node]:
    found = {"": root}
    todo = [("", root)]
    while todo:
        where, node = todo.pop()
        for key, child in node.children.items():
            if stat.S_ISDIR(child.mode):
                name = f"{where}/{key.decode('utf-8', 'surrogateescape')}".lstrip("/")
                found[name] = child
                todo.append((name, child))
    return found


def inflate(data: bytes, skip: int, length: int) -> bytes:
    """A chunk out of its gzip member; shorter when it is not all there. Raises `InvalidRequest` for damage."""
    try:
        return zlib.decompressobj(31).decompress(data, skip + length)[skip:]
    except zlib.error as error:
        raise InvalidRequest(f"damaged: {error}", field="image") from error


def _directory() -> Node:
    return Node(stat.S_IFDIR | 0o755, 0, 0, 0)


def _whiteout() -> Node:
    return Node(stat.S_IFCHR, 0, 0, 0)


def _clean(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if len(parts) > MAX_DEPTH or ".." in parts or "\0" in name or any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in parts):
        raise InvalidRequest("a name that leads out of the image, or cannot be one", field="image", value=name)
    return "/".join(parts)


def _xattrs(given: dict[str, str]) -> dict[str, bytes]:
    """Of the attributes those that `dsec.tar` would set."""
    found = {}
    for key, value in given.items():
        if (key.startswith("user.") and not key.startswith("user.overlay.")) or key == "security.capability":
            try:
                found[key] = base64.b64decode(value)
            except ValueError:
                raise Unsupported("an extended attribute that cannot be read", value=key, reason="estargz") from None
    return found


def _time(text: str) -> int:
    """Nanoseconds of an RFC 3339 time; 0 for none."""
    if not text:
        return 0
    whole, _, fraction = text.removesuffix("Z").partition(".")
    try:
        seconds = int(dt.datetime.fromisoformat(whole).replace(tzinfo=dt.UTC).timestamp())
        return max(seconds, 0) * 1_000_000_000 + int((fraction or "0").ljust(9, "0")[:9])
    except ValueError:
        raise Unsupported("a time that cannot be read", value=text, reason="estargz") from None


def footer(offset: int) -> bytes:
    """The last bytes of a blob whose table begins at ``offset``."""
    payload = b"%016xSTARGZ" % offset
    head = b"\x1f\x8b\x08\x04" + bytes(4) + b"\0\xff" + struct.pack("<H", 4 + len(payload)) + b"SG" + struct.pack("<H", len(payload))
    return head + payload + b"\x01\0\0\xff\xff" + bytes(8)
