"""Layers made ready for a shared store: each of a stack once, and nothing is left of what was cancelled."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from dsec import syscalls
from dsec.layers import split
from dsec.layers.fetch import push
from dsec.layers.importer import import_dir
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore

pytestmark = pytest.mark.needs("root", "erofs_file", "mkfs_erofs")
DEPTH = 6


async def test_each_layer_of_a_stack_is_split_and_uploaded_once(tmp_path: Path) -> None:
    """Every layer of a build names all that stand below it; a push says each of them once, the lowest first, and the records there name
    the stack as it is there."""
    source, shared = LayerStore(tmp_path / "source"), RemoteStore(str(tmp_path / "shared"), make=True)
    digests: list[str] = []
    for number in range(DEPTH):
        tree = tmp_path / f"tree{number}"
        tree.mkdir()
        (tree / "file").write_bytes(os.urandom(64))
        ref = await import_dir(source, tree, f"step{number}")
        record = source.side(ref.digest, ".json")
        info = msgspec.structs.replace(await source.info(ref.digest), stack=tuple(reversed(digests)), names=())
        record.write_bytes(msgspec.json.encode(info))
        digests.append(ref.digest)
    said: list[str] = []
    top = await push(source, shared, f"step{DEPTH - 1}", progress=said.append)
    assert sum(line.startswith("splitting") for line in said) == DEPTH, said
    uploaded = [line.partition(" ")[0] for line in said if line.endswith("uploaded")]
    assert len(uploaded) == DEPTH
    stack = (await shared.info(top.digest)).stack
    assert [digest[:19] for digest in reversed(stack)] == uploaded[:-1]
    assert (await shared.info(stack[0])).stack == stack[1:]


async def test_a_split_that_is_cancelled_while_it_mounts_leaves_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancel arrives when the layer is mounted already."""
    source = LayerStore(tmp_path / "source")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    await import_dir(source, tmp_path / "tree", "one")
    move, places = syscalls.move_mount, []

    def cancelled(fd: int, place: str) -> None:
        move(fd, place)
        places.append(place)
        loop.call_soon_threadsafe(task.cancel)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(syscalls, "move_mount", cancelled)
    task = asyncio.ensure_future(split.split(source, "one"))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert places
    assert not any(map(os.path.exists, places))
