"""One conversion of an image for all nodes that share a layer store: the others start on what it gave."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.errors import NotFound
from dsec.layers import erofs_read, sharing
from dsec.layers.fetch import NodeLayers
from dsec.layers.pull import Puller, pull
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.model import LayerRef
from dsec.trees import clear
from tests.fixtures_backend import build_small_base
from tests.oci_box import Layout, Served, tar_of, tar_of_tree
from tests.s3_box import REGION, server

pytestmark = [pytest.mark.needs("root", "mkfs_erofs")]
SMALL: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64}
FILES = {"etc/a": b"a" * 70_000, "etc/b": b"upper"}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, nobody here takes a node for dead that is not."""
    monkeypatch.setattr(sharing, "STALE_S", 1e9)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "layout")
    made.image([tar_of([("etc", None), ("etc/a", FILES["etc/a"]), ("etc/b", b"b")]), tar_of([("etc/b", FILES["etc/b"])])], "1")
    return made


class Node:
    """The layers of a node that has none."""

    def __init__(self, place: Path, name: str, url: str) -> None:
        self.layers = NodeLayers(LayerStore(place / name), RemoteStore(url, timeout=60.0, make=True))
        self.puller = Puller(self.layers, ["*"])

    async def have(self, image: str) -> LayerRef:
        return await self.puller.job(image).task

    async def check(self, image: str, place: Path) -> None:
        """Every file of the image is as it should be."""
        digest = self.layers.lookup(image).digest
        if self.layers.partial(digest):
            await self.layers.pull(digest)
        data = self.layers.store.side(digest, ".data")
        meta = await self.layers.store.content(digest)
        await asyncio.to_thread(erofs_read.unpack, str(meta), place, str(data) if data.exists() else "")
        assert {name: (place / name).read_bytes() for name in FILES} == FILES


@contextlib.asynccontextmanager
async def nodes(place: Path, count: int, url: str = "") -> AsyncIterator[list[Node]]:
    made = [Node(place, f"node{number}", url or str(place / "shared")) for number in range(count)]
    try:
        yield made
    finally:
        for node in made:
            await node.puller.close()


@pytest.mark.parametrize("kind", ["directory", "s3"])
async def test_many_nodes_convert_an_image_once(layout: Layout, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five that ask at once one fetches its layers; the rest has metadata of the very same layer, and right bytes."""
    with contextlib.ExitStack() as stack:
        url = ""
        if kind == "s3":
            s3 = stack.enter_context(server())
            for key, value in s3.environ().items():
                monkeypatch.setenv(key, value)
            url = f"s3://{s3.bucket()}/x?endpoint={s3.url}&region={REGION}"
        async with nodes(tmp_path, 5, url) as made, Served(layout) as registry:
            image = f"{registry.host}/app:1"
            await asyncio.gather(*(node.have(image) for node in made))
            for node in made:
                await node.puller.sharing.settle()
            assert len(registry.layers()) == len(set(registry.layers())) == 2
            assert len({node.layers.lookup(image).digest for node in made}) == 1
            assert sum(node.layers.partial(node.layers.lookup(image).digest) for node in made) == 4
            for number, node in enumerate(made):
                await node.check(image, tmp_path / f"out{number}")
            remote = made[0].layers.remote
            assert remote is not None
            assert (await remote.resolve(image)).digest == made[0].layers.lookup(image).digest
            assert await remote._paths("claims/") == []


async def test_the_same_image_of_another_registry_is_not_converted_again(layout: Layout, tmp_path: Path) -> None:
    """Nor one that is compressed in another way: what counts is what its configuration says of it."""
    other = Layout(tmp_path / "other")
    other.image(
        [tar_of([("etc", None), ("etc/a", FILES["etc/a"]), ("etc/b", b"b")]), tar_of([("etc/b", FILES["etc/b"])])], "1", compress=""
    )
    async with nodes(tmp_path, 2) as (one, two), Served(layout) as first, Served(other) as second:
        await one.have(f"{first.host}/app:1")
        await one.puller.sharing.settle()
        await two.have(f"{second.host}/else:1")
        assert second.layers() == []
        await two.check(f"{second.host}/else:1", tmp_path / "out")


async def test_a_node_that_dies_while_it_converts_is_replaced(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim is not written any more: one of those that wait takes it over."""
    monkeypatch.setattr(sharing, "STALE_S", 2.0)
    async with nodes(tmp_path, 3) as made, Served(layout) as registry:
        dead, *others = made
        registry.gate = asyncio.Event()
        image = f"{registry.host}/app:1"
        job = dead.puller.job(image)
        remote = dead.layers.remote
        assert remote is not None
        while not await remote._paths("claims/"):  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.02)
        monkeypatch.setattr(remote, "unclaim", lambda _: asyncio.sleep(0))  # it gets no chance to tell anybody
        job.task.cancel()
        registry.gate.set()
        await asyncio.gather(*(node.have(image) for node in others))
        for number, node in enumerate(others):
            await node.check(image, tmp_path / f"out{number}")


