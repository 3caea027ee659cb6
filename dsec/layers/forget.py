"""One layer of a node's store that its owner does not want any more: a checkpoint's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from dsec.layers import index, tools
from dsec.layers.store import LayerInfo, LayerStore, _lineage


async def forget(store: LayerStore, name: str, unmount: Callable[[str], Awaitable[bool]]) -> bool:
    """Take ``name`` away; the layer goes with it when it has no other name, no named layer was made on it and nobody has it mounted.

    ``unmount(digest)`` lets go of the node's own mount, and answers False while a sandbox may stand on it. False: the name is still there,
    to be tried again. Blocking parts run in threads. Raises `NodeError`.
    """
    digest = await tools.in_thread(_alone, store, name)
    if digest and not await unmount(digest):
        return False
    return await tools.in_thread(_forget, store, name)


def _alone(store: LayerStore, name: str) -> str:
    """The digest of a layer that only this name keeps; "" when something else does, or it is not there."""
    digest = store._index.names().get(name, "")
    return "" if digest in _lineage(info for info in _without(store, name)) else digest


def _without(store: LayerStore, name: str) -> list[LayerInfo]:
    infos = store._list()
    return [msgspec.structs.replace(info, names=tuple(each for each in info.names if each != name)) for info in infos]


def _forget(store: LayerStore, name: str) -> bool:
    with store._locked():
        digest = store._index.names().get(name)
        if digest is None:
            return True
        infos = {info.digest: info for info in _without(store, name)}
        if digest in infos and digest not in _lineage(infos.values()):
            with store._claimed(infos[digest]) as free:
                if not free:
                    return False
                store._index.append(index.Entry(op="untag", name=name))
                store._delete(infos[digest])
            return True
        store._index.append(index.Entry(op="untag", name=name))
    return True
