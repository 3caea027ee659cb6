"""What every remote layer store owes, whether it is a directory, S3, or a web server that is read only."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from dsec.errors import InvalidRequest, NodeError, NotFound, Unavailable, Unsupported
from dsec.layers import manifest
from dsec.layers.manifest import CHUNK
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerConfig, LayerInfo
from tests.layer_box import Server
from tests.s3_box import REGION, S3, server


class Place:
    """A store that is written to, and the same seen as the store under test. ``kind``: directory, http, s3."""

    def __init__(self, root: Path, kind: str, s3: S3 | None = None) -> None:
        self.server = Server(root)
        if s3 is None:
            self.writer = RemoteStore(str(root), make=True)
            self.reader = RemoteStore(self.server.url, timeout=1.0) if kind == "http" else RemoteStore(f"file://{root}")
        else:
            url = f"s3://{s3.bucket()}/some/where?endpoint={s3.url}&region={REGION}"
            self.writer, self.reader = RemoteStore(url), RemoteStore(url)

    def read(self, digest: str, part: str) -> bytes:
        """An object as it lies there."""
        return bytes(obstore.get(self.writer._store, f"layers/{digest.removeprefix('sha256:')}/{part}").bytes())

    def write(self, digest: str, part: str, data: bytes) -> None:
        """Something else in its place."""
        obstore.put(self.writer._store, f"layers/{digest.removeprefix('sha256:')}/{part}", data)

    def remove(self, digest: str, part: str) -> None:
        obstore.delete(self.writer._store, f"layers/{digest.removeprefix('sha256:')}/{part}")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with server() as made:
        yield made


@pytest.fixture(params=["directory", "http", "s3"])
async def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    made = open_place(request, tmp_path, monkeypatch)
    yield made
    made.server.close()


@pytest.fixture(params=["directory", "s3"])
async def writable(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    made = open_place(request, tmp_path, monkeypatch)
    yield made
    made.server.close()


def open_place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param != "s3":
        return Place(tmp_path / "remote", request.param)
    s3: S3 = request.getfixturevalue("s3")
    for key, value in s3.environ().items():
        monkeypatch.setenv(key, value)
    return Place(tmp_path / "remote", "s3", s3)


@pytest.fixture
def layer(tmp_path: Path) -> tuple[Path, Path, bytes]:
    return make_layer(tmp_path, 1)


def make_layer(tmp_path: Path, seed: int) -> tuple[Path, Path, bytes]:
    meta, data = tmp_path / f"meta{seed}", tmp_path / f"data{seed}"
    meta.write_bytes(bytes([seed]) * 5000)
    data.write_bytes(os.urandom(2 * CHUNK + 100))
    return meta, data, manifest.encode(manifest.survey(meta, data))


INFO = LayerInfo(digest="", stored="split", size=7, created_ts=1.0, source="dir /x", config=LayerConfig(env={"A": "1"}, workdir="/w"))


async def put(place: Place, layer: tuple[Path, Path, bytes]) -> str:
    meta, data, known = layer
    assert await place.writer.put(known, meta, data, INFO)
    return manifest.digest(known)


async def test_what_was_put_is_read_back_checked(place: Place, layer: tuple[Path, Path, bytes]) -> None:
    """Manifest, metadata, record and any range of the blob, by digest and by name."""
    meta, data, known = layer
    digest = await put(place, layer)
    await place.writer.tag("team/base@1", digest)
    assert (await place.reader.resolve("team/base@1")).digest == (await place.reader.resolve(digest)).digest == digest
    assert await place.reader.has(digest)
    assert await place.reader.manifest(digest) == known
    decoded = manifest.decode(known, digest)
    assert await place.reader.meta(digest, decoded) == meta.read_bytes()
    whole = data.read_bytes()
    assert await place.reader.get_range(digest, 0, CHUNK) == whole[:CHUNK]
    assert place.reader.range_sync(digest, *decoded.span(2)) == whole[2 * CHUNK :]
    info = await place.reader.info(digest)
    assert info.digest == digest
    assert info.config == INFO.config


async def test_what_is_not_there_is_not_found(place: Place, layer: tuple[Path, Path, bytes]) -> None:
    """An unknown digest, an unknown name, and a layer whose upload has not ended."""
    digest = await put(place, layer)
    place.remove(digest, "info.json")
    assert not await place.reader.has(digest)
    for name in (digest, "nobody@1", "sha256:" + "0" * 64):
        with pytest.raises(NotFound):
            await place.reader.resolve(name)
    with pytest.raises(InvalidRequest):
        await place.reader.resolve("../up")


@pytest.mark.parametrize("part", ["manifest", "meta"])
async def test_an_altered_object_is_found(place: Place, layer: tuple[Path, Path, bytes], part: str) -> None:
    """One changed byte in manifest or metadata, or a byte too few."""
    digest = await put(place, layer)
    right = place.read(digest, part)
    known = manifest.decode(layer[2], digest)
    for wrong in (right[:50] + bytes([right[50] ^ 1]) + right[51:], right[:-1]):
        place.write(digest, part, wrong)
        with pytest.raises(NodeError, match="altered"):
            await (place.reader.manifest(digest) if part == "manifest" else place.reader.meta(digest, known))


async def test_two_writers_of_one_layer_both_succeed(place: Place, layer: tuple[Path, Path, bytes]) -> None:
    """At once and afterwards; the second is told that it was there."""
    meta, data, known = layer
    await asyncio.gather(*(place.writer.put(known, meta, data, INFO) for _ in range(4)))
    assert not await place.writer.put(known, meta, data, INFO)
    assert await place.reader.get_range(manifest.digest(known), 0, CHUNK) == data.read_bytes()[:CHUNK]


async def test_names_have_a_history(place: Place, layer: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    """The newest change counts, the older ones stay readable, and a forgotten name is unknown."""
    first = await put(place, layer)
    second = await put(place, make_layer(tmp_path, 2))
    for digest in (first, second, second):
        await place.writer.tag("base", digest)
    assert (await place.reader.resolve("base")).digest == second
    assert [entry.digest for entry in await place.writer.history("base")] == [first, second]
    await place.writer.untag("base")
    with pytest.raises(NotFound):
        await place.reader.resolve("base")
    assert [entry.op for entry in await place.writer.history("base")] == ["tag", "tag", "untag"]
    with pytest.raises(NotFound):
        await place.writer.tag("base", "sha256:" + "0" * 64)


async def test_gc_takes_only_what_nobody_wants(writable: Place, tmp_path: Path) -> None:
    """Named, pinned, kept and young layers stay, and the ancestors of what stays; the rest and broken uploads go."""
    place = writable
    digests = [await put(place, make_layer(tmp_path, seed)) for seed in range(5)]
    named, pinned, kept, parent, loose = digests
    meta, data, known = make_layer(tmp_path, 9)
    await place.writer.put(known, meta, data, INFO.__class__(digest="", stored="split", size=1, parents=(parent,)))
    await place.writer.tag("child", manifest.digest(known))
    await place.writer.tag("named", named)
    await place.writer.pin(pinned, "job/1")
    assert await place.writer.pins() == {pinned: ("job/1",)}
    assert (await place.writer.gc(keep=[kept])).digests == ()  # all are young
    assert (await place.writer.gc(keep=[kept], grace=-1)).digests == (loose,)
    assert {info.digest for info in await place.writer.list()} == {*digests[:4], manifest.digest(known)}
    await place.writer.unpin(pinned, "job/1")
    assert set((await place.writer.gc(grace=-1)).digests) == {pinned, kept}


async def test_gc_leaves_what_a_node_uses_or_becomes_wanted_meanwhile(
    writable: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user keeps a layer; so does one, a name or a pin that comes while gc is at work; a name that comes too late is refused."""
    place = writable
    used, claimed, named, pinned, loose = [await put(place, make_layer(tmp_path, seed)) for seed in range(5)]
    await place.writer.use(used, "node/1")
    assert await place.writer.users() == {used: ("node/1",)}
    delete = place.writer._delete

    async def meanwhile(path: str) -> None:
        if loose.removeprefix("sha256:") in path and path.endswith("info.json"):
            await place.reader.use(claimed, "node/2")
            await place.reader.pin(pinned, "job")
            await delete(path)
            with pytest.raises(NotFound):
                await place.reader.tag("late", loose)
            return
        await delete(path)

    monkeypatch.setattr(place.writer, "_delete", meanwhile)
    await place.reader.tag("n", named)
    assert (await place.writer.gc(grace=-1)).digests == (loose,)
    assert {info.digest for info in await place.writer.list()} == {used, claimed, named, pinned}
    await place.writer.unuse(used, "node/1")
    assert (await place.writer.gc(grace=-1)).digests == (used,)
    assert await place.writer.get_range(claimed, 0, 10)