async def test_a_conversion_that_fails_is_another_nodes_to_try(layout: Layout, tmp_path: Path) -> None:
    """Its claim is taken away at once."""
    async with nodes(tmp_path, 2) as (one, two), Served(layout) as registry:
        job = one.puller.job(f"{registry.host}/app:1")
        registry.gate = asyncio.Event()
        while len(registry.layers()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        job.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job.task
        registry.gate.set()
        await two.have(f"{registry.host}/app:1")
        await two.check(f"{registry.host}/app:1", tmp_path / "out")


async def test_a_claim_that_is_free_because_all_is_done_converts_nothing(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that looked before the other's upload, and claims behind it, looks again."""
    async with nodes(tmp_path, 2) as (one, two), Served(layout) as registry:
        image = f"{registry.host}/app:1"
        remote = two.layers.remote
        assert remote is not None
        look, looks = remote.image, []

        async def late(key: str) -> str:
            looks.append(key)
            if len(looks) == 1:  # the other one does all of it between this look and the claim
                await one.have(image)
                await one.puller.sharing.settle()
                raise NotFound("not yet")
            return await look(key)

        monkeypatch.setattr(remote, "image", late)
        await two.have(image)
        assert len(looks) == 2
        assert len(registry.layers()) == 2
        assert await remote._paths("claims/") == []
        await two.check(image, tmp_path / "out")


async def test_without_the_shared_store_a_node_converts_for_itself(layout: Layout, tmp_path: Path) -> None:
    """A store that does not answer stops no sandbox whose image can be pulled."""
    async with nodes(tmp_path, 1, "http://127.0.0.1:1/x") as (node,), Served(layout) as registry:
        await node.have(f"{registry.host}/app:1")
        await node.check(f"{registry.host}/app:1", tmp_path / "out")


async def test_pulls_by_hand_share_nothing(layout: Layout, tmp_path: Path) -> None:
    """`dsec layer pull` is about this node alone; `push` shares."""
    store = LayerStore(tmp_path / "store")
    async with Served(layout) as registry:
        ref = await pull(store, f"{registry.host}/app:1", "mine")
        assert (await store.info("mine")).digest == ref.digest


@pytest.mark.needs("cgroup", "oci", "guest", "erofs_file", "fanotify")
async def test_a_node_starts_on_an_image_that_another_one_pulled(tmp_path: Path) -> None:
    """Its registry is gone meanwhile; the data comes from the shared store when it is read."""
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    await asyncio.to_thread(build_small_base, place / "base")
    layout = Layout(place / "layout")
    layout.image([await asyncio.to_thread(tar_of_tree, place / "base")], "1", config={"Env": ["FLAVOUR=x", "PATH=/bin:/usr/bin"]})
    shared = str(place / "shared")
    RemoteStore(shared, make=True)
    layers = {"registries": ["*"], "remote": shared}
    names = [f"t{secrets.token_hex(4)}" for _ in range(2)]
    try:
        async with Served(layout) as registry:
            image = f"{registry.host}/app:1"
            async with Cluster(place / "one", edges=(names[0],), overrides={"layers": layers}) as one, libdsec.connect(one.url) as client:
                async with client.sandbox(image, **SMALL) as sandbox:
                    assert (await sandbox.exec("echo $FLAVOUR")).stdout.text == "x\n"
                async for event in client.events(kinds=["image_shared"], since="-5m"):
                    assert event.detail["image"] == image
                    break
        async with Cluster(place / "two", edges=(names[1],), overrides={"layers": layers}) as two, libdsec.connect(two.url) as client:
            async with client.sandbox(image, **SMALL) as sandbox:
                assert (await sandbox.exec("echo $FLAVOUR; ls /bin/sh")).stdout.text == "x\n/bin/sh\n"
                assert list((two.layer_store / "blobs").glob("*.data.map")), "all of it was fetched before it was asked for"
    finally:
        await asyncio.to_thread(clear, place)
