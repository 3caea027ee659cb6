"""Layers on demand where the kernel has no room for one more: another way is taken, and no byte is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import syscalls
from dsec.backends.holder_parts import Edge
from dsec.backends.ondemand import OnDemand
from dsec.layers import fetch
from dsec.layers.fetch import NodeLayers
from dsec.layers.mounts import bitmap
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.trees import clear
from tests.fixtures_backend import Yard
from tests.layer_box import Box, Shared
from tests.system.test_ondemand_nodes import SMALL, Base, hashed, prepared

pytestmark = [pytest.mark.needs("erofs_file", "fanotify"), pytest.mark.timeout(90)]


@contextlib.contextmanager
def no_group_left() -> Iterator[None]:
    """All of root's fanotify groups (fs.fanotify.max_user_groups) are taken."""
    groups: list[int] = []
    try:
        full = False
        while not full:
            try:
                groups.append(syscalls.fanotify_init(syscalls.FAN_CLASS_PRE_CONTENT | syscalls.FAN_CLOEXEC))
            except OSError as error:
                full = error.errno == errno.EMFILE
        yield
    finally:
        for fd in groups:
            os.close(fd)


class Node(OnDemand):
    def __init__(self) -> None:
        super().__init__()
        self.edges: dict[int, Edge] = {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("shared"), megabytes=4)
    yield made
    made.close()


@pytest.fixture
async def box(tmp_path: Path, shared: Shared) -> AsyncIterator[Box]:
    made = Box(tmp_path / "box", shared)
    await made.open()
    yield made
    made.close()


@pytest.mark.needs("fuse")
async def test_a_layer_beyond_the_kernels_groups_comes_through_fuse(box: Box) -> None:
    """As with the 129th partly filled layer of a node: it is filled as it is read, and right."""
    with no_group_left():
        assert fetch.fanotify_trouble() == ""
        plan = await box.plan()
        assert plan.lazy is not None
        assert plan.lazy.way == "fanotify"
        node = Node()
        box.loaders.append(node._get_loader())
        fd = await asyncio.to_thread(node.guarded, plan)
        box.mounts.append(fd)
        assert node._get_loader().kits[box.digest].by_fuse
        assert await asyncio.to_thread(box.read, fd, "f000") == box.files["f000"]
    await asyncio.to_thread(box.check, fd)


async def test_a_layer_that_cannot_be_guarded_is_fetched_whole(
    leftovers: object, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a group and without FUSE a sandbox starts on the whole layer."""
    monkeypatch.setenv("DSEC_DISABLE", "fuse")
    base = await asyncio.to_thread(_base, tmp_path / "base")
    try:
        yard.layers = NodeLayers(LayerStore(yard.state / "layers"), RemoteStore(base.server.url))
        with no_group_left():
            backend, ref = await prepared(yard)
            assert (await yard.layers.mount_plan(ref.digest)).lazy is not None
            box = await backend.launch(yard.plan(backend.node, base=ref, resources=SMALL))
            assert not os.path.exists(bitmap(str(yard.layers.store.side(ref.digest, ".data"))))
        assert await hashed(box) == base.hashes
        await box.stop()
    finally:
        base.server.close()
        clear(tmp_path / "base")


def _base(place: Path) -> Base:
    place.mkdir()
    return Base(place)
