"""What nobody wants of a shared layer store goes, while others write to it and read from it.

There is no lock, so there is an order. A layer's record goes first: without it the layer is not there, for whoever looks from then on.
Then names, pins, users and lineage are looked at again: who was quicker gets the record back, and the layer with it. Only then goes the
rest. So a node that says that it uses a layer before it reads its record either finds no record or keeps the layer. Uploads that
are under way are young (``grace``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from dsec.errors import NotFound
from dsec.layers.store import Removed

if TYPE_CHECKING:
    from dsec.layers.remote import RemoteStore


async def collect(remote: RemoteStore, keep: Collection[str], grace: float) -> Removed:
    """See `RemoteStore.gc`."""
    kept = await _wanted(remote, keep)
    gone: list[str] = []
    young: list[str] = []
    taken: dict[str, bytes] = {}
    for digest, rows in (await _rows(remote)).items():
        if digest in kept:
            continue
        if _is_young(rows, grace):
            young.append(digest)
            continue
        path = f"layers/{digest.removeprefix('sha256:')}/info.json"
        with contextlib.suppress(NotFound):
            taken[digest] = await remote._get(path, digest)
        await remote._delete(path)
        gone.append(digest)
    for digest in (await _wanted(remote, keep, taken)).intersection(gone):
        gone.remove(digest)
        if digest in taken:
            await remote._put(f"layers/{digest.removeprefix('sha256:')}/info.json", taken[digest])
    freed = sum([await _remove(remote, digest) for digest in list(gone)])
    await _forget(remote, grace)
    return Removed(digests=tuple(gone), bytes=freed, in_use=tuple(young))


async def _wanted(remote: RemoteStore, keep: Collection[str], taken: Collection[str] = ()) -> set[str]:
    """Digests with a name, a pin, a user or a place in ``keep``, and what those were made on. ``taken``: layers whose record is away just
    now, whose names count all the same."""
    infos = {info.digest: info for info in await remote.list()}
    named = {digest for digest in (await remote.names()).values() if digest in infos or digest in taken}
    wanted = {*keep, *named, *await remote.pins(), *await remote.users()}
    todo = list(wanted)
    while todo:
        info = infos.get(todo.pop())
        fresh = [parent for parent in (info.parents if info is not None else ()) if parent not in wanted]
        wanted.update(fresh)
        todo += fresh
    return wanted


async def _rows(remote: RemoteStore, prefix: str = "layers/") -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in await remote._rows(prefix):
        found.setdefault("sha256:" + row["path"].split("/")[1], []).append(row)
    return found


def _is_young(rows: list[Any], grace: float) -> bool:
    newest: float = max(row["last_modified"].timestamp() for row in rows)
    return newest > time.time() - grace


async def _remove(remote: RemoteStore, digest: str) -> int:
    """What is there now; nothing when somebody puts the layer there again. The bytes."""
    prefix = f"layers/{digest.removeprefix('sha256:')}/"
    rows = await remote._rows(prefix)
    if any(row["path"].endswith("/info.json") for row in rows):
        return 0
    for row in rows:
        await remote._delete(row["path"])
    return sum(row["size"] for row in rows)


async def _forget(remote: RemoteStore, grace: float) -> None:
    """Entries of images whose layer is gone, and claims and users that nobody writes any more."""
    from dsec.layers.remote import USE_S

    there = await _rows(remote)
    for path in await remote._paths("images/"):
        with contextlib.suppress(NotFound):
            if await remote.image(path.removeprefix("images/").removesuffix(".json")) not in there:
                await remote._delete(path)
    for prefix, age in (("claims/", max(grace, 3600.0)), ("users/", USE_S)):
        for row in await remote._rows(prefix):
            if row["last_modified"].timestamp() <= time.time() - age:
                await remote._delete(row["path"])
