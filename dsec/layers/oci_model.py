"""Names and documents of OCI images: references, manifests, the choice of a platform, what the configuration says. Pure.

After the OCI image and distribution specifications; Docker's own media types (schema 2) mean the same.
"""

from __future__ import annotations

import hashlib
import platform
import re

import msgspec

from dsec.errors import InvalidRequest, NotFound, Unsupported
from dsec.layers.store import LayerConfig

DOCKER_HUB = "docker.io"
MAX_DOCUMENT = 4 << 20  # of a manifest or configuration: the distribution specification's own limit for manifests
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
LAYER_TYPES = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
)
_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PATH = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HOST = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Reference(msgspec.Struct, frozen=True):
    """An image's name in full. ``tag`` or ``digest`` is set, or both: then the digest counts."""

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        """As Docker shows it: Docker Hub and its ``library/`` go without saying."""
        name = self.repository if self.registry == DOCKER_HUB else f"{self.registry}/{self.repository}"
        if self.registry == DOCKER_HUB:
            name = name.removeprefix("library/")
        return name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse(text: str) -> Reference:
    """``python:3.12``, ``ghcr.io/org/image@sha256:…``, ``localhost:5000/x``; without a tag ``latest``. Raises `InvalidRequest`."""
    fix = "such as python:3.12 or ghcr.io/org/image:tag"
    name, _, digest = text.partition("@")
    if digest and not _DIGEST.fullmatch(digest):
        raise InvalidRequest("not an image's digest", field="image", value=text, fix="sha256: and 64 hex digits")
    head, slash, rest = name.partition("/")
    if slash and ("." in head or ":" in head or head == "localhost"):
        registry, path = head, rest
    else:
        registry, path = DOCKER_HUB, name
    path, colon, tag = path.partition(":")
    if registry in ("index.docker.io", "registry-1.docker.io"):
        registry = DOCKER_HUB
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    if not _HOST.fullmatch(registry) or not _PATH.fullmatch(path) or len(path) > 255 or (colon and not _TAG.fullmatch(tag)):
        raise InvalidRequest("not an image's name", field="image", value=text, fix=fix)
    return Reference(registry, path, tag or ("" if digest else "latest"), digest)


def looks_like_image(name: str) -> bool:
    """Whether a layer's name that no store knows is one of an image: it has a tag, a digest or a registry. Never raises."""
    head, slash, _ = name.partition("/")
    named = slash != "" and ("." in head or ":" in head or head == "localhost")
    if not named and ":" not in name.rpartition("/")[2] and "@sha256:" not in name:
        return False
    if name.startswith("sha256:"):
        return False
    try:
        parse(name)
    except InvalidRequest:
        return False
    return True


class Platform(msgspec.Struct, frozen=True, omit_defaults=True):
    architecture: str = ""
    os: str = ""
    variant: str = ""


