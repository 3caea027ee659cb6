"""Whole trees as streamed tars: packed and unpacked inside by the guest, here by a thread; memory does not grow with the tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dsec import tar
from dsec.errors import Conflict, DsecError, InvalidRequest, NodeError, SandboxError
from libdsec import packing
from libdsec.bridge import Bridge, Closed
from libdsec.channel import PIECE, Channel

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

AGAIN = 3  # times that a download begins again
T = TypeVar("T")
Progress = Callable[[int, int], None]


class Unpacked(NamedTuple):
    """What arrived in the sandbox; ``notes`` say what was left out on purpose."""

    members: int
    bytes: int
    notes: tuple[str, ...]


async def unpack_inside(sandbox: Sandbox, user: str, pieces: AsyncIterable[bytes], target: str, owners: bool) -> Unpacked:
    """Send a tar to be unpacked into ``target``."""
    async with Channel(sandbox, ("dsec:unpack", target, "o" if owners else ""), user=user) as channel:
        problem: DsecError | None = None
        try:
            async for piece in pieces:
                await channel.send(piece)
            await channel.send_eof()
        except DsecError as error:
            problem = error  # its own words are better, if it has any
        said = b""
        while data := await channel.receive():
            said = (said + data)[:200]
        await channel.finish()
        if problem is not None:
            raise problem
        members, _, size = said.decode("ascii", "replace").partition(" ")
        if not (members.isdigit() and size.isdigit()):
            raise SandboxError("answered with something else than a count", field="path", value=target, sandbox=sandbox.id)
        return Unpacked(int(members), int(size), channel.notes)


async def pack_inside(sandbox: Sandbox, user: str, paths: Iterable[str], name: str, follow: bool) -> AsyncIterator[bytes]:
    """A tar of paths of the sandbox as it comes. The last piece is given only once the guest says that it is complete."""
    async with Channel(sandbox, ("dsec:pack", name, "f" if follow else "", *paths), user=user) as channel:
        held = b""
        while data := await channel.receive():
            if held:
                yield held
            held = data
        await channel.finish()
        for note in channel.notes:
            sandbox._wire.log.warning("client.left_out", sandbox=sandbox.id, what=note)
        if held:
            yield held


async def upload_tree(
    sandbox: Sandbox, user: str, source: Path, target: str, owners: bool, progress: Progress | None, name: str = "."
) -> int:
    """``source`` becomes ``name`` in the directory ``target``; "." is the directory itself."""
    bridge = Bridge()
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    seen = 0

    def tell(done: int) -> None:
        nonlocal seen
        if progress is not None and done - seen >= PIECE:
            seen = done
            loop.call_soon_threadsafe(progress, done, 0)

    def work() -> int:
        try:
            size = packing.pack(bridge.write, source, name, stop, tell)
            bridge.finish()
            return size
        except BaseException:
            bridge.leave()
            raise

    async def pieces() -> AsyncIterator[bytes]:
        while data := await bridge.get(PIECE):
            yield data

    packed = _thread(work)
    try:
        await unpack_inside(sandbox, user, pieces(), target, owners)
        size = await packed
        if progress is not None:
            progress(size, size)
        return size
    except Closed:
        return await packed  # raises what went wrong there
    finally:
        stop.set()
        bridge.leave()
        with contextlib.suppress(Exception, asyncio.CancelledError):  # told above, or its own end after ours
            await asyncio.shield(asyncio.wait_for(packed, 10))


async def download_tree(sandbox: Sandbox, user: str, source: str, target: Path, owners: bool, limit: int, progress: Progress | None) -> int:
    """Again from the beginning when the Edge died with pieces on their way: what is here already is replaced by the same."""
    for _ in range(AGAIN):
        try:
            return await _download_tree(sandbox, user, source, target, owners, limit, progress)
        except SandboxError as error:
            if error.reason != "gap":
                raise
    return await _download_tree(sandbox, user, source, target, owners, limit, progress)


async def _download_tree(
    sandbox: Sandbox, user: str, source: str, target: Path, owners: bool, limit: int, progress: Progress | None
) -> int:
    bridge = Bridge()
    stop = threading.Event()
    root = await asyncio.to_thread(_open_target, target)

    def work() -> tar.Done:
        try:
            rules = tar.Rules(owners=owners and os.geteuid() == 0, devices="skip", strict=True)
            return tar.unpack(bridge, root, rules=rules, limits=tar.Limits(bytes=limit), stop=stop)  # type: ignore[arg-type] # it has read()
        finally:
            bridge.leave()

    unpacked = _thread(work)
    came = 0
    try:
        try:
            async for data in pack_inside(sandbox, user, (source,), ".", follow=True):
                if unpacked.done():
                    break
                await bridge.put(data)
                came += len(data)
                if progress is not None:
                    progress(came, 0)
            bridge.finish()
            done = await unpacked
        except InvalidRequest as error:
            if error.field != "tar":
                raise
            message = f"sent an archive that is refused: {error.message}"
            raise SandboxError(message, field="name", value=error.value, sandbox=sandbox.id) from error
        for note in done.notes:
            sandbox._wire.log.warning("client.left_out", sandbox=sandbox.id, what=note)
        if progress is not None:
            progress(done.bytes, done.bytes)
        return done.bytes
    finally:
        stop.set()
        bridge.leave()
        with contextlib.suppress(Closed, DsecError, OSError, asyncio.CancelledError):  # told above, or its own end after ours
            await asyncio.shield(unpacked)
        os.close(root)


def _thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """As `asyncio.to_thread`, in a thread of its own: transfers that wait for each other must not fill the shared pool."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(NodeError("the local thread was ended") if isinstance(error, StopIteration) else error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as failure:  # noqa: BLE001 - handed over, whatever it is
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name="dsec-tar", daemon=True).start()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # read here, so that nothing is reported as unread
    return future


def _open_target(target: Path) -> int:
    target.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        fix = "download to a fresh directory"
        raise Conflict("is a link; a download does not follow links", field="target", value=str(target), fix=fix)
    return os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
