"""A layer in two files: an EROFS image that holds the metadata, and a blob that holds the files' data in order.

The layer is named by the sha256 of its manifest, which has the hash of the metadata image, and of every chunk of the blob. So whoever knows
the name can check any chunk the moment it arrives, without the rest. Chunks are 256 KiB: on a 559 MB base the first imports of Python,
gcc and git touch a fifth of them. The hashes are BLAKE3's (version 3), at 9.6 GB/s a core against sha256's 2.0: while a reader waits for
chunks to be checked, that is a quarter of the loader's work. Layers of older nodes have sha256 (version 1). The layer of an image that
is read out of its registry has the chunks and hashes that the image has: version 2, which says where they are (`Origin`).
Blocking; imports the standard library, blake3, msgspec and dsec.errors only.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from dsec.errors import NodeError

CHUNK = 256 * 1024
VERSION_SHA256, VERSION_ORIGIN, VERSION = 1, 2, 3
MOST_AHEAD = 8192  # chunks (2 GiB) of a prefetch list: one message tells the loader of a layer


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Of each chunk: ``starts`` and ``lengths`` in the blob here, in order and without overlap; in the registry's compressed blob a gzip
    member from ``at`` to ``until`` that holds it ``skip`` bytes behind its beginning."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    at: tuple[int, ...]
    until: tuple[int, ...]
    skip: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``meta``: hash (hex) of the metadata image, ``meta_size`` its bytes; ``size``: bytes of the blob; ``chunks``: the hash of each
    ``chunk`` bytes of it, the last one shorter; with ``origin`` of the pieces that it names. ``v`` says which hash: see above."""

    v: int
    meta: str
    meta_size: int
    size: int
    chunk: int = CHUNK
    chunks: tuple[str, ...]
    origin: Origin | msgspec.UnsetType = msgspec.UNSET  # absent in the others, whose bytes name layers

    @property
    def total(self) -> int:
        """Bytes of both files."""
        return self.meta_size + self.size

    def hash(self, data: bytes | memoryview) -> str:
        """Of bytes, as this manifest has it."""
        return blake3(data).hexdigest() if self.v == VERSION else hashlib.sha256(data).hexdigest()

    def span(self, number: int) -> tuple[int, int]:
        """Offset and length of a chunk."""
        if self.origin is not msgspec.UNSET:
            return self.origin.starts[number], self.origin.lengths[number]
        start = number * self.chunk
        return start, min(self.chunk, self.size - start)

    def covering(self, offset: int, length: int) -> range:
        """The chunks that a range of bytes touches."""
        end = offset + max(length, 1)
        if self.origin is not msgspec.UNSET:
            first = bisect.bisect_right(self.origin.starts, offset) - 1
            if first >= 0 and self.origin.starts[first] + self.origin.lengths[first] <= offset:
                first += 1
            return range(max(first, 0), bisect.bisect_left(self.origin.starts, end))
        first = min(offset // self.chunk, len(self.chunks))
        return range(first, min(len(self.chunks), (end - 1) // self.chunk + 1))


def encode(manifest: Manifest) -> bytes:
    """The one way to write it: a layer's digest is the sha256 of these bytes."""
    return msgspec.json.encode(manifest)


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def decode(data: bytes, name: str) -> Manifest:
    """The manifest of the layer ``name`` (its digest). Raises `NodeError` when these bytes are not it."""
    if digest(data) != name:
        raise NodeError("the layer's manifest was altered", field="layer", value=name, retryable=False)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise NodeError(f"not a layer manifest: {error}", field="layer", value=name, retryable=False) from error
    if not _sound(manifest):
        raise NodeError(f"an unreadable layer manifest, version {manifest.v}", field="layer", value=name, retryable=False)
    return manifest


def _sound(manifest: Manifest) -> bool:
    origin = manifest.origin
    if origin is msgspec.UNSET:
        even = manifest.chunk > 0 and len(manifest.chunks) == -(-manifest.size // manifest.chunk)
        return even and manifest.v in (VERSION_SHA256, VERSION)
    lists = (origin.starts, origin.lengths, origin.at, origin.until, origin.skip)
    if manifest.v != VERSION_ORIGIN or any(len(each) != len(manifest.chunks) for each in lists):
        return False
    end = 0
    for start, length, at, until, skip in zip(*lists, strict=True):
        if start < end or length <= 0 or not 0 <= at < until or skip < 0:
            return False
        end = start + length
    return end <= manifest.size


def ahead(numbers: Sequence[int], count: int = 2**31) -> tuple[int, ...]:
    """What is good of a prefetch list, which comes from a store: numbers of the layer's ``count`` chunks, each once, not too many."""
    return tuple(itertools.islice((number for number in dict.fromkeys(numbers) if 0 <= number < count), MOST_AHEAD))


def load(path: str | os.PathLike[str], name: str) -> Manifest:
    """As `decode`, of a file."""
    with open(path, "rb") as file:
        return decode(file.read(), name)


def survey(meta: str | os.PathLike[str], data: str | os.PathLike[str], chunk: int = CHUNK, v: int = VERSION) -> Manifest:
    """The manifest of two files; reads both once."""
    known = Manifest(v=v, meta="", meta_size=os.stat(meta).st_size, size=os.stat(data).st_size, chunk=chunk, chunks=())
    with open(meta, "rb") as file:
        head = known.hash(file.read())
    chunks = []
    with open(data, "rb") as file:
        while piece := file.read(chunk):
            chunks.append(known.hash(piece))
    return msgspec.structs.replace(known, meta=head, chunks=tuple(chunks))


def check(known: Manifest, meta: str | os.PathLike[str], data: str | os.PathLike[str]) -> bool:
    """Whether two files are what a manifest says; reads both once."""
    if known.origin is msgspec.UNSET:
        return survey(meta, data, known.chunk, known.v) == known
    with open(meta, "rb") as file:
        if known.hash(file.read()) != known.meta:
            return False
    with open(data, "rb") as file:
        for number, digest in enumerate(known.chunks):
            start, length = known.span(number)
            file.seek(start)
            if known.hash(file.read(length)) != digest:
                return False
    return os.stat(data).st_size == known.size
