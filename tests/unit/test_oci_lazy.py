"""eStargz images as layers, without a registry: what of their tables is held in memory."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest

from dsec.errors import NotFound, Unsupported
from dsec.layers import oci_lazy, oci_model, stargz
from dsec.layers.oci_model import Descriptor, Manifest
from dsec.layers.registry import Registry
from dsec.layers.store import LayerStore

NAMES = 4_000


def layer(number: int, *, broken: bool = False) -> tuple[Descriptor, bytes]:
    """A layer of many names, of which only the table is there; one that is broken has a chunk without a digest."""
    entries: list[dict[str, Any]] = [
        {"name": f"d{number}/some-directory-{at}/", "type": "dir", "mode": 0o755, "xattrs": {"user.a": "YWFh"}} for at in range(NAMES)
    ]
    if broken:
        entries.append({"name": "f", "type": "reg", "size": 3, "offset": 1})
    text = json.dumps({"version": 1, "entries": entries}).encode()
    table = io.BytesIO()
    with tarfile.open(fileobj=table, mode="w") as archive:
        info = tarfile.TarInfo("stargz.index.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    data = b"x" * 40 + gzip.compress(table.getvalue(), 1, mtime=0) + stargz.footer(40)
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    about = {stargz.TOC_DIGEST: oci_model.digest_of(text)}
    return Descriptor(media_type=kind, digest=oci_model.digest_of(data), size=len(data), annotations=about), data


class Blobs:
    """As much of a registry as is asked for."""

    label = "oci registry/app:1"
    reference = oci_model.parse("registry.example/app:1")

    def __init__(self, layers: list[tuple[Descriptor, bytes]]) -> None:
        self.config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
        self.blobs = {blob.digest: data for blob, data in layers}
        about = Descriptor(media_type="", digest=oci_model.digest_of(self.config), size=len(self.config))
        self.found = Manifest(config=about, layers=[blob for blob, _ in layers])

    async def range(self, digest: str, start: int, length: int) -> bytes:
        return self.blobs[digest][start : start + length]

    async def document(self, _blob: Descriptor) -> bytes:
        return self.config


async def take(store: LayerStore, blobs: Blobs) -> int:
    """The most memory that it took."""
    tracemalloc.start()
    try:
        async with store.staging() as stage:
            await oci_lazy.take(store, cast(Registry, blobs), blobs.found, "sha256:" + "1" * 64, ["app"], stage, lambda _: None)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.needs("root")
async def test_one_table_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """However many layers an image has: its pull takes the memory of the largest table, and little for each of the others."""
    layers = [layer(number) for number in range(5)]
    one = await take(LayerStore(tmp_path / "one"), Blobs(layers[:1]))
    store = LayerStore(tmp_path / "all")
    assert await take(store, Blobs(layers)) < 2 * one
    assert len((await store.info("app")).stack) == 5


async def test_an_image_that_must_be_converted_after_all_leaves_nothing(tmp_path: Path) -> None:
    """Its last layer's table cannot be believed: none of the others is in the store."""
    store = LayerStore(tmp_path / "store")
    with pytest.raises(Unsupported, match="gives no digest"):
        await take(store, Blobs([layer(0), layer(1, broken=True)]))
    assert await store.list() == ()
    with pytest.raises(NotFound):
        store.lookup("app")
