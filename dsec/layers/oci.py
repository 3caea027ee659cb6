"""An OCI image becomes a layer: its own layers unpacked one by one, laid over each other by the kernel, and written as one EROFS image.

Whiteouts (``.wh.name``) and opaque directories (``.wh..wh..opq``) are turned into overlayfs's own, so what they mean is decided by the
same code that a sandbox runs on. An image whose files are larger than ``limit`` stays as it is: one layer of ours for each of its own,
the topmost carrying the others in ``LayerInfo.stack``. The same image gives the same digest on every node.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import stat
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from dsec import syscalls, trees
from dsec.errors import InvalidRequest, NodeError, NotFound, Unsupported
from dsec.layers import diff, oci_model, tools, untar
from dsec.layers.index import check_name
from dsec.layers.oci_local import Layout, Source, open_archive
from dsec.layers.oci_model import Descriptor, Manifest
from dsec.layers.store import LayerInfo, LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef

COLLAPSE_LIMIT = 3 << 30
MAX_LAYERS = 127  # what Docker allows
PARALLEL = 3
_RECIPE = 2  # raised when the steps below change
_OPAQUE = ".wh..wh..opq"
_WHITEOUT = ".wh."
_NO_LIMITS = diff.Limits(entries=100_000_000, bytes=1 << 50)  # unpacking had its own


async def import_image(
    store: LayerStore,
    source: str | os.PathLike[str],
    name: str,
    *,
    tag: str = "",
    limit: int = COLLAPSE_LIMIT,
    progress: Progress = silent,
) -> LayerRef:
    """A layer from an OCI layout (directory), or a tar of `docker save` or of an OCI archive. ``tag`` chooses one of several images.

    Raises `NotFound`, `InvalidRequest` (damaged, not an image), `Unsupported`, `NodeError`.
    """
    check_name(name)
    path = os.path.abspath(source)
    if not os.path.exists(path):
        raise NotFound("no such image", field="source", value=path, fix="give an oci-layout directory or a tar of this node")
    async with store.staging() as stage:
        image = Layout(path, tag) if os.path.isdir(path) else await open_archive(path, stage, tag)
        try:
            return await take(store, image, (name,), stage, limit=limit, progress=progress)
        finally:
            await image.close()


Convert = Callable[[], Awaitable[LayerRef]]
Lazily = Callable[[Source, Manifest, str, Sequence[str], Path, Progress], Awaitable[LayerRef | None]]
Share = Callable[[str, Sequence[str], Convert, Progress], Awaitable[LayerRef]]


async def take(
    store: LayerStore,
    image: Source,
    names: Sequence[str],
    stage: Path,
    *,
    limit: int = COLLAPSE_LIMIT,
    progress: Progress = silent,
    share: Share | None = None,
    lazily: Lazily | None = None,
) -> LayerRef:
    """Bring an image into the store under ``names``. Nothing is done when it is there already, made the same way. ``share``: asks others
    for what they have made of it (`sharing`). ``lazily``: takes an image that can be read in parts, or does not."""
    manifest, digest = await image.manifest()
    assert manifest.config is not None
    if lazily is not None and (ref := await lazily(image, manifest, digest, names, stage, progress)) is not None:
        return ref
    # The configuration names the uncompressed layers, which are checked: how they are compressed, and where they lie, is all the same.
    recipe = hashlib.sha256(json.dumps([_RECIPE, manifest.config.digest, platform.machine(), limit]).encode()).hexdigest()
    if ready := await cached(store, recipe):
        progress(f"{names[0]} is up to date")
        for name in names:
            await store.tag(name, ready)
        return LayerRef(name=names[0], digest=ready)

    async def convert() -> LayerRef:
        return await _convert(store, image, manifest, names, stage, recipe, limit, progress)

    return await (convert() if share is None else share(recipe, names, convert, progress))


async def _convert(
    store: LayerStore, image: Source, manifest: Manifest, names: Sequence[str], stage: Path, recipe: str, limit: int, progress: Progress
) -> LayerRef:
    blobs = oci_model.check_layers(manifest)
    if len(blobs) > MAX_LAYERS:
        raise Unsupported(f"the image has {len(blobs)} layers", field="image", reason=f"more than {MAX_LAYERS}")
    assert manifest.config is not None
    about = oci_model.read_config(await image.document(manifest.config))
    config, notes = oci_model.layer_config(about)
    diff_ids = oci_model.diff_ids(about, len(blobs))
    for note in notes:
        progress(note)
    total = sum(blob.size for blob in blobs)
    progress(f"{len(blobs)} layers, {total / 1e6:.1f} MB compressed")
    stop = threading.Event()
    gate = asyncio.Semaphore(PARALLEL)
    state = {"bytes": 0, "left": len(blobs)}
    trees = [stage / f"tree-{number}" for number in range(len(blobs))]

    async def one(number: int, blob: Descriptor) -> untar.Done:
        async with gate:
            done = await image.read(blob, lambda stream: unpack_layer(stream, trees[number], stop, diff_ids[number]))
            state["left"] -= 1
            state["bytes"] += blob.size
            progress(f"layer {len(blobs) - state['left']} of {len(blobs)}, {state['bytes'] / 1e6:.1f} of {total / 1e6:.1f} MB")
            return done

    tasks = [asyncio.ensure_future(one(number, blob)) for number, blob in enumerate(blobs)]
    try:
        unpacked = await asyncio.gather(*tasks)
    except BaseException:
        stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    if not blobs:
        trees = [stage / "tree-0"]
        trees[0].mkdir(0o755)
    await tools.in_thread(_inherit, trees, [done.implicit for done in unpacked])
    meta = LayerInfo(
        digest="", stored="erofs", size=0, source=f"{image.label} {manifest.config.digest}", recipe=recipe, at="/", config=config
    )
    if len(trees) > 1 and sum(done.bytes for done in unpacked) > limit:
        ref = await _each(store, trees, stage, meta)
    else:
        ref = await _collapsed(store, trees, stage, meta)
    for name in names:
        await store.tag(name, ref.digest)
    progress(f"{names[0]} {ref.digest[:19]}")
    return LayerRef(name=names[0], digest=ref.digest)


async def cached(store: LayerStore, recipe: str) -> str:
    for info in await store.list():
        if info.recipe == recipe:
            try:
                await store.check(info.digest)
            except (NotFound, NodeError):
                return ""
            return info.digest
    return ""


async def _collapsed(store: LayerStore, trees: list[Path], stage: Path, meta: LayerInfo) -> LayerRef:
    image = stage / "image"
    # Two images of the same files may differ in what they say of them: each needs a record of its own.
    mark = hashlib.sha256(msgspec.json.encode(meta.config, order="deterministic")).hexdigest().encode()

    def write() -> None:
        fd = _lay_over(list(reversed(trees)), stage)
        try:
            diff.draw(fd, str(image), scrub=lambda _: False, limits=_NO_LIMITS, mark=mark)
        finally:
            os.close(fd)

    await tools.in_thread(write)
    return await store.put_image(image, "", meta)


async def stacked(store: LayerStore, digests: Sequence[str], stage: Path, meta: LayerInfo) -> LayerRef:
    """A layer without files that names those of an image, topmost first."""
    mark = stage / "mark"
    mark.mkdir(0o755)
    os.setxattr(mark, "trusted.dsec.image", meta.recipe.encode())
    os.utime(mark, (0, 0))
    await tools.in_thread(_draw_tree, mark, stage / "image-mark")
    record = msgspec.structs.replace(meta, parents=tuple(digests), stack=tuple(digests))
    return await store.put_image(stage / "image-mark", "", record)


async def _each(store: LayerStore, trees: list[Path], stage: Path, meta: LayerInfo) -> LayerRef:
    """A layer of ours for each of the image's, which other images may share, and one without files that names them all."""
    digests: list[str] = []
    for number, tree in enumerate(trees):
        image = stage / f"image-{number}"
        await tools.in_thread(_draw_tree, tree, image)
        source = f"{meta.source} layer {number + 1} of {len(trees)}"
        ref = await store.put_image(image, "", LayerInfo(digest="", stored="erofs", size=0, source=source, at="/"))
        digests = [ref.digest, *(digest for digest in digests if digest != ref.digest)]
    return await stacked(store, digests, stage, meta)


