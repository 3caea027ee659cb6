"""Images that lie on a disk: `oci-layout` directories, `docker save` and `oci-archive` tars."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from dsec import syscalls
from dsec.errors import InvalidRequest, NotFound
from dsec.layers import erofs, oci_model, tools, untar
from dsec.layers.oci_model import MAX_DOCUMENT, Descriptor, Manifest

T = TypeVar("T")
_REF_NAME = "org.opencontainers.image.ref.name"
_FULL_NAME = "io.containerd.image.name"


class Source(Protocol):
    """Where an image comes from."""

    @property
    def label(self) -> str:
        """What the layer's record says that it was made from."""
        ...

    async def manifest(self) -> tuple[Manifest, str]:
        """The image's manifest for this machine, and its digest."""
        ...

    async def document(self, blob: Descriptor) -> bytes:
        """A small blob, checked."""
        ...

    async def read(self, blob: Descriptor, work: Callable[[BinaryIO], T]) -> T:
        """What ``work`` returns, in a thread, of a layer's blob as it comes; only when it is what its digest says."""
        ...

    async def close(self) -> None: ...


class _DockerEntry(msgspec.Struct, frozen=True):
    """One image of a `docker save`."""

    Config: str
    Layers: list[str]
    RepoTags: list[str] | None = None


class Layout:
    """A directory that holds an OCI layout or what `docker save` writes. ``wanted`` chooses one of several images by its tag."""

    def __init__(self, root: str, wanted: str = "", machine: str = "", label: str = "") -> None:
        self.root = os.path.abspath(root)
        self.wanted = wanted
        self.machine = machine
        self.label = label or f"oci {self.root}"
        self._files: dict[str, str] = {}  # of `docker save`: a digest's file
        self._directory = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    async def manifest(self) -> tuple[Manifest, str]:
        return await tools.in_thread(self._manifest)

    async def document(self, blob: Descriptor) -> bytes:
        return await tools.in_thread(self._document, blob)

    async def read(self, blob: Descriptor, work: Callable[[BinaryIO], T]) -> T:
        def run() -> T:
            with open(self._checked(blob), "rb") as file:
                return work(file)

        return await tools.in_thread(run)

    async def close(self) -> None:
        os.close(self._directory)

    # --- blocking parts ----------------------------------------------------------------------------------------------

    def _manifest(self) -> tuple[Manifest, str]:
        if self._has("index.json"):
            index = oci_model.read_manifest(self._read("index.json"))
            entry = self._select(index)
            for _ in range(4):  # an index may name another one
                data = self._document(entry)
                found = oci_model.read_manifest(data, entry.media_type)
                if found.manifests is None:
                    return found, entry.digest
                entry = oci_model.choose(found, self.machine)
            raise InvalidRequest("an index of indexes without end", field="image", value=self.root)
        if self._has("manifest.json"):
            return self._docker()
        raise InvalidRequest(
            "neither an OCI layout nor a docker save", field="source", value=self.root, fix="it needs index.json or manifest.json"
        )

    def _select(self, index: Manifest) -> Descriptor:
        entries = index.manifests or []
        names = [(entry.annotations or {}) for entry in entries]
        if self.wanted:
            for entry, name in zip(entries, names, strict=True):
                if self.wanted in (name.get(_REF_NAME), name.get(_FULL_NAME)):
                    return entry
            known = ", ".join(name.get(_REF_NAME, "?") for name in names)
            raise NotFound("the layout has no such image", field="tag", value=self.wanted, fix=f"it has {known}")
        tags = {name.get(_REF_NAME, "") for name in names}
        if len(entries) > 1 and len(tags) > 1:
            raise InvalidRequest(
                "the layout has several images", field="source", value=self.root, fix=f"name one: {', '.join(sorted(tags))}"
            )
        return oci_model.choose(index, self.machine)

    def _docker(self) -> tuple[Manifest, str]:
        try:
            entries = msgspec.json.decode(self._read("manifest.json"), type=list[_DockerEntry])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"not a docker save: {error}", field="source", value=self.root) from None
        chosen = [entry for entry in entries if not self.wanted or self.wanted in (entry.RepoTags or ())]
        if len(chosen) != 1:
            tags = ", ".join(tag for entry in entries for tag in entry.RepoTags or ())
            raise InvalidRequest(
                "the archive has several images, or not this one", field="source", value=self.wanted, fix=f"name one of {tags}"
            )
        blobs = [self._take(name) for name in (chosen[0].Config, *chosen[0].Layers)]
        return Manifest(schema_version=2, config=blobs[0], layers=blobs[1:]), blobs[0].digest

    def _take(self, name: str) -> Descriptor:
        """A file of `docker save`, which says no digests: it gets the one that it has."""
        path = self._path(name)
        digest = erofs.file_digest(path)
        self._files[digest] = name
        return Descriptor(digest=digest, size=os.stat(path).st_size)

    def _document(self, blob: Descriptor) -> bytes:
        if blob.size > MAX_DOCUMENT:
            raise InvalidRequest("a document of an image larger than 4 MiB", field="image", value=blob.digest)
        data = Path(self._checked(blob)).read_bytes()
        return data

    def _checked(self, blob: Descriptor) -> str:
        name = self._files.get(blob.digest)
        path = self._path(name if name is not None else f"blobs/sha256/{oci_model.check_digest(blob.digest).removeprefix('sha256:')}")
        if os.stat(path).st_size != blob.size or (name is None and erofs.file_digest(path) != blob.digest):
            raise InvalidRequest("a blob is not what its digest and size say", field="image", value=blob.digest, fix="make the image again")
        return path

    def _has(self, name: str) -> bool:
        return os.path.isfile(f"{self.root}/{name}")

    def _read(self, name: str) -> bytes:
        with open(self._path(name), "rb") as file:
            data = file.read(MAX_DOCUMENT + 1)
        if len(data) > MAX_DOCUMENT:
            raise InvalidRequest("a document of an image larger than 4 MiB", field="image", value=name)
        return data

    def _path(self, name: str) -> str:
        """A file's real path; links are followed inside of the directory only (`docker save` links equal layers)."""
        try:
            fd = syscalls.openat2(self._directory, name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest("the image lacks a file", field="image", value=name, fix="make it again") from error
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


async def open_archive(path: str, stage: Path, wanted: str = "", machine: str = "") -> Layout:
    """A tar with an image, unpacked into ``stage``. Raises as `untar.extract`."""
    target = stage / "archive"
    target.mkdir()
    stop = untar.Stop()
    work = asyncio.ensure_future(tools.in_thread(untar.extract, path, target, untar.Limits(members=100_000), stop, False))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([work])
        raise
    return Layout(str(target), wanted, machine, f"oci {os.path.abspath(path)}")
