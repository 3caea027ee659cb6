"""The layer store on S3: keys, buckets and endpoints that are wrong, uploads that break off, blobs that were altered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from dsec.errors import InvalidRequest, NodeError, NotFound, Unavailable
from dsec.layers import importer, manifest
from dsec.layers.fetch import NodeLayers, push
from dsec.layers.manifest import CHUNK
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerInfo, LayerStore
from tests.layer_box import fill_tree
from tests.s3_box import REGION, S3, cutting, server

INFO = LayerInfo(digest="", stored="split", size=1)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with server() as made:
        yield made


@pytest.fixture
def keys(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in s3.environ().items():
        monkeypatch.setenv(key, value)


def make_layer(place: Path, chunks: int) -> tuple[bytes, Path, Path]:
    meta, data = place / "meta", place / "data"
    meta.write_bytes(b"m" * 5000)
    data.write_bytes(os.urandom(chunks * CHUNK))
    return manifest.encode(manifest.survey(meta, data)), meta, data


async def test_keys_come_from_the_environment_or_a_file_and_wrong_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that checks signatures takes the right keys, and refuses an unknown key and a wrong secret with what to do about it."""
    with server() as strict:
        bucket = strict.bucket()
        strict.lock()
        known, meta, data = make_layer(tmp_path, 1)
        url = f"s3://{bucket}/layers?endpoint={strict.url}&region={REGION}"
        for key, secret in (("AKIAUNKNOWN", strict.secret), (strict.key, "another")):
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            store = RemoteStore(url)
            for work in (
                lambda at=store: at.resolve("base"),
                lambda at=store: at.put(known, meta, data, INFO),
                lambda at=store: at.list(),
                lambda at=store: at.get_range("sha256:" + "0" * 64, 0, 9),
            ):
                with pytest.raises(NodeError, match="AWS_SECRET_ACCESS_KEY") as refused:
                    await work()
                assert (refused.value.reason, refused.value.retryable, refused.value.field) == ("credentials", False, "layers.remote")
        for name, value in strict.environ().items():
            monkeypatch.setenv(name, value)
        assert await RemoteStore(f"s3://{bucket}/layers").put(known, meta, data, INFO)
        for name in strict.environ():
            monkeypatch.delenv(name)
        keys = tmp_path / "keys"
        keys.write_text(f"[team]\naws_access_key_id = {strict.key}\naws_secret_access_key = {strict.secret}\nregion = {REGION}\n")
        by_file = RemoteStore(f"s3://{bucket}/layers?endpoint={strict.url}&credentials={keys}&profile=team")
        assert await by_file.has(manifest.digest(known))
        assert strict.secret not in by_file.url
        with pytest.raises(NodeError, match="cannot be used"):
            RemoteStore(f"s3://{bucket}/layers?credentials={keys}")  # it has no [default]


@pytest.mark.usefixtures("keys")
async def test_a_bucket_that_is_not_there_is_no_missing_layer(tmp_path: Path) -> None:
    """Every request says that it is the bucket, at once."""
    store = RemoteStore("s3://no-such-bucket/x")
    known, meta, data = make_layer(tmp_path, 1)
    for work in (
        lambda: store.resolve("base"),
        lambda: store.has(manifest.digest(known)),
        lambda: store.put(known, meta, data, INFO),
        store.list,
        store.gc,
    ):
        with pytest.raises(NodeError, match="make the bucket") as refused:
            await work()
        assert (refused.value.reason, refused.value.retryable) == ("bucket", False)


@pytest.mark.usefixtures("keys")
async def test_an_endpoint_that_is_down_is_unavailable() -> None:
    """It may be tried again, and says where it looked; nobody waits for it for ever."""
    store = RemoteStore("s3://layers/x?endpoint=http://127.0.0.1:1", timeout=1.0)
    with pytest.raises(Unavailable, match="endpoint"):
        await store.resolve("base")


@pytest.mark.parametrize("query", ["key=secret", "endpoint=host", "credentials=relative", "region="])
def test_options_that_are_none_are_refused(query: str) -> None:
    """Before anything is asked."""
    with pytest.raises(InvalidRequest, match=query.partition("=")[0]):
        RemoteStore(f"s3://layers/x?{query}")


@pytest.mark.usefixtures("keys")
async def test_an_upload_that_breaks_off_leaves_no_layer(s3: S3, tmp_path: Path) -> None:
    """Nothing of it can be read; put again, it is whole."""
    bucket = s3.bucket()
    known, meta, data = make_layer(tmp_path, 160)  # 40 MiB: three parts
    digest = manifest.digest(known)
    straight = RemoteStore(f"s3://{bucket}/x", timeout=60.0)
    with cutting(s3.url, after=20 << 20) as url:
        with pytest.raises(Unavailable):
            await RemoteStore(f"s3://{bucket}/x?endpoint={url}", timeout=2.0).put(known, meta, data, INFO)
    assert not await straight.has(digest)
    with pytest.raises(NotFound):
        await straight.get_range(digest, 0, CHUNK)
    assert await straight.list() == ()
    assert await straight.put(known, meta, data, INFO)
    last = 159 * CHUNK
    assert await straight.get_range(digest, last, CHUNK) == data.read_bytes()[last:]


@pytest.mark.usefixtures("keys")
async def test_a_truncated_and_an_altered_blob_are_found_when_they_are_fetched(s3: S3, tmp_path: Path) -> None:
    """No byte of them is taken; when the store holds the right ones again, the same node completes the layer."""
    fill_tree(tmp_path / "tree", 3)
    source, url = LayerStore(tmp_path / "one"), f"s3://{s3.bucket()}"
    await importer.import_dir(source, tmp_path / "tree", "base")
    remote = RemoteStore(url)
    digest = (await push(source, remote, "base")).digest
    key = f"layers/{digest.removeprefix('sha256:')}/data"
    right = bytes(obstore.get(remote._store, key).bytes())
    node = NodeLayers(LayerStore(tmp_path / "two"), remote)
    await node.fetch("base")
    for wrong in (right[: len(right) // 2], right[:-9] + bytes([right[-9] ^ 1]) + right[-8:]):
        obstore.put(remote._store, key, wrong)
        with pytest.raises(NodeError):
            await node.pull(digest)
        assert node.partial(digest)
    obstore.put(remote._store, key, right)
    await node.pull(digest)
    assert not node.partial(digest)
    await node.store.verify("base")