def _draw_tree(tree: Path, image: Path) -> None:
    fd = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        diff.draw(fd, str(image), scrub=lambda _: False, limits=_NO_LIMITS)
    finally:
        os.close(fd)


def _lay_over(trees: list[Path], stage: Path) -> int:
    """A descriptor of the trees laid over each other, topmost first. Blocking. Raises `Unsupported` where the kernel cannot."""
    if len(trees) == 1:
        return os.open(trees[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    readonly = syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NODEV
    options: list[tuple[str, str | int | None]] = [("lowerdir+", str(tree)) for tree in trees]
    try:
        try:
            return syscalls.new_mount("overlay", options, readonly)
        except OSError:  # before Linux 6.8
            place = stage / "merged"
            place.mkdir()
            text = ":".join(str(tree) for tree in trees)
            syscalls.mount("overlay", str(place), "overlay", syscalls.MS_RDONLY | syscalls.MS_NODEV, f"lowerdir={text}")
            try:
                return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            finally:
                syscalls.umount2(str(place), syscalls.MNT_DETACH)
    except OSError as error:
        raise Unsupported(
            f"the kernel cannot lay an image's layers over each other: {error}", reason="overlay", fix="run as root"
        ) from error


def unpack_layer(archive: BinaryIO, tree: Path, stop: threading.Event, diff_id: str = "", limits: untar.Limits | None = None) -> untar.Done:
    """One layer's tar as a directory with overlayfs's whiteouts. Blocking. Device nodes are left out. ``diff_id``: the digest that the
    image's configuration gives for what was compressed. Raises `InvalidRequest` when it is another one, and as `untar.extract`."""
    tree.mkdir(0o755)
    os.utime(tree, (0, 0))
    with untar.plain(archive) as stream:
        done = untar.extract(stream, tree, limits or untar.Limits(), stop, devices="skip")
        if diff_id and stream.digest != diff_id:
            raise InvalidRequest("a layer is not what the image's configuration says", field="image", value=diff_id, fix="make it again")
    convert_whiteouts(tree)
    # The root of an image is everybody's: a layer must not close it, and not every archive has an entry for it.
    os.chmod(tree, 0o755)
    os.chown(tree, 0, 0)
    os.utime(tree, (0, 0))
    return done


def _inherit(trees: Sequence[Path], implicit: Sequence[Sequence[str]]) -> None:
    """Directories that a layer's archive only implies are those of the layers below: in an overlay the topmost one's mode and owner count.
    Blocking."""
    for number, names in enumerate(implicit):
        for name in names:
            path = trees[number] / name
            if not path.is_dir() or path.is_symlink():
                continue
            for below in reversed(trees[:number]):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    status = os.lstat(below / name)
                    if stat.S_ISDIR(status.st_mode):
                        os.chown(path, status.st_uid, status.st_gid)
                        os.chmod(path, stat.S_IMODE(status.st_mode))
                        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
                        break
            else:
                os.utime(path, (0, 0))


def convert_whiteouts(tree: Path) -> None:
    """Replace what the image specification says in names by what overlayfs says in kinds and attributes. Blocking, needs root."""
    for parent, directories, files in os.walk(tree):
        marks = [name for name in files if name.startswith(_WHITEOUT)]
        odd = [name for name in directories if name.startswith(_WHITEOUT)]  # aufs's own
        if not marks and not odd:
            continue
        times = os.stat(parent)
        for name in odd:
            trees.remove(os.path.join(parent, name))
            directories.remove(name)
        for name in marks:
            os.unlink(os.path.join(parent, name))
            if name == _OPAQUE:
                os.setxattr(parent, "trusted.overlay.opaque", b"y")
            elif not name.startswith(".wh..wh.") and len(name) > len(_WHITEOUT):
                target = os.path.join(parent, name.removeprefix(_WHITEOUT))
                try:
                    kind = os.lstat(target).st_mode
                except FileNotFoundError:
                    os.mknod(target, stat.S_IFCHR | 0o000, 0)
                    os.utime(target, (0, 0))
                else:
                    if stat.S_ISDIR(kind):  # taken away, and made anew by this layer
                        os.setxattr(target, "trusted.overlay.opaque", b"y")
        os.utime(parent, ns=(times.st_mtime_ns, times.st_mtime_ns))
