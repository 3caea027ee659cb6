"""Layers in a place that many nodes share: a directory, S3, or a web server for reading (`objects` has the URLs).

    layers/<hex>/manifest       names the rest: the layer's digest is its sha256
    layers/<hex>/meta           the metadata image
    layers/<hex>/data           the blob; nodes fetch ranges of it
    layers/<hex>/ahead          chunks that an earlier run read first, as JSON; a hint
    layers/<hex>/info.json      the record (environment, workdir, source, parents); written last: without it the layer is not there
    names/<name>/<time>-<random>.json   one object a change of a name, never rewritten: the history, and with it what a name means
    heads/<name>.json           the newest change again, for stores that cannot list (HTTP)
    pins/<hex>/<who>            keeps a layer from `gc`
    users/<hex>/<node>          as a pin, of a node that has a part of the layer only; written anew while that is so, else forgotten
    images/<key>.json           which layer an image became, for whoever has the same image to convert (`sharing`); keeps nothing
    claims/<key>                who converts an image just now

obstore is called in threads: its own asynchronous calls end the interpreter with SIGABRT when it exits just after one (0.12).
Nothing is ever appended to or locked, so any number of writers may work at once: two that put one layer write equal bytes, and of two
that tag one name the later wins and both are in the history. An upload appears whole or not at all (rename, or S3's commit).
Whatever is read is checked against the manifest, so an altered or truncated object is found when it is fetched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.errors import Conflict, DsecError, NodeError, NotFound, Unsupported
from dsec.layers import index, manifest, objects, tools
from dsec.layers.manifest import Manifest
from dsec.layers.stack import close_matches
from dsec.layers.store import LayerInfo, Removed
from dsec.model import LayerRef

T = TypeVar("T")
GRACE_S = 86_400.0  # younger objects are left alone by gc: somebody may be uploading, or about to tag
USE_S = 3 * 86_400.0  # a node that has not said for so long that it uses a layer does not
MULTIPART = 16 << 20


class RemoteStore:
    """The layers at ``url``. ``make``: make a missing directory. Raises `InvalidRequest`, `NodeError`, `Unsupported`.

    Every method raises `Unavailable` when the store cannot be reached and `NodeError` when what it holds is not what its name says.
    """

    def __init__(self, url: str, *, timeout: float = 10.0, make: bool = False) -> None:
        self.url = objects.check(url)
        self.writable = not self.url.startswith("http")
        self._store: Any = objects.connect(self.url, timeout, make=make)

    # --- content ---------------------------------------------------------------------------------------------------

    async def has(self, digest: str) -> bool:
        """Whether the whole layer is there."""
        try:
            await self._get(f"{_at(digest)}/info.json", digest)
        except NotFound:
            return False
        return True

    async def info(self, digest: str) -> LayerInfo:
        """The layer's record, with its names where the store can list. Raises `NotFound`."""
        return _decode(await self._get(f"{_at(digest)}/info.json", digest), LayerInfo, digest)

    async def manifest(self, digest: str) -> bytes:
        """The checked manifest's bytes. Raises `NotFound`."""
        data = await self._get(f"{_at(digest)}/manifest", digest)
        manifest.decode(data, digest)
        return data

    async def meta(self, digest: str, known: Manifest) -> bytes:
        """The checked metadata image."""
        data = await self.meta_bytes(digest)
        self.check_meta(digest, known, data)
        return data

    async def meta_bytes(self, digest: str) -> bytes:
        """The metadata image as the store has it; for who fetches it beside the manifest, and checks it then."""
        return await self._get(f"{_at(digest)}/meta", digest)

    def check_meta(self, digest: str, known: Manifest, data: bytes) -> None:
        """Raises `NodeError` when this is not the layer's metadata."""
        if len(data) != known.meta_size or known.hash(data) != known.meta:
            raise NodeError("the layer's metadata in the store was altered", field="layer", value=digest, retryable=False)

    async def get_range(self, digest: str, offset: int, length: int) -> bytes:
        """Bytes of the blob, as the store has them: the caller checks them against the manifest's chunks."""
        return await tools.in_thread(self.range_sync, digest, offset, length)

    def range_sync(self, digest: str, offset: int, length: int) -> bytes:
        """`get_range` for a thread."""
        import obstore

        with objects.errors(digest):
            return bytes(obstore.get_range(self._store, f"{_at(digest)}/data", start=offset, length=length))

    async def put(self, known: bytes, meta: str | os.PathLike[str], data: str | os.PathLike[str], info: LayerInfo) -> bool:
        """Upload a layer; False when it is there already (its record is then renewed, which keeps `gc` away for a day).

        Raises `NodeError` when the store is read only.
        """
        self._check_writable()
        digest = manifest.digest(known)
        record = msgspec.json.encode(msgspec.structs.replace(info, digest=digest, names=(), remote=""))
        there = await self.has(digest)
        if not there:
            await self._put(f"{_at(digest)}/data", Path(data))
            await self._put(f"{_at(digest)}/meta", Path(meta))
            await self._put(f"{_at(digest)}/manifest", known)
        await self._put(f"{_at(digest)}/info.json", record)
        return not there

    async def ahead(self, digest: str) -> tuple[int, ...]:
        """Chunks that an earlier run read first; () where nobody has recorded any."""
        try:
            return tuple(_decode(await self._get(f"{_at(digest)}/ahead", digest), list[int], digest))
        except (NotFound, NodeError):  # a hint; a damaged one is none
            return ()

    async def put_ahead(self, digest: str, chunks: Sequence[int]) -> None:
        self._check_writable()
        await self._put(f"{_at(digest)}/ahead", msgspec.json.encode(list(chunks)))

    async def list(self) -> tuple[LayerInfo, ...]:
        """Every whole layer with its names, newest first. Raises `Unsupported` over HTTP."""
        names: dict[str, list[str]] = {}
        for name, digest in (await self.names()).items():
            names.setdefault(digest, []).append(name)
        found = []
        for path in await self._paths("layers/"):
            if path.endswith("/info.json"):
                digest = "sha256:" + path.split("/")[1]
                with contextlib.suppress(NotFound):  # taken away meanwhile
                    found.append(msgspec.structs.replace(await self.info(digest), names=tuple(sorted(names.get(digest, ())))))
        return tuple(sorted(found, key=lambda info: (-info.created_ts, info.digest)))

    # --- names -----------------------------------------------------------------------------------------------------

    async def resolve(self, name: str) -> LayerRef:
        """What a name means now. Raises `NotFound` with near names."""
        if index.is_digest(name):
            if await self.has(name):
                return LayerRef(name=name, digest=name)
            raise NotFound("the layer store has no such layer", field="layer", value=name)
        entry = await self._newest(index.check_name(name, "layer"))
        if entry is None or entry.op == "untag":
            known = () if not self.writable else tuple(await self.names())
            raise NotFound("the layer store has no such layer", field="layer", value=name, fix=close_matches(name, known) if known else "")
        return LayerRef(name=name, digest=entry.digest)

    async def names(self) -> dict[str, str]:
        """Every name and what it means now."""
        newest: dict[str, str] = {}
        for path in sorted(await self._paths("names/")):
            newest[path.split("/")[1]] = path
        entries = [await self._entry(path) for path in newest.values()]
        return {entry.name: entry.digest for entry in entries if entry.op == "tag"}

    async def history(self, name: str) -> tuple[index.Entry, ...]:
        """What a name has meant, oldest first."""
        return tuple([await self._entry(path) for path in sorted(await self._paths(f"names/{_quote(index.check_name(name))}/"))])

    async def tag(self, name: str, digest: str) -> LayerRef:
        """Let a name mean a layer that is there. Raises `NotFound`."""
        if not await self.has(digest):
            raise NotFound("the layer store has no such layer", field="layer", value=digest)
        if (old := await self._newest(index.check_name(name))) is None or old.op != "tag" or old.digest != digest:
            await self._change(index.Entry(op="tag", name=name, digest=digest, ts=time.time()))
            if not await self.has(digest):  # `gc` took it in this moment, before it could see the name
                await self._change(index.Entry(op="untag", name=name, ts=time.time()))
                raise NotFound("the layer store has no such layer any more", field="layer", value=digest)
        return LayerRef(name=name, digest=digest)

    async def untag(self, name: str) -> None:
        """Forget a name; its history stays. Raises `NotFound`."""
        await self.resolve(name)
        await self._change(index.Entry(op="untag", name=name, ts=time.time()))

    # --- what stays ------------------------------------------------------------------------------------------------

    async def pin(self, digest: str, who: str) -> None:
        """Keep a layer whatever its names say; ``who`` is for people, and for `unpin`."""
        self._check_writable()
        await self._put(f"pins/{digest.removeprefix('sha256:')}/{_quote(who)}", b"{}")

    async def unpin(self, digest: str, who: str) -> None:
        await self._delete(f"pins/{digest.removeprefix('sha256:')}/{_quote(who)}")

    async def pins(self) -> dict[str, tuple[str, ...]]:
        """Pinned digests and by whom."""
        found: dict[str, tuple[str, ...]] = {}
        for path in await self._paths("pins/"):
            _, digest, who = path.split("/", 2)
            found[f"sha256:{digest}"] = (*found.get(f"sha256:{digest}", ()), _unquote(who))
        return found

    async def use(self, digest: str, node: str) -> None:
        """Keep a layer for a node that will fetch more of it; to be said again within `USE_S`. Whoever says it before it reads the layer's
        record has the layer: `gc` takes records away first, and looks for users again before it takes the rest."""
        self._check_writable()
        await self._put(f"users/{digest.removeprefix('sha256:')}/{_quote(node)}", b"{}")

    async def unuse(self, digest: str, node: str) -> None:
        await self._delete(f"users/{digest.removeprefix('sha256:')}/{_quote(node)}")

    async def users(self) -> dict[str, tuple[str, ...]]:
        """Digests in use and the nodes that say so."""
        found: dict[str, tuple[str, ...]] = {}
        for row in await self._rows("users/"):
            if row["last_modified"].timestamp() > time.time() - USE_S:
                _, digest, node = row["path"].split("/", 2)
                found[f"sha256:{digest}"] = (*found.get(f"sha256:{digest}", ()), _unquote(node))
        return found

    # --- images ----------------------------------------------------------------------------------------------------

    async def image(self, key: str) -> str:
        """The digest of the layer that an image became. Raises `NotFound`."""
        return _decode(await self._get(f"images/{_quote(key)}.json", key), str, key)

    async def put_image(self, key: str, digest: str) -> None:
        """Tell whoever has the same image that it is this layer, which is there."""
        await self._put(f"images/{_quote(key)}.json", msgspec.json.encode(digest))

    async def claim(self, key: str, what: bytes) -> bool:
        """Make the claim; False when there is one already."""
        try:
            await self._put(f"claims/{_quote(key)}", what, new=True)
        except Conflict:
            return False
        return True

    async def renew(self, key: str, what: bytes) -> None:
        """Write the claim anew, whosever it is."""
        await self._put(f"claims/{_quote(key)}", what)

    async def claimed(self, key: str) -> bytes:
        """What the claim says, b"" when there is none."""
        try:
            return await self._get(f"claims/{_quote(key)}", key)
        except NotFound:
            return b""

    async def unclaim(self, key: str) -> None:
        await self._delete(f"claims/{_quote(key)}")

    async def gc(self, keep: Collection[str] = (), grace: float = GRACE_S) -> Removed:
        """Remove layers without a name, a pin, a user, a descendant that stays or a place in ``keep``, and what broken uploads left;
        nothing that was written within ``grace`` seconds. Others may write, tag and fetch meanwhile."""
        from dsec.layers import collect

        self._check_writable()
        return await collect.collect(self, keep, grace)

    # --- objects ---------------------------------------------------------------------------------------------------

    def _check_writable(self) -> None:
        if not self.writable:
            raise Unsupported("a layer store over HTTP is for reading", field=objects.FIELD, value=self.url, fix="give its directory")

    async def _get(self, path: str, what: str) -> bytes:
        import obstore

        def get() -> bytes:
            with objects.errors(what):
                return bytes(obstore.get(self._store, path).bytes())

        return await tools.in_thread(get)

    async def _put(self, path: str, content: bytes | Path, *, new: bool = False) -> None:
        """``new``: only where nothing is yet, else `Conflict`."""
        import obstore

        self._check_writable()

        def put() -> None:
            with objects.errors(path):
                obstore.put(self._store, path, content, chunk_size=MULTIPART, mode="create" if new else "overwrite")

        await tools.in_thread(put)

    async def _delete(self, path: str) -> None:
        import obstore

        self._check_writable()

        def delete() -> None:
            with contextlib.suppress(NotFound), objects.errors(path):  # another one was quicker
                obstore.delete(self._store, path)

        await tools.in_thread(delete)

    async def _paths(self, prefix: str) -> Sequence[str]:
        return [row["path"] for row in await self._rows(prefix)]

    async def _rows(self, prefix: str) -> Sequence[Any]:
        import obstore

        if not self.writable:
            raise Unsupported("a layer store over HTTP cannot be listed", field=objects.FIELD, value=self.url, fix="give its directory")

        def rows() -> Sequence[Any]:
            with objects.errors(prefix):
                return [row for batch in obstore.list(self._store, prefix=prefix) for row in batch]

        return await tools.in_thread(rows)

    async def _newest(self, name: str) -> index.Entry | None:
        if not self.writable:
            try:
                return await self._entry(f"heads/{_quote(name)}.json")
            except NotFound:
                return None
        paths = await self._paths(f"names/{_quote(name)}/")
        return await self._entry(max(paths)) if paths else None

    async def _entry(self, path: str) -> index.Entry:
        return _decode(await self._get(path, path), index.Entry, path)

    async def _change(self, entry: index.Entry) -> None:
        data = msgspec.json.encode(entry)
        await self._put(f"names/{_quote(entry.name)}/{time.time_ns():020d}-{secrets.token_hex(4)}.json", data)
        await self._put(f"heads/{_quote(entry.name)}.json", data)


def _at(digest: str) -> str:
    if not index.is_digest(digest):
        raise NotFound("not a layer's digest", field="layer", value=digest)
    return "layers/" + digest.removeprefix("sha256:")


def _quote(name: str) -> str:
    """A name as one part of an object's path, in characters that every store takes."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda found: f"={ord(found[0]):02X}", name)


def _unquote(part: str) -> str:
    return re.sub(r"=([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), part)


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, DsecError) as error:
        raise NodeError(f"the layer store holds a damaged object: {error}", field="layer", value=what, retryable=False) from error
