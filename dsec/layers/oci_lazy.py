"""An eStargz image becomes layers without its data: metadata from its tables of contents, chunks from the registry when they are read.

Each of the image's layers is a layer here, and one without files names them all. What is fetched is checked against the table, and the
table against the image's manifest. That the table says the same as the tar around it is its maker's word: so such layers are never
taken for those of a converted image, whose every byte was hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dsec.errors import Unsupported
from dsec.layers import blobrange, erofs, manifest, oci, oci_model, stargz, tools
from dsec.layers.erofs_write import BLOCK, Writer
from dsec.layers.manifest import VERSION_ORIGIN
from dsec.layers.oci_model import Descriptor, Manifest
from dsec.layers.registry import Registry
from dsec.layers.store import LayerInfo, LayerStore
from dsec.layers.tools import Progress
from dsec.model import LayerRef

_RECIPE = 1  # raised when the steps below change
_ONE_TABLE = threading.Lock()  # a table takes up to `stargz.MAX_TOC` and its tree as much again: never two, however many images come


async def take(
    store: LayerStore, image: Registry, found: Manifest, digest: str, names: Sequence[str], stage: Path, progress: Progress
) -> LayerRef:
    """Bring an image of eStargz layers (`stargz.offered`) into the store under ``names``: its tables, none of its data.

    Raises `Unsupported` and `InvalidRequest` where that cannot be: the image is then to be converted; `Unavailable`, `NodeError`.
    """
    assert found.config is not None
    recipe = hashlib.sha256(json.dumps([_RECIPE, "estargz", digest]).encode()).hexdigest()
    ready = await oci.cached(store, recipe)
    if not ready:
        blobs = oci_model.check_layers(found)
        config, notes = oci_model.layer_config(oci_model.read_config(await image.document(found.config)))
        for note in notes:
            progress(note)
        # From the lowest on, and put only when all of them could be drawn: an image that must be converted after all leaves nothing.
        below: stargz.Below = {}
        sizes = [await _draw(image, blob, below, stage / f"image-{number}") for number, blob in enumerate(blobs)]
        digests: list[str] = []
        for number, blob in enumerate(blobs):
            url = blobrange.url_of(image.reference, blob.digest)
            source = f"{image.label} layer {number + 1} of {len(blobs)}"
            made = await _put(store, stage / f"image-{number}", source, url)
            digests = [made, *(each for each in digests if each != made)]
        meta = LayerInfo(digest="", stored="erofs", size=0, source=f"{image.label} {digest}", recipe=recipe, at="/", config=config)
        ready = (await oci.stacked(store, digests, stage, meta)).digest
        progress(f"{len(blobs)} layers, {sum(sizes) / 1e6:.1f} MB that come when they are read")
    for name in names:
        await store.tag(name, ready)
    return LayerRef(name=names[0], digest=ready)


async def _draw(image: Registry, blob: Descriptor, below: stargz.Below, path: Path) -> int:
    """A layer's image at ``path``, and its manifest beside it where it has data; the bytes of that."""
    foot = await image.range(blob.digest, max(0, blob.size - stargz.FOOTER), min(blob.size, stargz.FOOTER))
    end = stargz.toc_offset(foot)
    size = blob.size - stargz.FOOTER - end
    if not 0 < size <= stargz.MAX_PACKED_TOC:
        raise Unsupported("a table of contents that cannot be", field="image", value=blob.digest, reason="estargz")
    packed = await image.range(blob.digest, end, size)
    return await tools.in_thread(_draw_table, packed, (blob.annotations or {})[stargz.TOC_DIGEST], end, below, path)


def _draw_table(packed: bytes, digest: str, end: int, below: stargz.Below, path: Path) -> int:
    with _ONE_TABLE:
        layer = stargz.layer(stargz.read_toc(packed, digest), end)
        stargz.inherit(layer, below)
        _write(layer, path)
        if layer.digests:
            known = manifest.Manifest(
                v=VERSION_ORIGIN,
                meta=erofs.file_digest(path).removeprefix("sha256:"),
                meta_size=path.stat().st_size,
                size=layer.size,
                chunks=layer.digests,
                origin=layer.origin,
            )
            _manifest_of(path).write_bytes(manifest.encode(known))
        return layer.size


def _manifest_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.manifest")


async def _put(store: LayerStore, path: Path, source: str, url: str) -> str:
    """A layer that was drawn in the store, without its data; its digest."""
    info = LayerInfo(digest="", stored="split", size=0, source=source, at="/", remote=url)
    if not _manifest_of(path).exists():  # nothing will have to come
        return (await store.put_image(path, "", msgspec.structs.replace(info, stored="erofs", remote=""))).digest
    return (await store.put_split(path, None, await tools.read(_manifest_of(path)), "", info)).digest


def _write(layer: stargz.Layer, image: Path) -> None:
    fd = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        writer = Writer(fd)
        try:
            writer.finish(layer.root, layer.size // BLOCK)
        finally:
            writer.close()
    finally:
        os.close(fd)
