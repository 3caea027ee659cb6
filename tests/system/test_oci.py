"""Container images as layers: layouts, archives, a real registry, and sandboxes that stand on them."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import secrets
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.errors import Denied, InvalidRequest, NodeError, NotFound, Unavailable
from dsec.layers import erofs_read, oci
from dsec.layers.oci_model import Descriptor, parse
from dsec.layers.pull import pull
from dsec.layers.registry import Registry
from dsec.layers.store import LayerStore
from dsec.trees import clear
from libdsec import Client
from tests.fixtures_backend import build_small_base
from tests.oci_box import OTHER, Layout, docker_config, push, registry, tar_of, tar_of_tree, tools_missing

pytestmark = [pytest.mark.needs("root")]

LOWER = tar_of(
    [
        *(("etc", None), ("etc/keep", b"keep"), ("etc/gone", b"gone"), ("opq", None), ("opq/old", b"old"), ("opq/sub", None)),
        *(("opq/sub/x", b"x"), ("again", None), ("again/old", b"1"), ("file-then-dir", b"f"), ("dir-then-link", None)),
        *(("dir-then-link/in", b"i"), ("l1", b"linked"), ("l2", "= l1"), ("abs", "-> /etc/keep"), ("var", None), ("var/x", b"x")),
    ]
)
UPPER = tar_of(
    [
        *(("etc/.wh.gone", b""), ("opq", None), ("opq/new", b"new"), ("opq/.wh..wh..opq", b""), (".wh.again", b""), ("again", None)),
        *(("again/new", b"2"), ("file-then-dir", None), ("file-then-dir/in", b"i"), ("dir-then-link", "-> etc"), (".wh.var", b"")),
        *((".wh..wh.plnk", None), ("etc/.wh.never-was", b"")),
    ]
)
MERGED = {
    "abs": "-> /etc/keep",
    "again/new": b"2",
    "dir-then-link": "-> etc",
    "etc/keep": b"keep",
    "file-then-dir/in": b"i",
    "l1": b"linked",
    "l2": b"linked",
    "opq/new": b"new",
}


def content(store: LayerStore, digest: str, place: Path) -> dict[str, Any]:
    """The files of a layer, unpacked."""
    erofs_read.unpack(str(asyncio.run(store.content(digest))), place)
    found: dict[str, Any] = {}
    for parent, directories, files in os.walk(place):
        for name in (*directories, *files):
            path = Path(parent, name)
            if path.is_symlink():
                found[str(path.relative_to(place))] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[str(path.relative_to(place))] = path.read_bytes()
    return found


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


@pytest.mark.parametrize("compress", ["gzip", "members", "zstd", ""])
def test_whiteouts_and_opaque_directories(store: LayerStore, tmp_path: Path, compress: str) -> None:
    """What a layer deletes or hides is gone from the image, what it makes anew is there, however it is compressed."""
    layout = Layout(tmp_path / "layout")
    layout.image([LOWER, UPPER], config={"Env": ["A=b"], "WorkingDir": "/w", "User": "7"}, compress=compress)
    ref = asyncio.run(oci.import_image(store, layout.root, "image"))
    assert content(store, ref.digest, tmp_path / "out") == MERGED
    assert (tmp_path / "out/etc").stat().st_mtime == 1_600_000_000, "the upper layer only implies it"
    assert (tmp_path / "out/l1").stat().st_ino == (tmp_path / "out/l2").stat().st_ino
    info = asyncio.run(store.info("image"))
    assert (info.config.env, info.config.workdir, info.config.user) == ({"A": "b"}, "/w", "7")
    again = asyncio.run(oci.import_image(LayerStore(tmp_path / "other"), layout.root, "image"))
    assert again.digest == ref.digest


def test_images_of_the_same_files_keep_their_own_configuration(store: LayerStore, tmp_path: Path) -> None:
    """Two images that differ in ENV alone are two layers, and the same image again is the same one."""
    layout = Layout(tmp_path / "layout")
    for tag in ("a", "b"):
        layout.image([LOWER], tag, config={"Env": [f"WHICH={tag}"]})
    for tag in ("a", "b", "a"):
        asyncio.run(oci.import_image(store, layout.root, f"image-{tag}", tag=tag))
    assert [asyncio.run(store.info(f"image-{tag}")).config.env["WHICH"] for tag in ("a", "b")] == ["a", "b"]


def test_a_large_image_keeps_its_layers(store: LayerStore, tmp_path: Path) -> None:
    """Above the limit an image stays one layer for each of its own, shared by images, and lies together when it is mounted."""
    layout = Layout(tmp_path / "layout")
    layout.image([LOWER, UPPER], "one")
    layout.image([LOWER, UPPER, tar_of([("more", b"more")])], "two")
    one = asyncio.run(oci.import_image(store, layout.root, "one", tag="one", limit=1))
    two = asyncio.run(oci.import_image(store, layout.root, "two", tag="two", limit=1))
    first, second = (asyncio.run(store.info(ref.digest)) for ref in (one, two))
    assert second.stack[1:] == first.stack
    assert asyncio.run(store.gc()).digests == ()
    trees = []
    for number, digest in enumerate(first.stack):
        content(store, digest, tmp_path / f"t{number}")
        trees.append(tmp_path / f"t{number}")
    fd = oci._lay_over(trees, tmp_path)
    try:
        assert sorted(os.listdir(f"/proc/self/fd/{fd}/")) == sorted({name.partition("/")[0] for name in MERGED})
        assert os.listdir(f"/proc/self/fd/{fd}/opq") == ["new"]
    finally:
        os.close(fd)


def docker_save(layout: Layout, entry: dict[str, Any], target: Path) -> None:
    """The archive that `docker save` of old made of an image."""
    manifest = json.loads((layout.root / "blobs/sha256" / entry["digest"][7:]).read_text())
    with tempfile.TemporaryDirectory() as folder, tarfile.open(target, "w") as archive:
        place = Path(folder)
        names = []
        for number, layer in enumerate(manifest["layers"]):
            (place / f"l{number}").mkdir()
            data = (layout.root / "blobs/sha256" / layer["digest"][7:]).read_bytes()
            (place / f"l{number}/layer.tar").write_bytes(gzip.decompress(data))
            names.append(f"l{number}/layer.tar")
        (place / "twice").mkdir()
        (place / "twice/layer.tar").symlink_to("../l0/layer.tar")  # as it writes equal layers
        names.insert(0, "twice/layer.tar")
        config = json.loads((layout.root / "blobs/sha256" / manifest["config"]["digest"][7:]).read_text())
        config["rootfs"]["diff_ids"].insert(0, config["rootfs"]["diff_ids"][0])
        (place / "config.json").write_text(json.dumps(config))
        (place / "manifest.json").write_text(json.dumps([{"Config": "config.json", "RepoTags": ["x:1"], "Layers": names}]))
        archive.add(place, arcname=".")


def test_archives(store: LayerStore, tmp_path: Path) -> None:
    """A tar of an OCI layout and one of `docker save` give the image as well."""
    layout = Layout(tmp_path / "layout")
    entry = layout.image([LOWER, UPPER])
    with tarfile.open(tmp_path / "oci.tar", "w") as archive:
        archive.add(layout.root, arcname=".")
    docker_save(layout, entry, tmp_path / "docker.tar")
    for name in ("oci", "docker"):
        ref = asyncio.run(oci.import_image(store, tmp_path / f"{name}.tar", name))
        assert content(store, ref.digest, tmp_path / f"out-{name}") == MERGED


def test_damaged_and_hostile_images(store: LayerStore, tmp_path: Path) -> None:
    """An altered blob, a layer that leaves its root, a link out of the layout, a missing architecture: typed errors, and nothing stays."""
    altered = Layout(tmp_path / "altered")
    entry = altered.image([LOWER])
    manifest = json.loads((altered.root / "blobs/sha256" / entry["digest"][7:]).read_text())
    blob = altered.root / "blobs/sha256" / manifest["layers"][0]["digest"][7:]
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    outside = Layout(tmp_path / "outside")
    outside.image([tar_of([("../out", b"x")])])
    linked = Layout(tmp_path / "linked")
    (tmp_path / "secret").write_bytes(b"{}")
    (linked.root / "index.json").symlink_to(tmp_path / "secret")
    lying = Layout(tmp_path / "lying")  # what other images share of it must not depend on what it says of itself
    lying.image([LOWER, UPPER], diff_ids=["sha256:" + hashlib.sha256(UPPER).hexdigest()] * 2)
    for layout in (altered, outside, linked, lying):
        with pytest.raises(InvalidRequest):
            asyncio.run(oci.import_image(store, layout.root, "x"))
    foreign = Layout(tmp_path / "foreign")
    foreign.image([LOWER], architecture=OTHER)
    for source, error in ((foreign.root, NotFound), (tmp_path / "none", NotFound), (tmp_path, InvalidRequest)):
        with pytest.raises(error):
            asyncio.run(oci.import_image(store, source, "x"))
    assert asyncio.run(store.list()) == ()
    assert not list((store.root / "tmp").iterdir())
    assert not (tmp_path / "out").exists()


def test_device_nodes_are_left_out(store: LayerStore, tmp_path: Path) -> None:
    """An image may hold device nodes; a layer does not."""
    node = tarfile.TarInfo("dev/null")
    node.type, node.devmajor, node.devminor = tarfile.CHRTYPE, 1, 3
    layout = Layout(tmp_path / "layout")
    layout.image([tar_of([("dev", None), node, ("a", b"a")])])
    ref = asyncio.run(oci.import_image(store, layout.root, "x"))
    assert content(store, ref.digest, tmp_path / "out") == {"a": b"a"}


# --- a real registry ---------------------------------------------------------------------------------------------------

needs_registry = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(tools_missing("docker-registry", "skopeo")), reason=f"not installed: {tools_missing('docker-registry', 'skopeo')}"
    ),
]


@pytest.fixture
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-login"))
    return ""


def real(test: Any) -> Any:
    for mark in needs_registry:
        test = mark(test)
    return test


@real
def test_pull_from_a_real_registry(store: LayerStore, tmp_path: Path, loopback: str) -> None:
    """By tag, by digest, of several architectures, gzip and zstd; the second pull fetches nothing; what is absent is told apart."""
    layout = Layout(tmp_path / "layout")
    layout.image([LOWER, UPPER], "plain")
    layout.image([LOWER, UPPER], "packed", compress="zstd")
    layout.index([layout.image([LOWER], architecture=OTHER, listed=False), layout.image([LOWER, UPPER], listed=False)], "both")
    layout.index([layout.image([LOWER], architecture=OTHER, listed=False)], "foreign")
    with registry(tmp_path) as host:
        for tag in ("plain", "packed", "both", "foreign"):
            push(layout.root, tag, f"{host}/team/app:{tag}", "--all")
        said: list[str] = []
        ref = asyncio.run(pull(store, f"{host}/team/app:plain", progress=said.append))
        assert content(store, ref.digest, tmp_path / "out") == MERGED
        assert any("layer 2 of 2" in line for line in said)
        assert asyncio.run(store.info(f"{host}/team/app:plain")).digest == ref.digest
        again: list[str] = []
        asyncio.run(pull(store, f"{host}/team/app:plain", progress=again.append))
        assert any("up to date" in line for line in again)
        for tag in ("packed", "both"):
            assert asyncio.run(pull(store, f"{host}/team/app:{tag}", f"by-{tag}")).digest == ref.digest
        digest = asyncio.run(_digest_of(f"{host}/team/app:plain"))
        assert asyncio.run(pull(store, f"{host}/team/app@{digest}", "by-digest")).digest == ref.digest
        for missing in ("team/app:nope", "team/other:plain", "team/app:foreign"):
            with pytest.raises(NotFound):
                asyncio.run(pull(store, f"{host}/{missing}"))
    with pytest.raises(Unavailable):
        asyncio.run(_digest_of(f"{host}/team/app:plain"))


async def _digest_of(image: str) -> str:
    source = Registry(parse(image), tries=2)
    try:
        return (await source.manifest())[1]
    finally:
        await source.close()


@real
def test_credentials_of_docker_login(store: LayerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that wants a login gets the one of Docker's configuration, and a wrong or absent one is `Denied`."""
    layout = Layout(tmp_path / "layout")
    layout.image([LOWER], "one")
    with registry(tmp_path, ("me", "secret")) as host:
        push(layout.root, "one", f"{host}/app:one", "--dest-creds", "me:secret")
        for number, password in enumerate(("", "wrong", "secret")):
            place = tmp_path / f"docker-{number}"
            monkeypatch.setenv("DOCKER_CONFIG", docker_config(place, host, "me", password)["DOCKER_CONFIG"] if password else str(place))
            if password == "secret":
                asyncio.run(pull(store, f"{host}/app:one"))
            else:
                with pytest.raises(Denied):
                    asyncio.run(pull(store, f"{host}/app:one"))


