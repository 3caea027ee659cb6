"""A layer's blob whose chunks are in a registry: `manifest.Origin` says where. For threads, as the loader has them.

oci://registry/repository@sha256:…      the compressed blob
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from dsec.errors import InvalidRequest
from dsec.layers import oci_model, stargz
from dsec.layers.manifest import Manifest, Origin
from dsec.layers.objects import REGISTRY
from dsec.layers.oci_model import Reference
from dsec.layers.registry import Registry

TRIES = 3
_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def url_of(reference: Reference, digest: str) -> str:
    """The URL of a blob of an image's repository."""
    return f"{REGISTRY}{reference.registry}/{reference.repository}@{digest}"


class BlobRange:
    """``of(offset, length)``: bytes of the uncompressed blob, not checked. Raises what `Registry` raises; `InvalidRequest` for damage.

    All share one event loop in a thread of its own, which ends with the process. Each has a connection and a token of its own.
    """

    def __init__(self, url: str, known: Manifest) -> None:
        if not isinstance(known.origin, Origin):
            raise InvalidRequest("a manifest that does not say where its chunks are", field="layer", value=url)
        self._known, self._origin = known, known.origin
        self._reference = oci_model.parse(url.removeprefix(REGISTRY))
        self._registry: Registry | None = None

    def __call__(self, offset: int, length: int) -> bytes:
        numbers = self._known.covering(offset, length)
        out = bytearray(length)
        if not numbers:
            return bytes(out)
        origin = self._origin
        first = min(origin.at[number] for number in numbers)
        data = _run(self._fetch(first, max(origin.until[number] for number in numbers) - first))
        for number in numbers:
            start, size = self._known.span(number)
            part = data[origin.at[number] - first : origin.until[number] - first]
            piece = stargz.inflate(part, origin.skip[number], size)
            if start >= offset and start + size <= offset + length:  # whole ones, as a filler asks for
                out[start - offset : start - offset + len(piece)] = piece
        return bytes(out)

    async def _fetch(self, start: int, length: int) -> bytes:
        if self._registry is None:
            self._registry = Registry(self._reference, tries=TRIES)
        return await self._registry.range(self._reference.digest, start, length)

    async def _close(self) -> bytes:
        if self._registry is not None:
            await self._registry.close()
        return b""

    def close(self) -> None:
        """End the connection."""
        _run(self._close())


def _run(work: Coroutine[Any, Any, bytes]) -> bytes:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="registry", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop).result()
