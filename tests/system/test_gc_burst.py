"""The shared layer store's gc runs all the time while sandboxes are made: it takes what nobody wants, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import msgspec
import pytest

import libdsec
from dsec.actors.up import Cluster
from dsec.layers.bootstrap import bootstrap_tiny
from dsec.layers.fetch import push
from dsec.layers.importer import import_dir
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerInfo, LayerStore
from tests.census import Census

pytestmark = [pytest.mark.needs("root", "cgroup", "oci", "guest", "erofs_file", "fanotify", "mkfs_erofs"), pytest.mark.timeout(120)]
OPTIONS = {"cpus": 0.5, "memory": "64MiB", "disk": "4MiB", "pids": 32}
WORKSPACES = 3
EACH = 4


async def layer(source: LayerStore, shared: RemoteStore, place: Path, name: str, size: int = 6 << 20) -> tuple[str, list[str]]:
    """A layer with two files in the shared store: its digest and theirs."""
    place.mkdir()
    hashes = []
    for file in ("first", "second"):
        data = os.urandom(size)
        (place / file).write_bytes(data)
        hashes.append(hashlib.sha256(data).hexdigest())
    await import_dir(source, place, name, at="/w")
    return (await push(source, shared, name)).digest, hashes


async def test_gc_in_a_burst_takes_only_what_nobody_wants(state_dir: Path, edge_name: str, leftovers: Census) -> None:
    """Layers lose their names while sandboxes have read half of them: each goes on reading the source's bytes to the end. What is pinned
    and what a named layer was made on stays; what nobody wants goes."""
    source = LayerStore(state_dir / "source")
    shared = RemoteStore(str(state_dir / "shared"), make=True)
    await bootstrap_tiny(source)
    await push(source, shared, "busybox")
    made = [await layer(source, shared, state_dir / f"w{number}", f"w@{number}") for number in range(WORKSPACES)]
    others = {name: (await layer(source, shared, state_dir / name, name, 1 << 10))[0] for name in ("pinned", "parent", "child", "loose")}
    await shared.pin(others["pinned"], "job/1")
    child = await shared.info(others["child"])
    await shared._put(  # as if it had been made on the other
        f"layers/{others['child'].removeprefix('sha256:')}/info.json",
        msgspec.json.encode(LayerInfo(digest=child.digest, stored="split", size=child.size, parents=(others["parent"],))),
    )
    for name in ("pinned", "parent", "loose"):
        await shared.untag(name)
    rounds: list[tuple[str, ...]] = []

    async def collect() -> None:
        while True:
            rounds.append((await shared.gc(grace=-1)).digests)

    async def one(client: libdsec.Client, number: int, half: asyncio.Barrier) -> None:
        _, hashes = made[number]
        async with client.sandbox("busybox", workspace=f"w@{number}", **OPTIONS) as sandbox:
            assert (await sandbox.exec("sha256sum /w/first", check=True)).stdout.text.split()[0] == hashes[0]
            await half.wait()  # from here on no name keeps it
            assert (await sandbox.exec("sha256sum /w/second", check=True)).stdout.text.split()[0] == hashes[1]

    async def unname(number: int, half: asyncio.Barrier) -> None:
        await half.wait()
        await shared.untag(f"w@{number}")

    collecting = asyncio.create_task(collect())
    try:
        async with (
            Cluster(state_dir / "up", edges=(edge_name,), overrides={"layers": {"remote": str(state_dir / "shared")}}) as cluster,
            libdsec.connect(cluster.url) as client,
        ):
            halves = [asyncio.Barrier(EACH + 1) for _ in made]
            readers = [one(client, number, halves[number]) for number in range(WORKSPACES) for _ in range(EACH)]
            await asyncio.gather(*readers, *(unname(number, half) for number, half in enumerate(halves)))
            done = len(rounds)
            while len(rounds) < done + 2 and not collecting.done():  # noqa: ASYNC110 - a round without any name
                await asyncio.sleep(0.05)
            assert not collecting.done(), collecting
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
    left = {info.digest for info in await shared.list()}
    assert left >= {digest for digest, _ in made} | {others["pinned"], others["parent"], others["child"]}
    assert others["loose"] not in left
    assert sum(digests.count(others["loose"]) for digests in rounds) == 1
