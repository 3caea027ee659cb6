"""This node's layers together with a remote store's: names resolve through both, content comes when it is needed.

A layer of the remote store arrives as its manifest and its metadata (a few MB); its blob is a sparse file. It is filled as it is read
(`lazy`, `loader`), under fanotify's pre-content events or through FUSE; where the kernel has neither it is fetched whole before it is
mounted. Names of this node's own come first; a name that came from the remote store is looked up there again, and means what it meant
while the store cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from dsec import syscalls
from dsec.errors import Conflict, DsecError, InvalidRequest, NodeError, NotFound, Unavailable
from dsec.layers import blobrange, fuse, index, manifest, mounts, objects, ranges, split, tools
from dsec.layers.chunks import Filler
from dsec.layers.lazy import being_filled
from dsec.layers.mounts import LayerMount, Lazy
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerConfig, LayerInfo, LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef

log = structlog.get_logger("dsec.layers")
RENEW_S = 3600.0  # how often a node says anew which layers of the remote store it has in part
FRESH_S = 5.0  # a name that the remote store gave is not asked for again within this time
PULL_THREADS = 6


def fanotify_trouble() -> str:
    """Why layers cannot be filled as they are read; "" when they can. Needs root, as loading does."""
    if syscalls.disabled("fanotify"):
        return "disabled by DSEC_DISABLE"
    try:
        fd = syscalls.fanotify_init(syscalls.FAN_CLASS_PRE_CONTENT | syscalls.FAN_CLOEXEC)
        try:
            with tempfile.NamedTemporaryFile(prefix="dsec-fanotify-") as file:
                syscalls.fanotify_mark(fd, syscalls.FAN_MARK_ADD, syscalls.FAN_PRE_ACCESS, file.name)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno != errno.EMFILE:  # one more group is not to be had now; the kernel has them
            return str(error)
    return ""


def way_to_load(on_demand: bool = True) -> tuple[Literal["fanotify", "fuse", "whole"], str]:
    """How layers come to this node, and why not in a better way; tries what it names. Needs root; blocks for some milliseconds."""
    if not on_demand:
        return "whole", "switched off in the configuration"
    if not (first := fanotify_trouble()):
        return "fanotify", ""
    try:
        fuse.attempt()
    except OSError as error:
        return "whole", f"fanotify: {first}; FUSE: {error}"
    return "fuse", f"fanotify: {first}"


class NodeLayers:
    """Layers as an Edge uses them. ``remote`` None: the node's store alone. ``cache``: bytes that fetched layers may take on disk, 0 =
    no limit; unused ones go first, least recently used first."""

    def __init__(
        self, store: LayerStore, remote: RemoteStore | None = None, *, cache: int = 0, lazy: bool = True, patience: float = 10.0
    ) -> None:
        self.store = store
        self.remote = remote
        self.cache = cache
        self.lazy = lazy
        self.patience = patience
        self.way: Literal["", "fanotify", "fuse", "whole"] = ""  # how layers come here, once that is known
        self.why_not_lazy = ""
        self.release: Callable[[str], Awaitable[bool]] | None = None  # asks the backend to unmount a layer; False while it is used
        self._asked: dict[str, float] = {}
        self._fetching: dict[str, asyncio.Task[LayerRef]] = {}
        self._pulling: dict[str, asyncio.Task[None]] = {}
        self._using: set[str] = set()

    # --- names -----------------------------------------------------------------------------------------------------

    def lookup(self, name: str) -> LayerRef:
        """`LayerStore.lookup`: what `ensure` has brought is there."""
        return self.store.lookup(name)

    async def config(self, digest: str) -> LayerConfig:
        return await self.store.config(digest)

    def staging(self) -> contextlib.AbstractAsyncContextManager[Path]:
        return self.store.staging()

    async def put_image(self, path: str | os.PathLike[str], name: str = "", meta: LayerInfo | None = None) -> LayerRef:
        return await self.store.put_image(path, name, meta)

    async def ensure(self, names: Iterable[str]) -> None:
        """Bring what these names mean to this node, as far as a mount needs it. Names that neither store knows stay unknown: `lookup`
        says so. Raises `Unavailable`, `NodeError`."""
        if self.remote is not None:
            await asyncio.gather(*(self._ensure(name) for name in dict.fromkeys(names)))

    async def _ensure(self, name: str) -> None:
        if time.monotonic() - self._asked.get(name, -1e9) < FRESH_S:
            return
        try:
            info: LayerInfo | None = await self.store.info(name)
        except InvalidRequest:  # no layer's name; an image's in a registry, perhaps
            return
        except NotFound:
            info = None
        if info is not None and (not info.remote or index.is_digest(name)):
            return
        try:
            await self.fetch(name)
        except NotFound:
            return
        except Unavailable:
            if info is None:
                raise
        self._asked[name] = time.monotonic()

    def ask_again(self) -> None:
        """Something that was here a moment ago has gone: `ensure` looks for everything anew."""
        self._asked.clear()

    # --- content ---------------------------------------------------------------------------------------------------

    async def fetch(self, name: str, progress: Progress = silent) -> LayerRef:
        """Manifest and metadata of a layer of the remote store, and its name; several at once are one. Raises `NotFound`."""
        if self.remote is None:
            raise NodeError("no remote layer store is configured", field="layers.remote", fix="set layers.remote", retryable=False)
        task = self._fetching.get(name)
        if task is None:
            task = self._fetching[name] = asyncio.ensure_future(self._fetch(self.remote, name, progress))
            task.add_done_callback(lambda _: self._fetching.pop(name, None))
        return await asyncio.shield(task)

    async def _fetch(self, remote: RemoteStore, name: str, progress: Progress) -> LayerRef:
        digest = name if index.is_digest(name) else (await remote.resolve(name)).digest
        named = "" if index.is_digest(name) else name
        while True:
            try:
                await self.store.check(digest)
                if named:
                    await self.store.tag(named, digest)
            except (NotFound, NodeError):
                # With its name at once: one that has none is the gc's, who may have taken it just now.
                await self._receive(remote, digest, named, progress)
            with contextlib.suppress(NotFound):
                stack = (await self.store.info(digest)).stack
                break
        for below in stack:  # an image too large for one layer
            await self._fetch(remote, below, progress)
        return LayerRef(name=name, digest=digest)

    async def _receive(self, remote: RemoteStore, digest: str, name: str, progress: Progress) -> None:
        await self._use(remote, digest)  # before its record is read: see `RemoteStore.use`
        data, meta, info, ahead = await asyncio.gather(
            remote.manifest(digest), remote.meta_bytes(digest), remote.info(digest), remote.ahead(digest)
        )
        known = manifest.decode(data, digest)
        remote.check_meta(digest, known, meta)
        await self.evict(room=known.total)
        record = msgspec.structs.replace(info, remote=remote.url, names=())
        hint = manifest.ahead(ahead, len(known.chunks))
        await self.store.put_fetched(meta, data, name, record, msgspec.json.encode(hint) if hint else b"")
        progress(f"{digest[:19]}: {known.meta_size / 1e6:.1f} MB of metadata here, {known.size / 1e6:.1f} MB when they are read")

    async def _use(self, remote: RemoteStore, digest: str) -> None:
        """Keep the store's gc away from a layer of which this node will want more. Who may only read there cannot say so."""
        if not remote.writable:
            return
        try:
            await remote.use(digest, await tools.in_thread(self._node))
        except NodeError as error:
            if error.reason not in ("credentials", "http_405"):
                raise
            log.warning("layer.use_not_recorded", layer=digest, why=str(error))
        else:
            self._using.add(digest)

    def _node(self) -> str:
        """What this store is called in the remote one; made once."""
        path = self.store.root / "node"
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            file.write(secrets.token_hex(8))
        return path.read_text() or "unnamed"

    async def keep_used(self) -> None:
        """Say again and again which layers are here in part, so that the remote store keeps them, and when they no longer are. Runs until
        it is cancelled."""
        while self.remote is not None:
            try:
                await self.renew_used(self.remote)
            except DsecError as error:
                log.warning("layer.use_not_recorded", why=str(error))
            await asyncio.sleep(RENEW_S)

    async def renew_used(self, remote: RemoteStore) -> None:
        """One round of `keep_used`."""
        parts = {
            digest for digest in await tools.in_thread(self._partly_here) if (await self.store.info(digest)).remote in ("", remote.url)
        }
        for digest in parts:
            await self._use(remote, digest)
        for digest in self._using - parts:
            await remote.unuse(digest, await tools.in_thread(self._node))
            self._using.discard(digest)

    def _partly_here(self) -> list[str]:
        return [path.name.removesuffix(".data.map").replace("-", ":", 1) for path in (self.store.root / "blobs").glob("*.data.map")]

    def partial(self, digest: str) -> bool:
        """Whether chunks of this layer are still missing here."""
        return self.store.side(digest, ".data.map").exists()

    async def mount_plan(self, digest: str) -> LayerMount:
        """As `LayerStore.mount_plan`; a partly filled layer comes with where its chunks are, or is fetched whole first."""
        await tools.in_thread(self._used, digest)
        if self.partial(digest) and not await self.can_be_lazy():
            await self.pull(digest)
        plan = await self.store.mount_plan(digest)
        if not self.partial(digest):
            return plan
        if plan.kind == "dir" or (plan.kind == "erofs_loop" and self.way != "fuse"):
            await self.pull(digest)
            return await self.store.mount_plan(digest)
        info = await self.store.info(digest)
        ahead = self.store.side(digest, ".ahead")
        lazy = Lazy(
            way="fuse" if self.way == "fuse" else "fanotify",
            name=digest,
            remote=info.remote,
            manifest=str(self.store.side(digest, ".manifest")),
            patience=self.patience,
            touched=str(self.store.side(digest, ".touched")),
            ahead=await _hint(ahead) if ahead.exists() else (),
        )
        return msgspec.structs.replace(plan, lazy=lazy)

    async def can_be_lazy(self) -> bool:
        """Whether this node can fill layers as they are read; tried once."""
        if not self.way:
            self.way, self.why_not_lazy = await tools.in_thread(way_to_load, self.lazy)
        return self.way != "whole"

    def _used(self, digest: str) -> None:
        record = self.store.side(digest, ".json")
        if record.exists():
            os.utime(record)

    async def pull(self, digest: str, progress: Progress = silent) -> None:
        """Fetch what is missing of a layer; it is whole then. Raises `NodeError`, `Unavailable`."""
        task = self._pulling.get(digest)
        if task is None:
            task = self._pulling[digest] = asyncio.ensure_future(self._pull(digest, progress))
            task.add_done_callback(lambda _: self._pulling.pop(digest, None))
        await asyncio.shield(task)

    async def _pull(self, digest: str, progress: Progress) -> None:
        info = await self.store.info(digest)
        if not info.remote:
            raise NodeError("the layer is not whole, and its store is not known", field="layer", value=digest, retryable=False)
        started = time.monotonic()
        fetched = await tools.in_thread(self._fill, info)
        progress(f"{digest[:19]}: {fetched / 1e6:.1f} MB fetched in {time.monotonic() - started:.1f} s")

    def _fill(self, info: LayerInfo) -> int:
        """`fill` from where the layer came from."""
        digest = info.digest
        if info.remote.startswith(objects.REGISTRY):
            blob = blobrange.BlobRange(info.remote, manifest.load(self.store.side(digest, ".manifest"), digest))
            try:
                return fill(self.store, digest, blob)
            finally:
                blob.close()
        remote = self.remote if self.remote is not None and self.remote.url == info.remote else RemoteStore(info.remote)
        return fill(self.store, digest, lambda offset, size: remote.range_sync(digest, offset, size))

    # --- the cache -------------------------------------------------------------------------------------------------

    async def evict(self, room: int = 0, keep: Collection[str] = ()) -> tuple[str, ...]:
        """Remove fetched layers that nothing uses until ``room`` more bytes fit into the cache."""
        if not self.cache:
            return ()
        found = await tools.in_thread(self._fetched)
        used = sum(size for _, size, _ in found)
        gone = []
        for _, size, digest in sorted(found):
            if used + room <= self.cache:
                break
            if digest in keep or (self.release is not None and not await self.release(digest)):
                continue
            try:
                await self.store.remove(digest)
            except (Conflict, NotFound):  # a sandbox stands on it; or another process was quicker
                continue
            used -= size
            gone.append(digest)
            self.ask_again()  # the next create looks for its names
        return tuple(gone)

    def _fetched(self) -> list[tuple[float, int, str]]:
        """(last use, bytes on disk, digest) of the layers that came from a remote store."""
        rows = []
        for record in (self.store.root / "blobs").glob("*.json"):
            digest = record.stem.replace("-", ":", 1)
            try:
                info = msgspec.json.decode(record.read_bytes(), type=LayerInfo)
                if info.remote and not info.remote.startswith(
                    objects.REGISTRY
                ):  # a part of an image: only the image knows it, by its digest
                    size = sum(os.stat(self.store.side(digest, suffix)).st_blocks * 512 for suffix in (".erofs", ".data"))
                    rows.append((record.stat().st_mtime, size, digest))
            except (FileNotFoundError, msgspec.DecodeError):
                continue
        return rows


