"""A layer that brings its whole stack along is uploaded with it, each layer once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

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
