"""A workload on a base that is not on its node: filled as it is read, with a prefetch list, fetched whole, and as a tar.gz.

Each way gets a node of its own that has nothing but has run a sandbox before, on a small layer of the same store. That store is a web
server on this machine with a delay, so the bytes that travel are the honest measure, and the times show how much of the waiting is
hidden. Docker pulls the same tree from a registry of its own (`dockerpull`), without that delay; it is left out, with the reason,
where it is not installed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import libdsec
from benchmarks import dockerpull, harness, peers, rangeserver
from dsec import trees
from dsec.actors.up import Cluster
from dsec.layers import fetch, lazy
from dsec.layers.bootstrap import bootstrap_debian
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore

ABOUT = "a workload on a base that its node does not have: on demand, prefetched, whole, tar.gz"
KEYS = (
    "workload",
    "image_mb",
    "fetched_mb",
    "fetched_share",
    "plain_python_share",
    "ready_ms",
    "done_s",
    "prefetched_done_s",
    "cached_s",
    "full_pull_s",
    "targz_s",
    "docker_pull_s",
)
DEFAULTS = {"image": "debian-12-tools", "delay_ms": 1.0, "rounds": 3}
PACKAGES = ("python3-numpy", "gcc", "g++", "libc6-dev", "git", "cmake", "gdb")
WORKLOADS = {
    "debian-12-tools": """
set -e; cd /tmp
python3 -c 'import numpy, json, re, asyncio; print(int(numpy.arange(10).sum()))'
printf '#include <stdio.h>\\nint main(void){puts("built");return 0;}\\n' >a.c && gcc -O1 -o a a.c && ./a
git init -q r && cd r && echo x >x && git add x && git -c user.name=a -c user.email=a@b commit -qm x && git log --format=%s
""",
    "busybox": "echo 45; echo built; echo x; find / -xdev -type f | head -n 200 | xargs cat >/dev/null; true",
}
SMALL = "bench/small"
ANSWER = "45\nbuilt\nx\n"
PYTHON = {"debian-12-tools": "python3 -c 'print(45)'", "busybox": "echo 45"}


@asynccontextmanager
async def node(url: str, *, lazily: bool = True) -> AsyncIterator[libdsec.Client]:
    """A cluster of one node with an empty store, whose layers come from ``url``; it runs: its holder, loader and launcher have begun."""
    mark = f"bench-{secrets.token_hex(4)}"
    state = Path(tempfile.mkdtemp(prefix=f"dsec-{mark}-", dir=harness.CACHE))  # on the same disk as the source, not in memory
    layers = {"store_dir": str(state / "layers"), "remote": url, "on_demand": lazily}
    try:
        async with Cluster(state, edges=(mark,), overrides={"layers": layers}) as cluster, libdsec.connect(cluster.url) as client:
            async with client.sandbox(SMALL, memory=64 * harness.MIB, disk=16 * harness.MIB) as sandbox:
                await sandbox.exec("true")
            yield client
    finally:
        await asyncio.to_thread(trees.clear, state)


async def work(client: libdsec.Client, image: str, command: str = "", want: str = ANSWER) -> tuple[float, libdsec.Sandbox]:
    """From the create to the workload's last line; the sandbox is left for the caller."""
    started = time.perf_counter()
    sandbox = await client.create(image, memory=512 * harness.MIB, disk=256 * harness.MIB)
    result = await sandbox.exec(command or WORKLOADS[image], timeout=300)
    if result.exit_code != 0 or result.stdout.text != want:
        raise harness.WrongAnswer(f"{result.stdout.text!r} {result.stderr.text!r}")
    return time.perf_counter() - started, sandbox


async def ready(digest: str, url: str) -> float:
    """Milliseconds from nothing on the node to a mounted root: manifest, metadata, mark, mount."""
    place = Path(tempfile.mkdtemp(prefix="dsec-ready-", dir=harness.CACHE))
    try:
        remote = RemoteStore(url)
        way, _ = await asyncio.to_thread(fetch.way_to_load)
        layers = fetch.NodeLayers(LayerStore(place), remote)
        layers.way = way
        layers.store._kind = ("erofs_file", "")  # as on a node that runs: found out once
        await remote.has(digest)  # a node that runs has its connection
        started = time.perf_counter()
        await layers.ensure([digest])
        plan = await layers.mount_plan(digest)
        kit = lazy.make_kit(plan)
        fd = kit.open(plan)
        took = (time.perf_counter() - started) * 1e3
        os.close(fd)
        kit.close()
        return took
    finally:
        await asyncio.to_thread(trees.clear, place)