async def test_over_http_nothing_is_written_or_listed(tmp_path: Path, layer: tuple[Path, Path, bytes]) -> None:
    """It says so instead of failing in the middle."""
    place = Place(tmp_path / "remote", "http")
    try:
        digest = await put(place, layer)
        for work in (place.reader.put(layer[2], *layer[:2], INFO), place.reader.pin(digest, "x"), place.reader.list()):
            with pytest.raises(Unsupported):
                await work
        place.server.gone = True
        with pytest.raises(Unavailable):
            await place.reader.manifest(digest)
    finally:
        place.server.close()


@pytest.mark.parametrize("url", ["layers", "ftp://host/x", "s3://", "file://host/x", ""])
def test_what_is_no_store_is_refused(url: str) -> None:
    """With the forms that are."""
    with pytest.raises(InvalidRequest, match="not a layer store"):
        RemoteStore(url)


def test_the_command_line_pushes_fetches_and_keeps(tmp_path: Path) -> None:
    """A layer goes to a shared directory and comes to another node, whole, under its name."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("content")

    def dsec(*words: str) -> Any:
        program = [sys.executable, "-m", "dsec.cli", "--json", "layer", *words]
        done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def at(store: str) -> tuple[str, ...]:
        return ("--store", str(tmp_path / store))

    shared = ("--remote", str(tmp_path / "shared"))
    dsec("import", str(tmp_path / "tree"), "--name", "w@1", *at("one"))
    pushed = dsec("push", "w@1", *at("one"), *shared)
    assert dsec("fetch", "w@1", "--whole", *at("two"), *shared) == [pushed]
    assert dsec("verify", "w@1", *at("two"))["digest"] == pushed["digest"]
    dsec("remote", "pin", "w@1", "--for", "me", *shared)
    assert [row["digest"] for row in dsec("remote", "history", "w@1", *shared)] == [pushed["digest"]]
    dsec("remote", "tag", "w@1", "--remove", *shared)
    assert [row["digest"] for row in dsec("remote", "ls", *shared)] == [pushed["digest"]]
    assert dsec("remote", "gc", *shared)["digests"] == []  # it is pinned
