"""Images made by hand as OCI layouts, and a real registry on loopback to serve them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from dsec.layers.oci_model import ARCHITECTURES

ARCH = ARCHITECTURES.get(platform.machine(), platform.machine())
OTHER = "arm64" if ARCH == "amd64" else "amd64"
Entry = tuple[str, bytes | str | None]  # name; content, "-> target", "= hard link", None for a directory


def tar_of(entries: Sequence[Entry | tarfile.TarInfo]) -> bytes:
    """A layer's tar; names as given, whiteouts included."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
                continue
            name, content = entry
            info = tarfile.TarInfo(name)
            info.mtime = 1_600_000_000
            info.mode = 0o755 if content is None or name.startswith("bin/") else 0o644
            if content is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            elif isinstance(content, str):
                info.type = tarfile.SYMTYPE if content.startswith("-> ") else tarfile.LNKTYPE
                info.linkname = content[3:] if content.startswith("-> ") else content[2:]
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tar_of_tree(tree: Path) -> bytes:
    """A directory as a layer's tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(tree, arcname=".")
    return out.getvalue()


class Layout:
    """An OCI layout in the making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs/sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.entries: list[dict[str, Any]] = []

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def image(
        self,
        tars: Sequence[bytes],
        tag: str = "latest",
        *,
        config: dict[str, Any] | None = None,
        architecture: str = ARCH,
        compress: str = "gzip",
        listed: bool = True,
        diff_ids: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Add an image; returns its descriptor."""
        layers = []
        for tar in tars:
            kind = "application/vnd.oci.image.layer.v1.tar"
            if compress == "gzip":
                layers.append(self.blob(gzip.compress(tar, 1, mtime=0), f"{kind}+gzip"))
            elif compress == "members":  # as pigz and eStargz write it
                middle = len(tar) // 2
                data = gzip.compress(tar[:middle], 1, mtime=0) + gzip.compress(tar[middle:], 9, mtime=0)
                layers.append(self.blob(data, f"{kind}+gzip"))
            elif compress == "zstd":
                done = subprocess.run(["zstd", "-q", "-1", "-c"], input=tar, capture_output=True, check=True)
                layers.append(self.blob(done.stdout, f"{kind}+zstd"))
            else:
                layers.append(self.blob(tar, kind))
        about = {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids or ["sha256:" + hashlib.sha256(tar).hexdigest() for tar in tars]},
        }
        blob = self.blob(json.dumps(about).encode(), "application/vnd.oci.image.config.v1+json")
        kind = "application/vnd.oci.image.manifest.v1+json"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": blob, "layers": layers}
        entry = self.blob(json.dumps(manifest).encode(), kind)
        entry["platform"] = {"architecture": architecture, "os": "linux"}
        if listed:
            self.listed(entry | {"annotations": {"org.opencontainers.image.ref.name": tag}})
        return entry

    def index(self, images: Sequence[dict[str, Any]], tag: str) -> dict[str, Any]:
        """An image of several architectures."""
        kind = "application/vnd.oci.image.index.v1+json"
        entry = self.blob(json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": list(images)}).encode(), kind)
        self.listed(entry | {"annotations": {"org.opencontainers.image.ref.name": tag}})
        return entry

    def listed(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.entries}))


class Served:
    """A layout as a registry in this process. ``log``: the (kind, digest or tag, Range) of each request; ``gate``, when set, is awaited
    before a layer is sent."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.log: list[tuple[str, str, str]] = []
        self.gate: asyncio.Event | None = None
        self.host = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/v2/{name:.+}/{kind:manifests|blobs}/{what}", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.host = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def layers(self) -> list[str]:
        """The digests of the layers that were asked for, in order."""
        known = self._layers()
        return [what for _, what, _ in self.log if what in known]

    def _layers(self) -> set[str]:
        blobs = self.layout.root / "blobs/sha256"
        manifests = [json.loads((blobs / entry["digest"][7:]).read_text()) for entry in self.layout.entries]
        return {layer["digest"] for manifest in manifests for layer in manifest.get("layers", ())}

    async def _get(self, request: web.Request) -> web.StreamResponse:
        kind, what = request.match_info["kind"], request.match_info["what"]
        self.log.append((kind, what, request.headers.get("Range", "")))
        media = "application/octet-stream"
        if kind == "manifests":
            found = [
                e for e in self.layout.entries if what in (e["digest"], e.get("annotations", {}).get("org.opencontainers.image.ref.name"))
            ]
            if not found:
                return web.Response(status=404)
            what, media = found[0]["digest"], found[0]["mediaType"]
        elif self.gate is not None and what in self._layers():
            await self.gate.wait()
        path = self.layout.root / "blobs/sha256" / what.removeprefix("sha256:")
        if not path.is_file():
            return web.Response(status=404)
        return web.FileResponse(path, headers={"Content-Type": media})


def bcrypt(password: str) -> str:
    """As `htpasswd -B` writes it, by the C library's own crypt."""
    crypt = ctypes.CDLL("libcrypt.so.1").crypt
    crypt.restype = ctypes.c_char_p
    found: bytes = crypt(password.encode(), b"$2b$05$" + b"abcdefghijklmnopqrstuu")
    return found.decode().replace("$2b$", "$2y$", 1)


@contextlib.contextmanager
def registry(place: Path, login: tuple[str, str] | None = None) -> Iterator[str]:
    """Debian's docker-registry on a free port of loopback; its host:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(place / "data")}},
        "http": {"addr": host},
    }
    if login is not None:
        user, password = login
        (place / "htpasswd").write_text(f"{user}:{bcrypt(password)}\n")
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(place / "htpasswd")}}
    (place / "config.yml").write_text(json.dumps(config))
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(place / "config.yml")], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 20
        while True:
            assert process.poll() is None, (place / "log").read_text()
            try:
                urllib.request.urlopen(f"http://{host}/v2/", timeout=1).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)
        yield host
    finally:
        process.kill()
        process.wait()


def push(layout: Path, tag: str, target: str, *options: str) -> None:
    """Copy an image of a layout into a registry with skopeo."""
    command = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false", *options]
    subprocess.run([*command, f"oci:{layout}:{tag}", f"docker://{target}"], check=True, capture_output=True)


def docker_config(place: Path, host: str, user: str, password: str) -> dict[str, str]:
    """What `docker login` leaves, as an environment."""
    place.mkdir(exist_ok=True)
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (place / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return {"DOCKER_CONFIG": str(place), "PATH": os.environ["PATH"]}


def tools_missing(*names: str) -> str:
    return ", ".join(name for name in names if shutil.which(name) is None)
