"""One layer of a node's store that its owner does not want any more: a checkpoint's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from dsec.layers import index, tools
from dsec.layers.reclaim import claimed, delete, lineage
from dsec.layers.store import LayerInfo, LayerStore


async def forget(store: LayerStore, name: str, prefix: str, unmount: Callable[[str], Awaitable[bool]]) -> bool:
    """Take ``name`` away; the layer goes with it when it has no other name, no named layer was made on it and nobody has it mounted.

    False: the name is still there, to be tried again, because the layer is mounted somewhere, or because another whose name begins with
    ``prefix`` was made on it: that one goes first, or nobody would come back for this one. ``unmount(digest)`` lets go of the node's own
    mount, and answers False while a sandbox may stand on it. Blocking parts run in threads. Raises `NodeError`.
    """
    what = await tools.in_thread(_look, store, name, prefix)
    if what == "later" or (what != "untag" and not await unmount(what)):
        return False
    return await tools.in_thread(_forget, store, name, prefix)


def _look(store: LayerStore, name: str, prefix: str) -> str:
    """The digest that goes with the name, or "untag" where the name goes alone, or "later"."""
    digest = store._index.names().get(name, "")
    infos = store._list()
    found = next((info for info in infos if info.digest == digest), None)
    if found is None or len(found.names) > 1 or digest in lineage(_without(infos, lambda each: each.startswith(prefix))):
        return "untag"
    return "later" if digest in lineage(_without(infos, lambda each: each == name)) else digest


def _without(infos: Iterable[LayerInfo], drop: Callable[[str], bool]) -> list[LayerInfo]:
    return [msgspec.structs.replace(info, names=tuple(each for each in info.names if not drop(each))) for info in infos]


def _forget(store: LayerStore, name: str, prefix: str) -> bool:
    with store._locked():
        if name not in store._index.names():
            return True
        what = _look(store, name, prefix)
        if what == "later":
            return False
        if what == "untag":
            store._index.append(index.Entry(op="untag", name=name))
            return True
        info = store._read_record(what)
        with claimed(store, info) as free:
            if free:
                store._index.append(index.Entry(op="untag", name=name))
                delete(store, info)
        return free
