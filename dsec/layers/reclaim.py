"""How layers leave a node's store: one by one, and what nobody wants all together. Blocking, called in threads.

What has a name stays, and what a named layer was made on; what somebody uses stays as well, whoever that is: they hold a shared flock on
its content (`mounts.pin_layer`), and what takes a layer away first takes that lock for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from dsec import trees
from dsec.errors import Conflict
from dsec.layers import index, mounts

if TYPE_CHECKING:
    from dsec.layers.store import LayerInfo, LayerStore

SIDES = (".data", ".manifest", ".data.map", ".touched", ".ahead", ".data.fuse")  # of a split layer, beside its metadata


@contextlib.contextmanager
def claimed(store: LayerStore, info: LayerInfo) -> Iterator[bool]:
    """True while the layer is ours alone: nobody has it pinned, and nobody can pin it."""
    fds: list[int] = []
    try:
        for path in (store._blob(info), store._unpacked(info.digest)):
            if path.exists():
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        for fd in fds:
            os.close(fd)


def delete(store: LayerStore, info: LayerInfo) -> None:
    """Take a claimed layer away. The record goes first: without it the layer is not there, and what remains of a crash is gc's."""
    store._record(info.digest).unlink(missing_ok=True)
    fsync(store._blobs)
    sides = (store.side(info.digest, suffix) for suffix in SIDES) if info.stored == "split" else ()
    for path in (store._blob(info), store._unpacked(info.digest), *sides):
        if path.exists():
            remove_tree(store._to_trash(path))


def remove(store: LayerStore, name: str, pinned: frozenset[str]) -> LayerInfo:
    """See `LayerStore.remove`."""
    with store._locked():
        info = store._info(name)
        with claimed(store, info) as free:
            if not free or info.digest in pinned:
                raise Conflict("a node or sandbox uses this layer", field="layer", value=name, fix="stop its sandboxes and the node")
            for tag in info.names:
                store._index.append(index.Entry(op="untag", name=tag))
            delete(store, info)
    return info


def gc(store: LayerStore, pinned: frozenset[str]) -> tuple[list[str], int, list[str]]:
    """See `LayerStore.gc`: what went, its bytes, and what would have gone but is used."""
    gone: list[str] = []
    used: list[str] = []
    freed = 0
    with store._locked():
        infos = store._list()
        kept = lineage(infos)
        for info in infos:
            if info.digest in kept:
                continue
            with claimed(store, info) as free:
                if not free or info.digest in pinned:
                    used.append(info.digest)
                    continue
                delete(store, info)
            gone.append(info.digest)
            freed += info.size
        # Content without a record: its writer died between the two renames, or `delete` did.
        known = {path.stem for path in store._blobs.glob("*.json")}
        for path in [*store._blobs.iterdir(), *(store.root / "unpacked").iterdir()]:
            if path.name.split(".")[0] not in known:
                remove_tree(store._to_trash(path))
        for leftover in store._tmp.iterdir():
            # Nobody holds a dead process's staging directory; records and trash live under the store's lock only.
            if mounts.held(leftover) is False:
                remove_tree(leftover)
    return gone, freed, used


def lineage(infos: Iterable[LayerInfo]) -> set[str]:
    """The layers that have a name, and those that they were made on."""
    by_digest = {info.digest: info for info in infos}
    kept: set[str] = set()
    todo = [info.digest for info in by_digest.values() if info.names]
    while todo:
        digest = todo.pop()
        if digest not in kept and digest in by_digest:
            kept.add(digest)
            todo += by_digest[digest].parents
    return kept


def remove_tree(path: Path) -> None:
    """A file, or a directory with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        trees.remove(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: str | Path) -> None:
    """A file or a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_all(*paths: str | Path) -> None:
    """Files and directories at once: the disk is waited for as for one."""
    with ThreadPoolExecutor(len(paths)) as pool:
        for done in [pool.submit(fsync, path) for path in paths]:
            done.result()
