"""An eStargz image becomes layers without its data: metadata from its tables of contents, chunks from the registry when they are read.

Each of the image's layers is a layer here, and one without files names them all. What is fetched is checked against the table, and the
table against the image's manifest. That the table says the same as the tar around it is its maker's word: so such layers are never
taken for those of a converted image, whose every byte was hashed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import aiofiles

from dsec.errors import Unsupported
from dsec.layers import blobrange, manifest, oci, oci_model, stargz, tools
from dsec.layers.erofs_write import BLOCK, Writer
from dsec.layers.manifest import VERSION_ORIGIN
from dsec.layers.oci_model import Descriptor, Manifest
from dsec.layers.registry import Registry
from dsec.layers.store import LayerInfo, LayerStore
from dsec.layers.tools import Progress
from dsec.model import LayerRef

_RECIPE = 1  # raised when the steps below change


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
        tables = await asyncio.gather(*(_table(image, blob) for blob in blobs))
        config, notes = oci_model.layer_config(oci_model.read_config(await image.document(found.config)))
        for note in notes:
            progress(note)
        layers = await tools.in_thread(lambda: [stargz.layer(toc, end) for toc, end in tables])
        await tools.in_thread(stargz.inherit, layers)
        digests: list[str] = []
        for number, (layer, blob) in enumerate(zip(layers, blobs, strict=True)):
            url = blobrange.url_of(image.reference, blob.digest)
            source = f"{image.label} layer {number + 1} of {len(blobs)}"
            info = LayerInfo(digest="", stored="split", size=0, source=source, at="/", remote=url)
            made = await _put(store, layer, stage / f"image-{number}", info)
            digests = [made, *(each for each in digests if each != made)]
        meta = LayerInfo(digest="", stored="erofs", size=0, source=f"{image.label} {digest}", recipe=recipe, at="/", config=config)
        ready = (await oci.stacked(store, digests, stage, meta)).digest
        total = sum(layer.size for layer in layers)
        progress(f"{len(blobs)} layers, {total / 1e6:.1f} MB that come when they are read")
    for name in names:
        await store.tag(name, ready)
    return LayerRef(name=names[0], digest=ready)


async def _table(image: Registry, blob: Descriptor) -> tuple[stargz.Toc, int]:
    """A layer's table of contents and where it begins."""
    foot = await image.range(blob.digest, max(0, blob.size - stargz.FOOTER), min(blob.size, stargz.FOOTER))
    end = stargz.toc_offset(foot)
    size = blob.size - stargz.FOOTER - end
    if not 0 < size <= stargz.MAX_TOC:
        raise Unsupported("a table of contents that cannot be", field="image", value=blob.digest, reason="estargz")
    packed = await image.range(blob.digest, end, size)
    return await tools.in_thread(stargz.read_toc, packed, (blob.annotations or {})[stargz.TOC_DIGEST]), end


async def _put(store: LayerStore, layer: stargz.Layer, image: Path, info: LayerInfo) -> str:
    """The layer in the store, without its data; its digest."""
    await tools.in_thread(_write, layer, image)
    if not layer.digests:  # nothing will have to come
        return (await store.put_image(image, "", LayerInfo(digest="", stored="erofs", size=0, source=info.source, at="/"))).digest
    async with aiofiles.open(image, "rb") as file:
        meta = await file.read()
    known = manifest.Manifest(
        v=VERSION_ORIGIN,
        meta=hashlib.sha256(meta).hexdigest(),
        meta_size=len(meta),
        size=layer.size,
        chunks=layer.digests,
        origin=layer.origin,
    )
    return (await store.put_split(image, None, manifest.encode(known), "", info)).digest


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