# --- a registry that misbehaves ------------------------------------------------------------------------------------------


class Unruly:
    """A registry of one blob that breaks off, lies, or is busy at first; it wants a token."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.requests: list[tuple[str, str]] = []
        self.behaviour = "good"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                headers = {}
                while (row := await reader.readline()).strip():
                    key, _, value = row.decode().partition(":")
                    headers[key.lower()] = value.strip()
                self.requests.append((path, headers.get("range", "")))
                await self.answer(path, headers, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        def send(status: str, body: bytes, *more: str, length: int | None = None) -> None:
            head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *more]
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)

        if self.behaviour in ("absent", "refuses"):
            send("404 Not Found" if self.behaviour == "absent" else "403 Forbidden", b"")
        elif path.startswith("/token"):
            send("200 OK", b'{"token": "T"}', "Content-Type: application/json")
        elif headers.get("authorization") != "Bearer T":
            send("401 Unauthorized", b"", f'WWW-Authenticate: Bearer realm="http://{headers["host"]}/token",service="s"')
        elif self.behaviour == "busy":
            self.behaviour = "good"
            send("429 Too Many Requests", b"", "Retry-After: 0")
        elif self.behaviour == "breaks":
            self.behaviour = "good"
            send("200 OK", self.data[: len(self.data) // 2], length=len(self.data))
            await writer.drain()
            writer.close()
        elif self.behaviour == "lies":
            send("200 OK", bytes(len(self.data)))
        elif self.behaviour == "long":
            send("200 OK", self.data + b"more")
        elif headers.get("range"):
            start = int(headers["range"].removeprefix("bytes=").rstrip("-"))
            send("206 Partial Content", self.data[start:], f"Content-Range: bytes {start}-{len(self.data) - 1}/{len(self.data)}")
        else:
            send("200 OK", self.data)
        await writer.drain()


async def test_downloads_that_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy and broken answers are tried again, a download goes on where it broke, and other bytes than the digest's are never taken."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    unruly = Unruly(os.urandom(3_000_000))
    server = await asyncio.start_server(unruly.serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    blob = Descriptor(digest=unruly.digest, size=len(unruly.data))
    try:
        for behaviour in ("good", "busy", "breaks"):
            unruly.behaviour = behaviour
            source = Registry(parse(f"{host}/app:1"))
            assert await source.read(blob, lambda stream: stream.read()) == unruly.data
            await source.close()
        assert [row for row in unruly.requests if row[1]], "it began again from the start"
        for behaviour in ("lies", "long"):
            unruly.behaviour = behaviour
            source = Registry(parse(f"{host}/app:1"))
            with pytest.raises(NodeError):
                await source.read(blob, lambda stream: stream.read(5))
            await source.close()
    finally:
        server.close()


# --- sandboxes -------------------------------------------------------------------------------------------------------------

SMALL: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    overrides: dict[str, dict[str, object]] = {"edge": {"sweep_ms": 200}, "layers": {"registries": ["*"]}}
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        async with Cluster(place, edges=(f"t{secrets.token_hex(4)}",), overrides=overrides) as cluster:
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


async def check(client: Client, image: str, **options: Any) -> None:
    async with client.sandbox(image, **SMALL, **options) as sandbox:
        result = await sandbox.exec("id -u; pwd; echo $FLAVOUR; cat /etc/flavour; ls /gone 2>/dev/null; touch mine && echo written")
        assert result.stdout.text == "1000\n/home/user\nvanilla\nupper\nwritten\n", result.stderr.text


def image_of_base(tmp_path: Path) -> Layout:
    """An image with USER, WORKDIR and ENV whose second layer changes and deletes."""
    build_small_base(tmp_path / "base")
    layout = Layout(tmp_path / "layout")
    lower = tar_of_tree(tmp_path / "base")
    upper = tar_of([("etc/flavour", b"upper\n"), (".wh.gone", b"")])
    config = {"Env": ["FLAVOUR=vanilla", "PATH=/bin:/usr/bin"], "WorkingDir": "/home/user", "User": "user", "Cmd": ["sh"]}
    layout.image([tar_of([("gone", b"x")]), lower, upper], "1", config=config, compress="")
    return layout


@pytest.mark.needs("cgroup", "oci", "guest")
async def test_c47_an_image_with_user_starts(cluster: Cluster, tmp_path: Path) -> None:
    """A sandbox on an image runs as its USER, in its WORKDIR, with its ENV; also when the image was too large to become one layer."""
    layout = await asyncio.to_thread(image_of_base, tmp_path)
    store = LayerStore(cluster.layer_store)
    command = (sys.executable, "-m", "dsec.cli", "layer", "pull", str(layout.root), "--name", "app:1", "--store", str(store.root))
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    output, _ = await process.communicate()
    assert output.decode().startswith("app:1  sha256:")
    await oci.import_image(store, layout.root, "app:large", limit=1)
    async with libdsec.connect(cluster.url) as client:
        await check(client, "app:1")
        await check(client, "app:large")


@pytest.mark.needs("cgroup", "oci", "guest")
async def test_an_image_that_cannot_be_had_is_told_at_once(cluster: Cluster) -> None:
    """No way to the registry, no such image and no permission are told apart, and long before the create's deadline."""
    unruly = Unruly(b"")
    server = await asyncio.start_server(unruly.serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with libdsec.connect(cluster.url) as client:
            for behaviour, kind, fix in (("absent", NotFound, "check name and tag"), ("refuses", Denied, "docker login")):
                unruly.behaviour = behaviour
                with pytest.raises(kind, match=fix):
                    await client.create(f"{host}/{behaviour}:1", **SMALL, timeout=100)
            for image in ("127.0.0.1:1/app:1", "127.0.0.1:1/other:2"):
                with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached") as told:
                    await client.create(image, **SMALL, timeout=100)
                assert told.value.reason == "registry"
                assert "dsec layer pull" in told.value.fix
    finally:
        server.close()


@real
@pytest.mark.needs("cgroup", "oci", "guest")
async def test_a_sandbox_pulls_its_image(cluster: Cluster, tmp_path: Path) -> None:
    """An image that no store has is pulled once for all who ask, with events; one that is not there is told as such."""
    layout = await asyncio.to_thread(image_of_base, tmp_path)
    with registry(tmp_path) as host:
        await asyncio.to_thread(push, layout.root, "1", f"{host}/app:1")
        async with libdsec.connect(cluster.url) as client:
            await asyncio.gather(*(check(client, f"{host}/app:1") for _ in range(6)))
            with pytest.raises(NotFound):
                await client.create(f"{host}/app:2", **SMALL, timeout=20)
            with pytest.raises(NotFound):
                await client.create("no-such-layer", **SMALL, timeout=20)
    names = [entry for entry in (cluster.layer_store / "names.jsonl").read_text().splitlines() if "app:1" in entry]
    assert len(names) == 1
