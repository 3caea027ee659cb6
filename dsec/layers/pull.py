"""Images of registries as layers of this node: one pull however many ask, and a failure that is remembered for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsec.errors import Denied, DsecError, InvalidRequest, Unavailable, Unsupported
from dsec.layers import oci, oci_lazy, oci_model, stargz
from dsec.layers.fetch import NodeLayers
from dsec.layers.oci_local import Source
from dsec.layers.registry import Registry
from dsec.layers.sharing import Sharing
from dsec.layers.store import LayerStore
from dsec.layers.tools import Progress, silent
from dsec.model import LayerRef

FAILURE_S = 20.0  # a failed pull is not tried again within this time
ANY = "*"


async def pull(
    store: LayerStore,
    image: str,
    name: str = "",
    *,
    limit: int = oci.COLLAPSE_LIMIT,
    progress: Progress = silent,
    share: oci.Share | None = None,
    lazily: oci.Lazily | None = None,
) -> LayerRef:
    """Bring an image of a registry into the store as the layer ``name`` (default: the image's own name, as given and in full).

    What the registry has now counts; when the store has that very image nothing is fetched but its manifest. Raises `InvalidRequest`,
    `NotFound` (no such image, or not for this machine), `Denied`, `Unavailable`, `Unsupported`, `NodeError`.
    """
    reference = oci_model.parse(image)
    names = (name,) if name else tuple(dict.fromkeys((image, str(reference))))
    progress(f"pulling {reference}")
    source = Registry(reference)
    try:
        async with store.staging() as stage:
            return await oci.take(store, source, names, stage, limit=limit, progress=progress, share=share, lazily=lazily)
    finally:
        await source.close()


class Job:
    """One pull under way. ``line``: the last thing that it said."""

    def __init__(self) -> None:
        self.line = "waiting for the registry"
        self.began = time.monotonic()
        self.task: asyncio.Task[LayerRef]

    def say(self, line: str) -> None:
        self.line = line


class Puller:
    """Pulls for the sandboxes of one Edge. ``registries``: hosts that may be asked ("*" any, none at all: no pulls). Where nodes share a
    layer store, what one of them has made of an image is every other's.

    ``told(what, image, detail)`` hears of beginnings, ends and failures, and of layers that are in the shared store.
    """

    def __init__(self, layers: NodeLayers, registries: Sequence[str], told: Callable[[str, str, str], None] | None = None) -> None:
        self.layers = layers
        self.store = layers.store
        self.sharing = Sharing(layers, lambda image, digest: self.told("image_shared", image, digest))
        self.registries = frozenset(registries)
        self.told = told or (lambda _what, _image, _detail: None)
        self._jobs: dict[str, Job] = {}
        self._failed: dict[str, tuple[float, DsecError]] = {}

    def wants(self, name: str) -> bool:
        """Whether a name that is in no store is an image that this node would pull. Raises `Denied` for a registry that it does not ask."""
        if not self.registries or not oci_model.looks_like_image(name):
            return False
        registry = oci_model.parse(name).registry
        if ANY not in self.registries and registry not in self.registries:
            raise Denied(
                f"this node does not pull images from {registry}", field="image", value=name, reason="registry", fix="see layers.registries"
            )
        return True

    def job(self, name: str) -> Job:
        """The pull of an image, begun now if it is not under way. Raises what a pull that failed a moment ago raised; a registry that
        cannot be reached fails all its images."""
        reference = oci_model.parse(name)
        key = str(reference)
        for what in (key, _host(reference.registry)):
            if (failure := self._failed.get(what)) is not None:
                if time.monotonic() - failure[0] < FAILURE_S:
                    raise failure[1]
                del self._failed[what]
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = Job()
            job.task = asyncio.ensure_future(self._pull(name, key, job))
            job.task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return job

    async def _pull(self, name: str, key: str, job: Job) -> LayerRef:
        self.told("image_pulling", key, "")
        try:
            ref = await pull(self.store, name, progress=job.say, share=self.sharing.obtain, lazily=self._lazily)
        except DsecError as error:
            unreachable = isinstance(error, Unavailable) and error.reason == "registry"
            self._failed[_host(oci_model.parse(name).registry) if unreachable else key] = (time.monotonic(), error)
            self.told("image_failed", key, str(error))
            raise
        finally:
            self._jobs.pop(key, None)
        self.told("image_pulled", key, f"{ref.digest[:19]} in {time.monotonic() - job.began:.1f} s")
        return ref

    async def _lazily(
        self, image: Source, found: oci_model.Manifest, digest: str, names: Sequence[str], stage: Path, progress: Progress
    ) -> LayerRef | None:
        """An image of eStargz layers is read out of its registry, unless nodes share a store: there it is converted, once for all."""
        if self.layers.remote is not None or not isinstance(image, Registry) or not stargz.offered(found.layers or []):
            return None
        if not await self.layers.can_be_lazy():
            return None
        try:
            return await oci_lazy.take(self.store, image, found, digest, names, stage, progress)
        except (Unsupported, InvalidRequest) as error:
            progress(f"fetched whole: {error}")
            return None

    async def close(self) -> None:
        """Give up what is under way; nothing of it stays."""
        tasks = [job.task for job in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sharing.close()


def _host(registry: str) -> str:
    """A key that no image has."""
    return f"//{registry}"
