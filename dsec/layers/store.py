"""The node's layer store: a directory of content-addressed, immutable layers and the names that point at them.

    <root>/blobs/sha256-<hex>.erofs   one EROFS image (or <root>/blobs/sha256-<hex>.tree/, a plain directory where images cannot be made)
                                      (or <hex>.erofs + .data + .manifest, a split layer: manifest.py; .data.map while it is partly filled)
    <root>/blobs/sha256-<hex>.json    its record: size, where it came from, environment, workdir, user
    <root>/unpacked/sha256-<hex>/     an image unpacked for a kernel that cannot mount it
    <root>/names.jsonl                the names (index.py)
    <root>/tmp/                       work in progress; what a crash left there is removed by `gc`
    <root>/lock                       held for changes, never while data is written

A layer appears by rename after fsync, so it is whole or absent; two writers of the same content both succeed. Whoever uses a layer
holds a shared flock on it (`mounts.pin_layer`), which the kernel drops when the holder dies: `remove` and `gc` never take a layer
in use, in whatever process. Methods run their blocking parts in threads; `lookup` alone is synchronous and reads one small file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from dsec.errors import InvalidRequest, NodeError, NotFound
from dsec.layers import erofs, erofs_read, index, manifest, mounts, reclaim, tools
from dsec.layers.chunks import Filler
from dsec.layers.mounts import LayerMount
from dsec.layers.reclaim import SIDES, fsync, fsync_all, remove_tree
from dsec.layers.stack import close_matches
from dsec.model import LayerRef

Stored = Literal["erofs", "tree", "split"]
_SUFFIX = {"erofs": ".erofs", "tree": ".tree", "split": ".erofs"}


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a layer asks of the sandboxes that stand on it, recorded at import. The topmost layer that sets a field wins."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()  # of an OCI image: what it runs when nothing else is asked for
    cmd: tuple[str, ...] = ()


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One layer's record. ``size``: bytes of the image, or of the files of a plain tree."""

    digest: str
    stored: Stored
    size: int
    created_ts: float = 0.0
    source: str = ""  # what it was made from, without credentials
    recipe: str = ""  # hash of a bootstrap's inputs
    at: str = ""  # where the import put its tree
    parents: tuple[str, ...] = ()  # digests of the layers that it was made on, topmost first: it means what it should above these
    meta: int = 0  # bytes of a split layer's metadata image
    remote: str = ""  # URL of the store that it came from; such a layer may be evicted
    stack: tuple[str, ...] = ()  # digests that always go below it, topmost first: an image that was not made one layer
    config: LayerConfig = LayerConfig()
    names: tuple[str, ...] = ()  # filled by `list` and `info`; not stored here


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What `gc` freed, and what it would have freed but somebody uses it."""

    digests: tuple[str, ...] = ()
    bytes: int = 0
    in_use: tuple[str, ...] = ()


class LayerStore:
    """The store at ``root``, made when absent. Several processes may use one store at once.

    Raises `NodeError` when the directory cannot be made or written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._blobs = self.root / "blobs"
        self._tmp = self.root / "tmp"
        self._index = index.Index(str(self.root / "names.jsonl"))
        self._kind: tuple[mounts.Kind, str] | None = None
        try:
            for directory in (self._blobs, self._tmp, self.root / "unpacked"):
                directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError as error:
            raise NodeError(f"cannot make the layer store: {error}", field="layers.store_dir", value=str(root), retryable=False) from error

    # --- names -------------------------------------------------------------------------------------------------------

    def lookup(self, name: str) -> LayerRef:
        """What a name means now: ``debian-12``, ``repo@tag``, ``name:tag``, ``sha256:…`` (whole, or 12 digits and more).

        Raises `NotFound` with the names that may have been meant, `InvalidRequest` for what cannot be a name. Reads one small file.
        """
        if index.is_digest(name):
            if self._record(name).exists():
                return LayerRef(name=name, digest=name)
            raise NotFound("no layer has this digest", field="layer", value=name, fix=close_matches(name, self._index.names()))
        if index.is_short_digest(name):
            return LayerRef(name=name, digest=self._complete(name))
        digest = self._index.digest(index.check_name(name, "layer"))
        if digest is None:
            raise NotFound("no such layer", field="layer", value=name, fix=close_matches(name, self._index.names()))
        if not os.path.exists(self._record_path(digest)):
            raise NotFound(f"the layer's content {digest[:19]} is missing from the store", field="layer", value=name, fix="make it again")
        return LayerRef(name=name, digest=digest)

    async def resolve(self, name: str) -> LayerRef:
        """`lookup` in a thread."""
        return await tools.in_thread(self.lookup, name)

    async def tag(self, name: str, target: str) -> LayerRef:
        """Let ``name`` mean the layer that ``target`` (a name or digest) means now. Raises `NotFound`, `InvalidRequest`."""
        return await tools.in_thread(self._tag, name, target)

    async def untag(self, name: str) -> None:
        """Forget a name; the content stays until `gc`. Raises `NotFound`."""
        await tools.in_thread(self._untag, name)

    async def history(self, name: str) -> tuple[index.Entry, ...]:
        """What a name has meant, oldest first."""
        return await tools.in_thread(self._index.history, name)

    # --- content -----------------------------------------------------------------------------------------------------

    async def put_image(self, path: str | os.PathLike[str], name: str = "", meta: LayerInfo | None = None) -> LayerRef:
        """Take an EROFS image into the store (the file is moved when it lies in `staging`, else copied), and name it.

        ``meta`` supplies source, recipe, at and config; its digest, size and times are computed. Raises `InvalidRequest` when the
        file is no EROFS image, `NodeError` when the disk fails.
        """
        return await tools.in_thread(self._put_image, os.fspath(path), name, meta)

    async def put_tree(self, path: str | os.PathLike[str], name: str = "", meta: LayerInfo | None = None) -> LayerRef:
        """Take a directory inside `staging` as it is, for nodes without mkfs.erofs. It must hold nothing that is still written to."""
        return await tools.in_thread(self._put_tree, os.fspath(path), name, meta)

    async def put_split(
        self, meta: str | os.PathLike[str], data: str | os.PathLike[str] | None, known: bytes, name: str = "", info: LayerInfo | None = None
    ) -> LayerRef:
        """Take a split layer: two staged files and the manifest that names them. Without ``data`` the blob is made sparse and has no
        chunk yet. The files must be what the manifest says (whoever fetched or made them has checked). Raises `NodeError`."""
        return await tools.in_thread(self._put_split, Path(meta), Path(data) if data else None, known, name, info)

    async def put_fetched(self, meta: bytes, known: bytes, name: str, info: LayerInfo, ahead: bytes = b"") -> LayerRef:
        """`put_split` of metadata in memory, without a blob: a sandbox waits for it, so all is one visit to a thread. ``ahead``: what to
        fetch before it is read."""
        return await tools.in_thread(self._put_fetched, meta, known, name, info, ahead)

    def side(self, digest: str, suffix: str) -> Path:
        """A file of a split layer: ``.erofs``, ``.data``, ``.manifest``, ``.data.map`` or ``.touched``."""
        return self._blobs / (digest.replace(":", "-") + suffix)

    def pin(self, digest: str) -> int:
        """A descriptor that keeps the layer here while it is open: see `mounts.pin_layer`. Does not wait. Raises `NotFound`."""
        info = self._read_record(digest)
        with contextlib.suppress(OSError):
            fd = mounts.pin_layer(LayerMount(kind="erofs_file", source=str(self._blob(info))))
            if self._record(digest).exists():
                return fd
            os.close(fd)
        raise NotFound("the layer was just removed", field="layer", value=digest, fix="make it again")

    @contextlib.asynccontextmanager
    async def staging(self) -> AsyncIterator[Path]:
        """A private directory on the store's file system, removed at the end. One that a crash leaves is removed by `gc`."""
        made: list[tuple[Path, int]] = []
        try:
            await tools.in_thread(lambda: made.append(self._stage()))
            yield made[0][0]
        finally:
            for directory, lock in made:
                try:
                    await tools.in_thread(remove_tree, directory)
                finally:
                    os.close(lock)

    async def mount_plan(self, digest: str) -> LayerMount:
        """How the layer is mounted here: EROFS from its file, else by loop device, else a plain directory (unpacked on first use, not while
        the layer is partly filled).

        Needs the right to mount, as it tries (once a store). Raises `NotFound`, and `NodeError` when the content's size is not the
        recorded one (a truncated or replaced blob).
        """
        plan = await tools.in_thread(self._mount_plan, digest)
        if plan.kind == "dir" and not (os.path.exists(plan.source) or self.side(digest, ".data.map").exists()):
            await self._unpack(digest, plan.source)
        return plan

    def fallback(self) -> str:
        """Why layers are not mounted in the best way; "" when they are, or when none was mounted yet. For doctor and info."""
        return self._kind[1] if self._kind else ""

    async def info(self, name: str) -> LayerInfo:
        """The record of a layer given by name or digest, with its names. Raises `NotFound`."""
        return await tools.in_thread(self._info, name)

    async def config(self, digest: str) -> LayerConfig:
        """Environment, workdir and user recorded at import. Raises `NotFound`."""
        return (await self.info(digest)).config

    async def list(self) -> tuple[LayerInfo, ...]:
        """Every layer with its names, newest first."""
        return await tools.in_thread(self._list)

    async def content(self, name: str) -> Path:
        """Where the layer lies: its image (the metadata alone, when its data lies apart), or its tree. Raises `NotFound`."""
        return await tools.in_thread(lambda: self._blob(self._info(name)))

    async def check(self, name: str) -> LayerInfo:
        """That the content is there with its recorded size (no hashing). Raises `NotFound`, `NodeError`."""
        return await tools.in_thread(lambda: self._checked(self.lookup(name).digest))

    async def verify(self, name: str) -> LayerInfo:
        """Hash the content again. Raises `NodeError` when it is not what its name says."""
        return await tools.in_thread(self._verify, name)

    async def remove(self, name: str, pinned: Collection[str] = ()) -> LayerInfo:
        """Remove a layer and all its names. Raises `NotFound`, and `Conflict` while a node has it mounted or ``pinned`` names it."""
        return await tools.in_thread(reclaim.remove, self, name, frozenset(pinned))

    async def gc(self, pinned: Collection[str] = ()) -> Removed:
        """Remove the layers that have no name, are no named layer's ancestor, are not in ``pinned`` and are not in use, and what crashes
        left behind."""
        gone, freed, used = await tools.in_thread(reclaim.gc, self, frozenset(pinned))
        return Removed(digests=tuple(gone), bytes=freed, in_use=tuple(used))

    # --- blocking parts ----------------------------------------------------------------------------------------------

    def _record_path(self, digest: str) -> str:
        return f"{self._blobs}/{digest.replace(':', '-')}.json"

    def _record(self, digest: str) -> Path:
        return Path(self._record_path(digest))

    def _blob(self, info: LayerInfo) -> Path:
        return self._blobs / (info.digest.replace(":", "-") + _SUFFIX[info.stored])

    def _unpacked(self, digest: str) -> Path:
        return self.root / "unpacked" / digest.replace(":", "-")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.root / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _stage(self) -> tuple[Path, int]:
        with self._locked():  # gc must not see the directory before its lock
            directory = Path(tempfile.mkdtemp(prefix="stage-", dir=self._tmp))
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)  # says to gc that its owner lives
        return directory, fd

    def _complete(self, short: str) -> str:
        found = [path.stem.replace("-", ":", 1) for path in self._blobs.glob(short.replace(":", "-") + "*.json")]
        if len(found) == 1:
            return found[0]
        if found:
            raise InvalidRequest("the digest's beginning fits several layers", field="layer", value=short, fix="give more digits")
        raise NotFound("no layer has this digest", field="layer", value=short, fix=close_matches(short, self._index.names()))

    def _tag(self, name: str, target: str) -> LayerRef:
        index.check_name(name)
        with self._locked():
            digest = self.lookup(target).digest
            if self._index.names().get(name) != digest:
                self._index.append(index.Entry(op="tag", name=name, digest=digest))
        return LayerRef(name=name, digest=digest)

    def _untag(self, name: str) -> None:
        with self._locked():
            if name not in (names := self._index.names()):
                raise NotFound("no such layer name", field="name", value=name, fix=close_matches(name, names))
            self._index.append(index.Entry(op="untag", name=name))

    def _put_image(self, path: str, name: str, meta: LayerInfo | None) -> LayerRef:
        if not erofs.is_image(path):
            raise InvalidRequest("not an EROFS image", field="path", value=path, fix="import a directory or a tar instead")
        if Path(path).resolve().is_relative_to(self._tmp.resolve()):
            return self._put_staged(path, name, meta)
        directory, lock = self._stage()
        try:
            return self._put_staged(shutil.copyfile(path, directory / "image"), name, meta)
        finally:
            remove_tree(directory)
            os.close(lock)

    def _put_staged(self, path: str | Path, name: str, meta: LayerInfo | None) -> LayerRef:
        os.chmod(path, 0o444)
        with ThreadPoolExecutor(1) as other:  # the disk writes while the hash is computed
            written = other.submit(fsync, path)
            digest = erofs.file_digest(path)
            written.result()
        return self._publish(path, digest, "erofs", os.stat(path).st_size, name, meta)

    def _put_tree(self, path: str, name: str, meta: LayerInfo | None) -> LayerRef:
        if not Path(path).resolve().is_relative_to(self._tmp.resolve()):
            raise InvalidRequest("a tree must be staged first", field="path", value=path, fix="copy it into LayerStore.staging()")
        size = erofs.survey(path).bytes
        os.sync()  # a tree has no single file to fsync
        return self._publish(path, erofs.tree_digest(path), "tree", size, name, meta)

    def _put_split(self, meta: Path, data: Path | None, known: bytes, name: str, info: LayerInfo | None) -> LayerRef:
        digest = manifest.digest(known)
        found = manifest.decode(known, digest)
        record = info or LayerInfo(digest="", stored="split", size=0)
        record = msgspec.structs.replace(record, meta=found.meta_size)
        if data is not None:  # large: others need not wait for it
            fsync(data)

        def place(draft: Path) -> None:
            if self._record(digest).exists() and self.side(digest, ".data").exists() and self.side(digest, ".erofs").exists():
                fsync_all(draft, meta)
                return
            side = {suffix: self.side(digest, suffix) for suffix in SIDES}
            side[".manifest"].write_bytes(known)
            side[".data.map"].unlink(missing_ok=True)
            if data is not None:
                fsync_all(draft, meta, side[".manifest"])
                os.rename(data, side[".data"])
                return
            side[".data"].unlink(missing_ok=True)
            Filler.create(str(side[".data.map"]))
            fsync_all(draft, meta, side[".manifest"], self._blobs)  # the bitmap before the blob, which counts as whole without one
            with open(side[".data"], "wb") as file:
                file.truncate(found.size)  # no fsync: its size is checked with each use, and `_publish` syncs the directory

        return self._publish(meta, digest, "split", found.total, name, record, place)

    def _put_fetched(self, meta: bytes, known: bytes, name: str, info: LayerInfo, ahead: bytes) -> LayerRef:
        stage, lock = self._stage()
        try:
            (stage / "meta").write_bytes(meta)
            ref = self._put_split(stage / "meta", None, known, name, info)
            if ahead:
                self.side(manifest.digest(known), ".ahead").write_bytes(ahead)
            return ref
        finally:
            try:
                remove_tree(stage)
            finally:
                os.close(lock)

    def _publish(
        self,
        path: str | Path,
        digest: str,
        stored: Stored,
        size: int,
        name: str,
        meta: LayerInfo | None,
        place: Callable[[Path], None] = fsync,
    ) -> LayerRef:
        """``place`` puts what belongs to it beside it, under the same lock, and syncs it together with the record's draft."""
        if name:
            index.check_name(name)
        base = meta or LayerInfo(digest="", stored=stored, size=0)
        info = msgspec.structs.replace(base, digest=digest, stored=stored, size=size, created_ts=time.time(), names=())
        with self._locked():  # together, so that gc never sees the content without its name
            draft = self._draft_record(info)
            try:
                place(draft)
                same = self._same(info)
                if not same:
                    self._discard(info)
                    os.rename(path, self._blob(info))
                if not same or meta is not None:  # same content, made again: the newest record of how counts
                    os.rename(draft, self._record(digest))
                    fsync(self._blobs)
            finally:
                draft.unlink(missing_ok=True)
            if name and self._index.names().get(name) != digest:
                self._index.append(index.Entry(op="tag", name=name, digest=digest))
        return LayerRef(name=name or digest, digest=digest)

    def _same(self, info: LayerInfo) -> bool:
        """Is the same content there already, whole as far as its size tells? (A tree is published by one rename: there means whole.)"""
        blob = self._blob(info)
        if not blob.exists() or not self._record(info.digest).exists():
            return False
        return info.stored == "tree" or blob.stat().st_size == (info.meta or info.size)

    def _discard(self, info: LayerInfo) -> None:
        blob = self._blob(info)
        if blob.is_dir():
            remove_tree(self._to_trash(blob))

    def _to_trash(self, path: Path) -> Path:
        """Out of sight in one step; what a crash leaves is gc's."""
        grave = Path(tempfile.mkdtemp(prefix="trash-", dir=self._tmp))
        os.rename(path, grave / path.name)
        return grave

    def _draft_record(self, info: LayerInfo) -> Path:
        fd, temporary = tempfile.mkstemp(prefix="record-", dir=self._tmp)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(info))
            os.fchmod(fd, 0o644)
        return Path(temporary)

    def _read_record(self, digest: str) -> LayerInfo:
        try:
            return msgspec.json.decode(self._record(digest).read_bytes(), type=LayerInfo)
        except FileNotFoundError:
            raise NotFound("no layer has this digest", field="layer", value=digest, fix="`dsec layer list` shows them") from None
        except msgspec.DecodeError as error:
            raise NodeError(f"the layer's record is damaged: {error}", field="layer", value=digest, retryable=False) from error

    def _info(self, name: str) -> LayerInfo:
        digest = self.lookup(name).digest
        names = tuple(sorted(tag for tag, meant in self._index.names().items() if meant == digest))
        return msgspec.structs.replace(self._read_record(digest), names=names)

    def _list(self) -> tuple[LayerInfo, ...]:
        by_digest: dict[str, list[str]] = {}
        for name, digest in self._index.names().items():
            by_digest.setdefault(digest, []).append(name)
        found = []
        for path in self._blobs.glob("*.json"):
            with contextlib.suppress(NotFound):  # it went away meanwhile
                found.append(self._read_record(path.stem.replace("-", ":", 1)))
        found.sort(key=lambda info: (-info.created_ts, info.digest))
        return tuple(msgspec.structs.replace(info, names=tuple(sorted(by_digest.get(info.digest, ())))) for info in found)

    def _checked(self, digest: str) -> LayerInfo:
        info = self._read_record(digest)
        blob = self._blob(info)
        fix = "remove it with `dsec layer rm` and make it again"
        if not blob.exists():
            raise NodeError("the layer's content is missing", field="layer", value=digest, fix=fix, retryable=False)
        sizes = {blob: info.meta or info.size} if info.stored != "tree" else {}
        if info.stored == "split":
            sizes[self.side(digest, ".data")] = info.size - info.meta
        for path, size in sizes.items():
            if (actual := path.stat().st_size if path.exists() else 0) != size:
                raise NodeError(
                    f"the layer's image has {actual} bytes, {size} were recorded", field="layer", value=digest, fix=fix, retryable=False
                )
        return info

    def _mount_plan(self, digest: str) -> LayerMount:
        info = self._checked(digest)
        blob = self._blob(info)
        if info.stored == "tree":
            return LayerMount(kind="dir", source=str(blob))
        if self._kind is None:
            try:
                self._kind = self._probe(info)
            except OSError as error:  # not root, as a rule
                raise NodeError(f"cannot mount the layer: {error}", field="layer", value=digest, retryable=False) from error
        kind = self._kind[0]
        if kind == "dir":
            return LayerMount(kind="dir", source=str(self._unpacked(digest)))
        if info.stored == "split":
            return LayerMount(kind=kind, source=str(blob), devices=(str(self.side(digest, ".data")),), size=info.meta)
        return LayerMount(kind=kind, source=str(blob), size=info.size)

    def _probe(self, info: LayerInfo) -> tuple[mounts.Kind, str]:
        """With an empty blob instead of a split layer's own, which may be partly filled and is then mounted under a mark only."""
        if info.stored != "split":
            return mounts.probe(str(self._blob(info)))
        with tempfile.NamedTemporaryFile(dir=self._tmp, prefix="probe-") as blob:
            blob.truncate(info.size - info.meta)
            return mounts.probe(str(self._blob(info)), (blob.name,))

    async def _unpack(self, digest: str, target: str) -> None:
        image, data = self.side(digest, ".erofs"), self.side(digest, ".data")
        async with self.staging() as directory:
            await tools.in_thread(erofs_read.unpack, str(image), directory / "tree", str(data) if data.exists() else "")
            await tools.in_thread(self._place_unpacked, directory / "tree", target)

    def _place_unpacked(self, tree: Path, target: str) -> None:
        os.sync()
        with self._locked():
            if not os.path.exists(target):
                os.rename(tree, target)

    def _verify(self, name: str) -> LayerInfo:
        info = self._info(name)
        self._checked(info.digest)
        blob = str(self._blob(info))
        if info.stored == "split":
            if self.side(info.digest, ".data.map").exists():
                raise NodeError("the layer is not whole here yet", field="layer", value=info.digest, fix="fetch it with `dsec layer fetch`")
            known = manifest.load(self.side(info.digest, ".manifest"), info.digest)
            actual = info.digest if manifest.check(known, blob, self.side(info.digest, ".data")) else "something else"
        else:
            actual = erofs.file_digest(blob) if info.stored == "erofs" else erofs.tree_digest(blob)
        if actual != info.digest:
            raise NodeError(
                f"the layer's content was altered: it hashes to {actual}",
                field="layer",
                value=info.digest,
                fix="remove it with `dsec layer rm` and make it again",
                retryable=False,
            )
        return info
