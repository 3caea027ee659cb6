"""A layer filled from S3 while it is read: the loader, a process of its own, finds server and keys by the store's URL."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dsec.layers.fetch import NodeLayers, push
from dsec.layers.mounts import bitmap
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from tests.layer_box import Box, Shared, readers
from tests.s3_box import REGION, server

pytestmark = [pytest.mark.needs("erofs_file", "fanotify"), pytest.mark.timeout(90)]


async def test_a_layer_of_s3_is_filled_as_it_is_read(tmp_path: Path) -> None:
    """Twelve readers at once get the source's bytes; one file alone fetches a part of the blob; in the end the layer is whole."""
    shared = await asyncio.to_thread(Shared, tmp_path / "shared", 4)
    keys = tmp_path / "keys"
    with server() as s3:
        keys.write_text(f"[default]\naws_access_key_id = {s3.key}\naws_secret_access_key = {s3.secret}\n")
        remote = RemoteStore(f"s3://{s3.bucket()}/layers?endpoint={s3.url}&region={REGION}&credentials={keys}")
        box = Box(tmp_path / "box", shared)
        try:
            await push(LayerStore(shared.place / "source"), remote, "base")
            box.node = NodeLayers(LayerStore(box.place / "node"), remote)
            await box.node.ensure(["base"])
            plan = await box.plan()
            fd = box.mount(plan)
            assert box.read(fd, "f000") == box.files["f000"]
            assert os.stat(plan.devices[0]).st_blocks * 512 < sum(map(len, box.files.values()))
            with readers(12, lambda _: box.check(fd)) as problems:
                pass
            assert not problems
            box.news(box.loaders[0], "whole")
            assert not os.path.exists(bitmap(plan.devices[0]))
            box.loaders[0].drop(box.digest)
            await box.node.store.verify(box.digest)
        finally:
            box.close()
            shared.close()
