"""One conversion of an image for all nodes that share a layer store.

The node that has to convert an image first claims it in the store, converts, and lets its sandboxes start; then it uploads what it
made, beside which image it was. The others wait for that, and start on metadata alone: their data comes when it is read. An image is
known by what its configuration says, which names the digests of its uncompressed layers: the same image from another registry, or
compressed otherwise, is the same one.

A claim is an object that only one can make. Its holder writes it anew every few seconds; one that nobody has written for a while is a
dead node's, and is taken over. Should two nodes convert after all (a holder that was only slow), the result is the same layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from dsec.errors import DsecError, NodeError, NotFound, Unavailable
from dsec.layers import erofs
from dsec.layers.fetch import NodeLayers, push
from dsec.layers.remote import RemoteStore
from dsec.layers.tools import Progress
from dsec.model import LayerRef

log = structlog.get_logger("dsec.layers")
RENEW_S = 3.0
STALE_S = 20.0  # a claim that stays as it is for so long is taken over
POLL_S = 0.5
SETTLE_S = 0.5  # between taking a claim over and believing it: another node may do the same


class Sharing:
    """Of one node. ``shared(name, digest)`` hears when a layer that was made here is in the store."""

    def __init__(self, layers: NodeLayers, shared: Callable[[str, str], None] = lambda _name, _digest: None) -> None:
        self.layers = layers
        self.shared = shared
        self._uploads: set[asyncio.Task[None]] = set()

    async def obtain(self, key: str, names: Sequence[str], convert: Callable[[], Awaitable[LayerRef]], progress: Progress) -> LayerRef:
        """The image as a layer of this node under ``names``: what another node has made of it, or what ``convert`` makes now.

        A store that cannot be reached, or only read, shares nothing: the image is then converted for this node alone. So it is without
        mkfs.erofs, which an upload takes. Raises what ``convert`` raises.
        """
        remote = self.layers.remote
        if remote is None:
            return await convert()
        shares = remote.writable and erofs.available()
        held = contextlib.AsyncExitStack()
        try:
            if shares:
                ref = await self._theirs(remote, key, names, held, progress)
            else:
                ref = await self._made(remote, key, names, progress)
        except (Unavailable, NodeError) as error:
            await held.aclose()
            progress(f"converted for this node alone: {error}")
            log.warning("image.not_shared", image=names[0], why=str(error))
            return await convert()
        except BaseException:
            await held.aclose()
            raise
        if ref is not None:
            return ref
        try:
            made = await convert()
        except BaseException:
            await held.aclose()
            raise
        if not shares:
            return made
        upload = asyncio.get_running_loop().create_task(self._share(remote, key, names, made, held))
        self._uploads.add(upload)
        upload.add_done_callback(self._uploads.discard)
        return made

    async def settle(self) -> None:
        """Wait for the uploads that are under way."""
        await asyncio.gather(*self._uploads, return_exceptions=True)

    async def close(self) -> None:
        """Give up uploads; another node takes their claims over."""
        for upload in self._uploads:
            upload.cancel()
        await self.settle()

    async def _theirs(
        self, remote: RemoteStore, key: str, names: Sequence[str], held: contextlib.AsyncExitStack, progress: Progress
    ) -> LayerRef | None:
        """Another node's layer, as soon as it is there; None when it is for this node to convert, which ``held`` then says to others."""
        token = secrets.token_bytes(12).hex().encode()
        seen, since = b"", time.monotonic()
        while True:
            if (ref := await self._made(remote, key, names, progress)) is not None:
                return ref
            if await remote.claim(key, token + b" 0") or (time.monotonic() - since > STALE_S and await _take_over(remote, key, token)):
                await held.enter_async_context(_holding(remote, key, token))
                # Who had the claim until now may have been done between the two looks.
                if (ref := await self._made(remote, key, names, progress)) is not None:
                    await held.aclose()
                return ref
            now = await remote.claimed(key)
            if now != seen:
                seen, since = now, time.monotonic()
            progress("another node converts the image")
            await asyncio.sleep(POLL_S)

    async def _made(self, remote: RemoteStore, key: str, names: Sequence[str], progress: Progress) -> LayerRef | None:
        """What the store has of the image; None where nobody has converted it, or where that was removed since."""
        try:
            digest = await remote.image(key)
            await self.layers.fetch(digest, progress)
        except NotFound:
            return None
        for name in names:
            await self.layers.store.tag(name, digest)
        progress(f"{names[0]} {digest[:19]}, converted by another node")
        return LayerRef(name=names[0], digest=digest)

    async def _share(self, remote: RemoteStore, key: str, names: Sequence[str], made: LayerRef, held: contextlib.AsyncExitStack) -> None:
        """Upload what was made here, say which image it is, and use the uploaded form here as well: it is what others have."""
        try:
            async with held:
                digest = (await push(self.layers.store, remote, made.digest)).digest
                await remote.put_image(key, digest)
                for name in names:
                    try:
                        await remote.resolve(name)  # what somebody has called so stays what it is
                    except NotFound:
                        await remote.tag(name, digest)
                    if (await self.layers.store.resolve(name)).digest == made.digest:
                        await self.layers.store.tag(name, digest)
        except DsecError as error:
            log.warning("image.not_shared", image=names[0], why=str(error))
        else:
            self.shared(names[0], digest)


async def _take_over(remote: RemoteStore, key: str, token: bytes) -> bool:
    """The last of several who do this at once has it."""
    await remote.renew(key, token + b" 0")
    await asyncio.sleep(SETTLE_S)
    return (await remote.claimed(key)).startswith(token)


@contextlib.asynccontextmanager
async def _holding(remote: RemoteStore, key: str, token: bytes) -> AsyncIterator[None]:
    """The claim is written anew as long as the block lasts, and taken away behind it."""

    async def beat() -> None:
        number = 0
        while True:
            await asyncio.sleep(RENEW_S)
            number += 1
            with contextlib.suppress(DsecError):  # the store's trouble: others see a claim that does not change
                await remote.renew(key, token + b" %d" % number)

    task = asyncio.get_running_loop().create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(DsecError):
            if (await remote.claimed(key)).startswith(token):
                await remote.unclaim(key)
