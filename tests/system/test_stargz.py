"""eStargz images are read out of their registry while sandboxes run, and every byte is the table's."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec import config as configs
from dsec.actors.host import node_layers
from dsec.actors.up import Cluster
from dsec.layers import diff
from dsec.layers.fetch import NodeLayers
from dsec.layers.pull import Puller, pull
from dsec.layers.store import LayerStore
from dsec.trees import clear
from tests import stargz_box
from tests.fixtures_backend import build_small_base
from tests.oci_box import Layout, Served, tar_of, tar_of_tree
from tests.system.test_oci import LOWER, UPPER

pytestmark = [pytest.mark.needs("root", "erofs_file", "fanotify"), pytest.mark.timeout(180)]
SMALL: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "cpus": 0.5, "pids": 64}


@pytest.fixture
def layers(tmp_path: Path) -> NodeLayers:
    return NodeLayers(LayerStore(tmp_path / "store"))


async def pulled(layers: NodeLayers, image: str) -> str:
    puller = Puller(layers, ["*"])
    try:
        return (await puller.job(image).task).digest
    finally:
        await puller.close()


async def test_a_table_gives_the_same_tree_as_the_archive(layers: NodeLayers, tmp_path: Path) -> None:
    """Whiteouts, opaque directories, links, modes and implied directories: the layers of a lazy image are those of an unpacked one."""
    layout = Layout(tmp_path / "layout")
    stargz_box.image(layout, [LOWER, UPPER], "1", {"Env": ["A=b"], "User": "7"})
    async with Served(layout) as registry:
        lazy = await layers.store.info(await pulled(layers, f"{registry.host}/app:1"))
        whole = LayerStore(tmp_path / "whole")
        each = await whole.info((await pull(whole, f"{registry.host}/app:1", limit=1)).digest)
        for digest in lazy.stack:
            await layers.pull(digest)
            await layers.store.verify(digest)
    assert (lazy.config.env, lazy.config.user) == ({"A": "b"}, "7")
    assert len(lazy.stack) == len(each.stack) == 2
    for mine, theirs in zip(lazy.stack, each.stack, strict=True):
        left = list(diff.entries(str(await layers.store.content(mine))))
        right = [row for row in diff.entries(str(await whole.content(theirs))) if row.path != "/stargz.index.json"]
        assert left == right


async def test_with_on_demand_switched_off_an_image_is_converted(tmp_path: Path) -> None:
    """As the configuration says."""
    layout = Layout(tmp_path / "layout")
    stargz_box.image(layout, [LOWER], "1")
    config = configs.parse({"layers": {"store_dir": str(tmp_path / "store"), "on_demand": False}}, {})
    layers = node_layers(config)
    async with Served(layout) as registry:
        assert (await layers.store.info(await pulled(layers, f"{registry.host}/app:1"))).stack == ()


async def test_what_cannot_be_read_in_parts_is_fetched_whole(layers: NodeLayers, tmp_path: Path) -> None:
    """A table that is not the manifest's, or that leaves something out: the image is converted from the archive itself."""
    layout = Layout(tmp_path / "layout")
    stargz_box.image(layout, [LOWER], "1")
    for entry in layout.entries:  # the manifest names another table
        path = layout.root / "blobs/sha256" / entry["digest"][7:]
        text = path.read_bytes()
        table = text[text.index(b"toc.digest") :].split(b'"')[2]
        changed = text.replace(table, b"sha256:" + b"0" * 64)
        named = hashlib.sha256(changed).hexdigest()
        (path.parent / named).write_bytes(changed)
        entry["digest"] = f"sha256:{named}"
    async with Served(layout) as registry:
        info = await layers.store.info(await pulled(layers, f"{registry.host}/app:1"))
    assert info.stack == ()
    assert info.stored == "erofs"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The small base as a layer's tar."""
    place = tmp_path_factory.mktemp("base")
    build_small_base(place / "tree")
    return tar_of_tree(place / "tree")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    layers = {"registries": ["*"]}
    try:
        async with Cluster(place, edges=(f"t{secrets.token_hex(4)}",), overrides={"edge": {"sweep_ms": 200}, "layers": layers}) as cluster:
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


@pytest.mark.needs("cgroup", "oci", "guest")
@pytest.mark.asyncio(loop_scope="module")
async def test_a_sandbox_starts_on_the_tables_alone(cluster: Cluster, base: bytes, tmp_path: Path) -> None:
    """It reads right bytes while no chunk but its own has come; then all of them come by themselves, and the registry may go."""
    random_ = random.Random(5)
    data = {f"data/f{number}": random_.randbytes(300_000) for number in range(20)}
    layout = Layout(tmp_path / "layout")
    tars = [base, tar_of([("data", None), *data.items()])]
    await asyncio.to_thread(stargz_box.image, layout, tars, "1", {"Env": ["PATH=/bin:/usr/bin"], "User": "user"})
    script = "import hashlib, sys; [print(hashlib.sha256(open(name, 'rb').read()).hexdigest()) for name in sys.argv[1:]]"
    async with libdsec.connect(cluster.url) as client:
        async with Served(layout) as registry:
            sandbox = await client.create(f"{registry.host}/app:1", **SMALL, timeout=60)
            asked = [asked for kind, what, asked in registry.log if what in set(registry.layers())]
            assert asked
            assert all(asked), "a layer was fetched whole"
            names = [f"/{name}" for name in list(data)[::3]]
            result = await sandbox.exec(["python3", "-c", script, *names], check=True)
            assert result.stdout.text.split() == [hashlib.sha256(data[name[1:]]).hexdigest() for name in names]
            assert (await sandbox.exec("id -un")).stdout.text == "user\n"
            blobs = cluster.layer_store / "blobs"
            while list(blobs.glob("*.data.map")):  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(0.1)
        names = [f"/{name}" for name in data]
        result = await sandbox.exec(["python3", "-c", script, *names], check=True)
        assert result.stdout.text.split() == [hashlib.sha256(content).hexdigest() for content in data.values()]
        await sandbox.stop()
    store = LayerStore(cluster.layer_store)
    for info in await store.list():
        await store.verify(info.digest)


@pytest.mark.needs("cgroup", "oci", "guest")
@pytest.mark.asyncio(loop_scope="module")
async def test_an_altered_chunk_is_an_error_and_never_a_wrong_byte(cluster: Cluster, base: bytes, tmp_path: Path) -> None:
    """The file that it belongs to cannot be read; the others can."""
    bad = os.urandom(30_000)
    layout = Layout(tmp_path / "layout")
    tars = [base, tar_of([("good", b"g" * 30_000), ("bad", bad)])]
    await asyncio.to_thread(stargz_box.image, layout, tars, "1", {"Env": ["PATH=/bin:/usr/bin"]}, bad[:100])
    async with libdsec.connect(cluster.url) as client, Served(layout) as registry:
        async with client.sandbox(f"{registry.host}/app:1", **SMALL) as sandbox:
            failed = await sandbox.exec("cat /bad")
            assert failed.exit_code != 0
            assert "Input/output error" in failed.stderr.text
            assert (await sandbox.exec("cat /good", check=True)).stdout == b"g" * 30_000
