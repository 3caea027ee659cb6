"""pack_diff of a container: freeze, draw its upper into an image, thaw; then hash, fsync and name what was drawn.

The upper is found as a descriptor of the sandbox's init (see launch.c): so it is there after any restart of Edge or holder, and gone
with the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from dsec import faults
from dsec.backends.base import Broken, LaunchPlan, PackOrder, Undone
from dsec.errors import DsecError, SandboxGone
from dsec.layers import diff, tools
from dsec.layers.index import check_name
from dsec.layers.store import LayerConfig, LayerInfo
from dsec.model import LayerRef, PackedLayer

if TYPE_CHECKING:
    from dsec.backends.instance import ContainerInstance

UPPER_FD = 4  # of the init: the upper's directory, read-only


class Shelf(Protocol):
    """What packing asks of the layer store."""

    def staging(self) -> AbstractAsyncContextManager[Path]: ...

    async def put_image(self, path: str | os.PathLike[str], name: str = "", meta: LayerInfo | None = None) -> LayerRef: ...


async def pack_upper(
    instance: ContainerInstance,
    shelf: Shelf,
    order: PackOrder,
    *,
    paused: bool,
    thawed: Callable[[], object],
    freeze: Callable[[bool], Awaitable[None]],
    find_init: Callable[[], int],
    still: Callable[[], Awaitable[None]] | None = None,
) -> PackedLayer:
    """See `Instance.pack_diff`. ``find_init`` answers the pid of the sandbox's init by its cgroup, 0 when it has ended (blocking).
    ``still`` is done first while it stands still."""
    check_name(order.name)
    common = diff.OWN_BUT_SHARED if order.processes else diff.OWN if order.whole else diff.SCRUB
    scrub = diff.compile_globs((*order.scrub, *common))
    plan = instance.plan
    ids = (plan.idmap.base, plan.idmap.count) if plan.idmap is not None else (0, 0)
    limits = diff.Limits(entries=order.max_entries, bytes=order.max_bytes)
    async with shelf.staging() as stage:
        upper = await asyncio.to_thread(_open_upper, instance.pid, plan.id, find_init)
        try:
            image = stage / "image"
            begun = time.perf_counter()
            drawing: asyncio.Future[diff.Drawn] | None = None
            stop = threading.Event()
            try:
                async with _standing_still(instance.id, paused, freeze):
                    if still is not None:
                        await still()
                    faults.reached("capture.frozen")
                    loop, read = asyncio.get_running_loop(), asyncio.Event()
                    job = tools.in_thread(
                        diff.draw,
                        upper,
                        str(image),
                        scrub=scrub,
                        limits=limits,
                        ids=ids,
                        stop=stop,
                        mark=_mark(order, plan),
                        read=lambda: loop.call_soon_threadsafe(read.set),
                    )
                    drawing = asyncio.ensure_future(job)
                    drawing.add_done_callback(lambda _: read.set())
                    await read.wait()
                frozen_ms = 0.0 if paused else (time.perf_counter() - begun) * 1e3
                thawed()
                drawn = await asyncio.shield(drawing)
                faults.reached("capture.drawn")
            finally:
                if drawing is not None and not drawing.done():  # we are cancelled, or it cannot be thawed
                    stop.set()
                    await _to_the_end(_outcome(drawing))
        finally:
            os.close(upper)
        if instance.has_ended:
            raise SandboxGone("has ended while it was packed", sandbox=plan.id)
        parents = tuple(layer.digest for layer in plan.lowers)
        own = LayerConfig(**msgspec.to_builtins(order.image)) if order.image is not None else LayerConfig()
        source = f"pack_diff of {plan.id} on {', '.join(layer.name for layer in plan.lowers)}"
        meta = LayerInfo(digest="", stored="erofs", size=0, source=source, at="/", parents=parents, config=own)
        if order.image is not None:
            meta = msgspec.structs.replace(meta, stack=parents)
        ref = await shelf.put_image(image, order.name, meta)
        faults.reached("capture.put")
    return PackedLayer(
        name=ref.name,
        digest=ref.digest,
        parents=parents,
        size=drawn.size,
        entries=drawn.entries,
        bytes=drawn.bytes,
        scrubbed=drawn.scrubbed,
        frozen_ms=round(frozen_ms, 2),
    )


@contextlib.asynccontextmanager
async def _standing_still(sandbox: str, paused: bool, freeze: Callable[[bool], Awaitable[None]]) -> AsyncIterator[None]:
    """Frozen inside the block, and thawed after it however it ends, cancelled or not."""
    if paused:
        yield
        return
    try:
        await freeze(True)
        yield
    finally:
        try:
            await _to_the_end(freeze(False))
        except DsecError as error:
            raise Broken(f"it cannot be thawed after packing: {error}", sandbox=sandbox) from error


async def _to_the_end(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def _mark(order: PackOrder, plan: LaunchPlan) -> bytes:
    """What makes an image's own layer a content of its own, so that two images that change the same files have a record each; and a
    checkpoint's, whose record keeps the layers that it stands on."""
    if order.image is None and not order.whole:
        return b""
    below = [layer.digest for layer in plan.lowers]
    return hashlib.sha256(msgspec.json.encode([below, order.image], order="deterministic")).hexdigest().encode()


async def _outcome(work: asyncio.Future[diff.Drawn]) -> None:
    await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


def _open_upper(pid: int, sandbox: str, find_init: Callable[[], int]) -> int:
    try:
        fd = os.open(f"/proc/{pid}/fd/{UPPER_FD}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        if find_init() != pid:
            raise SandboxGone("has ended", sandbox=sandbox) from error
        raise Undone("it was launched by an earlier version, which kept no way to its upper", sandbox=sandbox, retryable=False) from error
    except OSError as error:
        raise Undone(f"cannot reach the upper: {error}", sandbox=sandbox, retryable=False) from error
    if find_init() != pid:  # the number may have been used again before it was opened
        os.close(fd)
        raise SandboxGone("has ended", sandbox=sandbox)
    return fd
