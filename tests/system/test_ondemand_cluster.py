"""A whole cluster whose node has no layer at all: images come from the remote store while sandboxes run."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

import libdsec
from dsec import doctor
from dsec.actors.up import Cluster
from dsec.errors import DsecError
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.fetch import push
from dsec.layers.importer import import_dir
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from tests.census import Census
from tests.layer_box import Server

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest", "erofs_file", "mkfs_erofs"), pytest.mark.timeout(120)]
OPTIONS = {"cpus": 0.5, "memory": "64MiB", "disk": "4MiB", "pids": 32}


@pytest.mark.parametrize("way", ["fanotify", "fuse"])
async def test_a_store_that_goes_and_comes_back_under_a_sandbox(
    state_dir: Path, edge_name: str, leftovers: Census, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and workspace come by name; without the store a cold read is EIO and told as an event; with it again all bytes are right."""
    if sentence := doctor.reason(way):
        pytest.skip(sentence)
    if way == "fuse":
        monkeypatch.setenv("DSEC_DISABLE", "fanotify")
    source = LayerStore(state_dir / "source")
    await bootstrap_tiny(source)
    tree = state_dir / "tree"
    tree.mkdir()
    hashes = {}
    for name, size in (("one", 1 << 20), ("two", 10 << 20)):  # more than is ever read ahead
        data = os.urandom(size)
        (tree / name).write_bytes(data)
        hashes[name] = hashlib.sha256(data).hexdigest()
    await import_dir(source, tree, "w@1", at="/w")
    shared = RemoteStore(str(state_dir / "shared"), make=True)
    for name in ("busybox", "w@1"):
        await push(source, shared, name)
    server = Server(state_dir / "shared")
    layers = {"remote": server.url, "patience_ms": 500}
    try:
        async with (
            Cluster(state_dir / "up", edges=(edge_name,), overrides={"layers": layers}) as cluster,
            libdsec.connect(cluster.url) as dsec,
        ):
            async with dsec.sandbox("busybox", workspace="w@1", **OPTIONS) as sandbox:
                assert (await sandbox.exec("sha256sum /w/one")).stdout.text.split()[0] == hashes["one"]
                server.gone = True
                told = asyncio.create_task(_first(dsec, "layer_trouble"))
                failed = await sandbox.exec("sha256sum /w/two")
                assert failed.exit_code != 0
                assert "Input/output error" in failed.stderr.text
                assert "cannot be reached" in (await asyncio.wait_for(told, 60)).detail["error"]
                server.gone = False
                assert (await sandbox.exec("sha256sum /w/one /w/two")).stdout.text.split()[::2] == list(hashes.values())
            with pytest.raises(DsecError, match="no such layer"):
                await dsec.create("nobody", **OPTIONS)
    finally:
        server.close()


async def _first(dsec: libdsec.Client, kind: str) -> libdsec.Event:
    async for event in dsec.events(kinds=[kind], since="-1m"):
        return event
    raise AssertionError("the events ended")
