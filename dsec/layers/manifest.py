"""A layer in two files: an EROFS image that holds the metadata, and a blob that holds the files' data in order.

The layer is named by its manifest: the sha256 of the metadata image, and of every chunk of the blob. So whoever knows the name can
check any chunk the moment it arrives, without the rest. Chunks are 256 KiB: on a 559 MB base the first imports of Python,
gcc and git touch a fifth of them. Blocking; imports the standard library, msgspec and dsec.errors only.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from dsec.errors import NodeError

CHUNK = 256 * 1024
VERSION = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``meta``: sha256 (hex) of the metadata image, ``meta_size`` its bytes; ``size``: bytes of the blob; ``chunks``: the sha256 of each
    ``chunk`` bytes of it, the last one shorter."""

    v: int = VERSION
    meta: str
    meta_size: int
    size: int
    chunk: int = CHUNK
    chunks: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes of both files."""
        return self.meta_size + self.size

    def span(self, number: int) -> tuple[int, int]:
        """Offset and length of a chunk."""
        start = number * self.chunk
        return start, min(self.chunk, self.size - start)


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
    if manifest.v != VERSION or manifest.chunk <= 0 or len(manifest.chunks) != -(-manifest.size // manifest.chunk):
        raise NodeError(f"an unreadable layer manifest, version {manifest.v}", field="layer", value=name, retryable=False)
    return manifest


def load(path: str | os.PathLike[str], name: str) -> Manifest:
    """As `decode`, of a file."""
    with open(path, "rb") as file:
        return decode(file.read(), name)


def survey(meta: str | os.PathLike[str], data: str | os.PathLike[str], chunk: int = CHUNK) -> Manifest:
    """The manifest of two files; reads both once."""
    with open(meta, "rb") as file:
        head = hashlib.file_digest(file, "sha256").hexdigest()
    chunks = []
    with open(data, "rb") as file:
        while piece := file.read(chunk):
            chunks.append(hashlib.sha256(piece).hexdigest())
    return Manifest(meta=head, meta_size=os.stat(meta).st_size, size=os.stat(data).st_size, chunk=chunk, chunks=tuple(chunks))
