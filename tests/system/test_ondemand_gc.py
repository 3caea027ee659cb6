"""Collecting layers while sandboxes start and read on partly filled ones: nothing in use is taken, and no byte is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.errors import NotFound
from dsec.layers.fetch import NodeLayers
from dsec.layers.importer import import_dir
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.trees import clear
from tests.fixtures_backend import Yard
from tests.system.test_ondemand_nodes import SMALL, Base, hashed, prepared

pytestmark = [pytest.mark.needs("erofs_file", "fanotify", "overlay_fd"), pytest.mark.timeout(90)]


async def test_gc_during_a_burst_takes_nothing_that_is_used(leftovers: object, yard: Yard, tmp_path: Path) -> None:
    """Both stores are collected again and again while sandboxes start on a cold base and read it, in the middle of which it loses its
    name; it goes when the last of them has ended, and nothing else of theirs before."""
    base = await asyncio.to_thread(_base, tmp_path / "base")
    node = LayerStore(yard.state / "layers")
    yard.layers = NodeLayers(node, RemoteStore(base.server.url))
    gone: list[str] = []
    rounds = 0

    async def collect() -> None:
        nonlocal rounds
        while True:
            gone.extend((await node.gc()).digests)
            gone.extend((await base.remote.gc(grace=0.0)).digests)
            rounds += 1
            await asyncio.sleep(0.01)

    collector = asyncio.create_task(collect())
    try:
        backend, ref = await prepared(yard)
        first = await backend.launch(yard.plan(backend.node, base=ref, resources=SMALL))
        reads = asyncio.create_task(hashed(first))
        await node.untag("base")
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/file").write_bytes(b"old")
        old = (await import_dir(node, tmp_path / "tree", "old")).digest
        await node.untag("old")
        before = rounds
        boxes = await asyncio.gather(*(backend.launch(yard.plan(backend.node, base=ref, resources=SMALL)) for _ in range(4)))
        for found in [await reads, *await asyncio.gather(*(hashed(box) for box in boxes))]:
            assert found == base.hashes
        while rounds < before + 3:
            assert not collector.done()
            await asyncio.sleep(0.02)
        assert gone == [old]
        for box in (first, *boxes):
            await box.stop()
        assert await backend.drop_layer(ref.digest)
        while rounds < before + 1000 and ref.digest not in gone:
            assert not collector.done()
            await asyncio.sleep(0.02)
        assert gone == [old, ref.digest]
        with pytest.raises(NotFound):
            await node.info(ref.digest)
    finally:
        collector.cancel()
        await asyncio.gather(collector, return_exceptions=True)
        base.server.close()
        clear(tmp_path / "base")


def _base(place: Path) -> Base:
    place.mkdir()
    return Base(place)