class Descriptor(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Points at a blob: its digest and size are checked when it arrives."""

    media_type: str = ""
    digest: str = ""
    size: int = 0
    urls: list[str] | None = None
    annotations: dict[str, str] | None = None
    platform: Platform | None = None


class Manifest(msgspec.Struct, frozen=True, rename="camel"):
    """An image manifest or an index: which one, its fields tell."""

    schema_version: int = 0
    media_type: str = ""
    artifact_type: str = ""
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None
    manifests: list[Descriptor] | None = None


class _ProcessConfig(msgspec.Struct, frozen=True):
    Env: list[str] | None = None
    WorkingDir: str | None = ""
    User: str | None = ""
    Entrypoint: list[str] | None = None
    Cmd: list[str] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str] | None = None


class ImageConfig(msgspec.Struct, frozen=True):
    """The part of an image's configuration that matters here."""

    architecture: str = ""
    os: str = ""
    config: _ProcessConfig | None = None
    rootfs: _RootFs | None = None


def digest_of(data: bytes | memoryview) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_digest(text: str) -> str:
    """Raises `InvalidRequest` for anything but sha256: it becomes part of paths and addresses."""
    if not _DIGEST.fullmatch(text):
        raise InvalidRequest("not a sha256 digest", field="image", value=text, fix="sha256 is the only kind that is taken")
    return text


def read_manifest(data: bytes, media_type: str = "") -> Manifest:
    """Raises `InvalidRequest` for what is none, `Unsupported` for schema 1."""
    try:
        found = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not an image manifest: {error}", field="image") from None
    if found.schema_version == 1 or (found.media_type or media_type).startswith(_SCHEMA_1):
        raise Unsupported("the image has a manifest of schema 1", reason="schema 1", fix="push it again with a current tool")
    if found.manifests is None and (found.config is None or found.layers is None):
        raise InvalidRequest("a manifest without configuration and layers", field="image")
    for blob in (*(found.layers or ()), *(found.manifests or ()), *((found.config,) if found.config else ())):
        check_digest(blob.digest)
        if blob.size < 0:
            raise InvalidRequest("a blob of negative size", field="image", value=blob.digest)
    return found


def check_layers(manifest: Manifest) -> list[Descriptor]:
    """An image's layers, bottom first. Raises `Unsupported` for an artifact that is no image."""
    layers = manifest.layers or []
    for layer in layers:
        if layer.media_type and not layer.media_type.startswith(LAYER_TYPES):
            raise Unsupported("not an image of files", field="image", value=layer.media_type, reason="a layer of unknown type")
        if layer.urls:
            raise Unsupported("a layer that lies elsewhere", field="image", value=layer.media_type, reason="foreign layer")
    return layers


def diff_ids(image: ImageConfig, layers: int) -> list[str]:
    """The digests of the uncompressed layers, bottom first; "" for each where the configuration gives none (very old images).

    Raises `InvalidRequest` when they do not fit the manifest.
    """
    found = (image.rootfs.diff_ids if image.rootfs else None) or []
    if not found:
        return [""] * layers
    if len(found) != layers:
        raise InvalidRequest(f"the image's configuration tells of {len(found)} layers, its manifest of {layers}", field="image")
    return [check_digest(digest) for digest in found]


def choose(index: Manifest, machine: str = "") -> Descriptor:
    """The entry of an index for this machine: linux, its architecture; with several variants the first. Raises `NotFound`."""
    wanted = ARCHITECTURES.get(machine or platform.machine(), machine or platform.machine())
    seen: list[str] = []
    for entry in index.manifests or []:
        # Entries without a platform are images all the same (a layout of one image); attestations say unknown/unknown.
        where = entry.platform or Platform()
        if where.architecture in ("", wanted) and where.os in ("", "linux"):
            return entry
        seen.append(f"{where.os}/{where.architecture}{'/' if where.variant else ''}{where.variant}")
    raise NotFound(
        f"the image is not there for linux/{wanted}",
        field="image",
        value=", ".join(sorted(set(seen) - {"unknown/unknown"})),
        reason="platform",
    )


def layer_config(image: ImageConfig) -> tuple[LayerConfig, list[str]]:
    """What sandboxes take from the image's configuration, and notes of what cannot be taken."""
    process = image.config or _ProcessConfig()
    env: dict[str, str] = {}
    notes: list[str] = []
    for line in process.Env or []:
        name, _, value = line.partition("=")
        if _ENV_NAME.fullmatch(name) and "\0" not in value:
            env[name] = value
        else:
            notes.append(f"variable {name!r} left out: no usable name")
    workdir = process.WorkingDir or ""
    if workdir and not workdir.startswith("/"):
        workdir = "/" + workdir
    if ".." in workdir.split("/"):
        notes.append(f"working directory {workdir!r} left out")
        workdir = ""
    command = (tuple(process.Entrypoint or ()), tuple(process.Cmd or ()))
    return LayerConfig(env=env, workdir=workdir, user=process.User or "", entrypoint=command[0], cmd=command[1]), notes


def read_config(data: bytes) -> ImageConfig:
    """Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(data, type=ImageConfig)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not an image's configuration: {error}", field="image") from None
