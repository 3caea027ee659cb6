"""Make a split layer (metadata image and blob) of any layer of the store, for a remote store."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from dsec import syscalls
from dsec.layers import erofs, manifest, mounts, tools
from dsec.layers.store import LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef


async def split(store: LayerStore, name: str, progress: Progress = silent) -> LayerRef:
    """The layer as a split layer in the same store, under its present record and without a name; itself when it is one already.

    Mounts it for a moment (root), and packs what is seen: the same content gives the same digest. Raises `NotFound`, `NodeError`,
    `Unsupported` without mkfs.erofs.
    """
    info = await store.info(name)
    if info.stored == "split":
        return LayerRef(name=name, digest=info.digest)
    async with tree(store, info.digest) as files, store.staging() as stage:
        progress(f"splitting {name}")
        found = await tools.in_thread(erofs.survey, str(files))
        image, blob = stage / "image", stage / "blob"
        blob.touch()
        await erofs.build(str(files), str(image), found, blob=str(blob), progress=progress)
        known = await tools.in_thread(lambda: manifest.encode(manifest.survey(image, blob)))
        record = msgspec.structs.replace(info, stored="split", names=())
        return await store.put_split(image, blob, known, "", record)


@contextlib.asynccontextmanager
async def tree(store: LayerStore, digest: str) -> AsyncIterator[Path]:
    """The layer's files at a path."""
    plan = await store.mount_plan(digest)
    if plan.kind == "dir":
        yield Path(plan.source)
        return
    place = Path(tempfile.mkdtemp(prefix="dsec-split-"))
    try:
        pin = mounts.pin_layer(plan)
        try:
            try:
                await tools.in_thread(_mount, plan, str(place))  # a cancel comes behind it: the mount may be there then
                yield place
            finally:
                await tools.in_thread(_unmount, str(place))
        finally:
            os.close(pin)
    finally:
        place.rmdir()


def _mount(plan: mounts.LayerMount, place: str) -> None:
    fd = mounts.open_layer(plan)
    try:
        syscalls.move_mount(fd, place)
    finally:
        os.close(fd)


def _unmount(place: str) -> None:
    if os.path.ismount(place):
        syscalls.umount2(place, syscalls.MNT_DETACH)