async def targz(place: Path, url: str) -> float:
    """Seconds to fetch and unpack the same files as a tar.gz."""
    script = f"set -o pipefail; mkdir {place}/x && curl -sf {url}/base.tar.gz | tar -C {place}/x -xzf - --numeric-owner"
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec("bash", "-c", script)
    if await process.wait():
        raise RuntimeError("the tar.gz did not unpack")
    took = time.perf_counter() - started
    await asyncio.to_thread(trees.clear, place / "x")
    return took


async def run(options: Namespace) -> dict[str, object]:
    image = options.image
    store = LayerStore(Path(options.cache) / "layers")
    if image == "busybox":
        await harness.make_base(store, image)
    else:
        await bootstrap_debian(store, name=image, packages=PACKAGES, progress=harness.say)
    place = Path(tempfile.mkdtemp(prefix="dsec-remote-", dir=options.cache))
    try:
        shared = RemoteStore(str(place / "remote"), make=True)
        digest = (await fetch.push(store, shared, image, progress=harness.say)).digest
        await fetch.push(store, shared, await harness.make_base(store, "busybox"), SMALL)
        async with rangeserver.serving(place / "remote", options.delay_ms) as server:
            return await measure(options, store, shared, digest, server, place)
    finally:
        await asyncio.to_thread(trees.clear, place)


async def measure(
    options: Namespace, store: LayerStore, shared: RemoteStore, digest: str, server: rangeserver.Server, place: Path
) -> dict[str, object]:
    image = options.image
    size = store.side(digest, ".data").stat().st_size
    readies = [await ready(digest, server.url) for _ in range(options.rounds + 1)][1:]
    cold, cached, ahead, whole, shares, plain = [], [], [], [], [], []
    facts: dict[str, object] = {}
    for number in range(options.rounds):
        async with node(server.url) as client:
            await server.reset()
            took, sandbox = await work(client, image)
            cold.append(took)
            shares.append((await server.stats())["bytes"])
            cached.append((await work(client, image))[0])
            info = await sandbox.info()
            facts = {"degraded": list(info.degraded)}
            await asyncio.sleep(1.2)  # the list of first reads is written every half second
            touched = next(Path(harness.CACHE).glob(f"dsec-bench-*/layers/blobs/{digest.replace(':', '-')}.touched"), None)
            listed = fetch.msgspec.json.decode(touched.read_bytes(), type=list[int]) if touched else []
        harness.say(f"round {number}: cold {cold[-1]:.2f} s, {shares[-1] / 1e6:.1f} MB; cached {cached[-1]:.2f} s")
        await shared.put_ahead(digest, listed)
        async with node(server.url) as client:
            ahead.append((await work(client, image))[0])
        await shared.put_ahead(digest, [])
        async with node(server.url, lazily=False) as client:
            whole.append((await work(client, image))[0])
        async with node(server.url) as client:
            await server.reset()
            await work(client, image, PYTHON[image], "45\n")
            plain.append((await server.stats())["bytes"])
    packed = pulled = None
    missing = {} if options.peers else {"targz": "not asked for", "docker_pull": "not asked for"}
    if options.peers:
        async with tree_of(store, digest) as tree:
            packer = await asyncio.create_subprocess_exec("tar", "-C", str(tree), "-czf", str(place / "remote/base.tar.gz"), ".")
            await packer.wait()
            try:
                pulled = await dockerpull.seconds(tree, WORKLOADS[image], ANSWER)
            except peers.Absent as why:
                missing["docker_pull"] = str(why)
        packed = await targz(place, server.url) + harness.percentile(cached, 50)
    middle = lambda values: harness.percentile(values, 50)  # noqa: E731
    return {
        "workload": "numpy import, gcc build, git commit" if image != "busybox" else "read 200 files",
        "image_mb": harness.rounded(size / 1e6, 1),
        "fetched_mb": harness.rounded(middle(shares) / 1e6, 1),
        "fetched_share": harness.rounded(middle(shares) / size, 3),
        "plain_python_share": harness.rounded(middle(plain) / size, 3),
        "ready_ms": harness.rounded(middle(readies), 1),
        "done_s": harness.rounded(middle(cold), 2),
        "prefetched_done_s": harness.rounded(middle(ahead), 2),
        "cached_s": harness.rounded(middle(cached), 2),
        "full_pull_s": harness.rounded(middle(whole), 2),
        "targz_s": harness.rounded(packed, 2),
        "docker_pull_s": harness.rounded(pulled, 2),
        "metadata_mb": harness.rounded(store.side(digest, ".erofs").stat().st_size / 1e6, 2),
        "delay_ms": options.delay_ms,
        "missing": missing,
        "features": facts,
        "driver": "libdsec over NATS, one Edge with an empty layer store",
    }


@asynccontextmanager
async def tree_of(store: LayerStore, digest: str) -> AsyncIterator[Path]:
    from dsec.layers.split import tree

    async with tree(store, digest) as found:
        yield found