def fill(store: LayerStore, digest: str, fetch: Callable[[int, int], bytes]) -> int:
    """Fill a layer's blob to its end (blocking); returns the bytes fetched, 0 when a node's loader did it. (One that serves it through FUSE
    cannot be asked for all of it by reading; it learns of what we bring.)"""
    bitmap = store.side(digest, ".data.map")
    known = manifest.load(store.side(digest, ".manifest"), digest)

    def get(offset: int, length: int) -> bytes:
        try:
            return fetch(offset, length)
        except DsecError as error:
            raise OSError(5, str(error)) from error

    data = str(store.side(digest, ".data"))
    if not fuse.served(data) and being_filled(data):
        _read_through(store.side(digest, ".data"), bitmap)  # a node's loader serves it: reading is how it is asked for more
        return 0
    fd = os.open(store.side(digest, ".data"), os.O_RDWR | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(PULL_THREADS, "pull") as pool:
            filler = Filler(fd, known, str(bitmap), ranges.whole(get), pool, lambda: None)
            try:
                filler.fill_all()
            except OSError as error:
                raise NodeError(f"cannot fetch the layer: {error}", field="layer", value=digest) from error
            finally:
                with contextlib.suppress(OSError):  # a full disk: what the bitmap does not say is fetched again
                    filler.close()
            return filler.fetched
    finally:
        os.close(fd)


def _read_through(data: Path, bitmap: Path) -> None:
    """Read a marked blob from begin to end: its loader fills it. Raises `NodeError` when that does not complete it."""
    end = time.monotonic() + 5.0
    try:
        with open(data, "rb") as file:
            while file.read(1 << 22):
                end = time.monotonic() + 5.0
    except OSError as error:
        raise NodeError(f"the layer's loader cannot fetch it: {error}", field="layer") from error
    while bitmap.exists():
        if time.monotonic() > end:
            raise NodeError("the layer's loader did not complete it", field="layer", value=str(data))
        time.sleep(0.02)


async def push(
    store: LayerStore, remote: RemoteStore, name: str, tag: str = "", progress: Progress = silent, *, done: dict[str, str] | None = None
) -> LayerRef:
    """Upload a layer of this node and let ``tag`` (default: its name) mean it there. One that is stored in another form is split first;
    its recorded first reads go with it. ``done``: layers that this push has uploaded already, and their digests there. Raises `NotFound`,
    `NodeError`, `Unavailable`, `Unsupported`."""
    done = {} if done is None else done
    ref = await split.split(store, name, progress)
    if store.side(ref.digest, ".data.map").exists():
        raise NodeError("the layer is not whole here", field="layer", value=name, fix="fetch it with `dsec layer fetch`", retryable=False)
    plan = await store.mount_plan(ref.digest)
    pin = mounts.pin_layer(plan)
    try:
        info = await store.info(ref.digest)
        for digest in reversed(info.stack):  # what always goes below it comes along, and is split too; each once, though each has a stack
            if digest not in done:
                done[digest] = (await push(store, remote, digest, "", progress, done=done)).digest
        info = msgspec.structs.replace(info, stack=tuple(done[digest] for digest in info.stack))
        known = await tools.read(store.side(ref.digest, ".manifest"))
        fresh = await remote.put(known, store.side(ref.digest, ".erofs"), store.side(ref.digest, ".data"), info)
    finally:
        os.close(pin)
    progress(f"{ref.digest[:19]} {'uploaded' if fresh else 'was there already'}")
    await push_touched(store, remote, ref.digest)
    tag = tag or name
    if not index.is_digest(tag) and not index.is_short_digest(tag):
        await remote.tag(tag, ref.digest)
    return LayerRef(name=tag, digest=ref.digest)


async def _hint(path: Path) -> tuple[int, ...]:
    """A prefetch list; () of a file that a power cut has spoilt."""
    try:
        return manifest.ahead(msgspec.json.decode(await tools.read(path), type=list[int]))
    except msgspec.DecodeError:
        return ()


async def push_touched(store: LayerStore, remote: RemoteStore, digest: str) -> int:
    """Upload the recorded order of first reads, for other nodes to fetch ahead; the number of chunks."""
    path = store.side(digest, ".touched")
    if not path.exists():
        return 0
    chunks = msgspec.json.decode(await tools.read(path), type=list[int])
    await remote.put_ahead(digest, chunks)
    return len(chunks)
