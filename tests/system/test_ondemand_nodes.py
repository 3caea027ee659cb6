"""Sandboxes on a base that is not there yet: whoever is killed while they read, their bytes are the source's."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsec import doctor
from dsec.backends.base import LaunchPlan
from dsec.errors import DsecError
from dsec.layers import importer
from dsec.layers.fetch import NodeLayers, push
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.model import MIB, ExecSpec, ExitReason, LayerRef, Resources
from dsec.trees import clear
from tests.fixtures_backend import Yard, build_small_base
from tests.layer_box import Server

pytestmark = [pytest.mark.needs("erofs_file", "overlay_fd"), pytest.mark.timeout(180)]
both_ways = pytest.mark.parametrize("way", ["fanotify", "fuse"])
both_ways_slowly = pytest.mark.parametrize("way", ["fanotify", pytest.param("fuse", marks=pytest.mark.slow)])
ROOT = Path(__file__).resolve().parents[2]
SMALL = Resources(memory=64 * MIB, disk=16 * MIB, inodes=1024, pids=32)
FILES = ("/data0", "/data1", "/data2")
HASH = "python3 -S -c 'import hashlib, sys; [print(hashlib.sha256(open(name, \"rb\").read()).hexdigest()) for name in sys.argv[1:]]' "

EDGE = """
import asyncio, json, msgspec, os, sys
sys.path.insert(0, sys.argv[5])
from pathlib import Path
from dsec.layers.fetch import NodeLayers
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.model import ExecSpec, LayerRef, MIB, Resources
from tests.fixtures_backend import Yard
async def main():
    yard = Yard("container", sys.argv[1], Path(sys.argv[2]), None)
    yard.layers = NodeLayers(LayerStore(Path(sys.argv[2]) / "layers"), RemoteStore(sys.argv[3]))
    yard.mount = "by yard.layers"
    backend = await yard.backend(holder_linger=5.0, remote=True)
    await yard.layers.ensure(["base"])
    small = Resources(memory=64 * MIB, disk=16 * MIB, inodes=1024, pids=32)
    plan = yard.plan(backend.node, base=yard.layers.lookup("base"), resources=small)
    box = await backend.launch(plan)
    await box.link.start("ab" * 16, ExecSpec(argv=("/bin/sh", "-c", sys.argv[4])))
    print(msgspec.json.encode(plan).decode(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


class Base:
    """The small base with 4.5 MB of random data in a remote store, behind a web server."""

    def __init__(self, place: Path) -> None:
        build_small_base(place / "tree")
        self.hashes = []
        for name in FILES:
            data = os.urandom(3 << 19)
            (place / f"tree{name}").write_bytes(data)
            (place / f"tree{name}-after").write_bytes(os.urandom(5 << 20))  # more than is read ahead: the next file stays cold
            self.hashes.append(hashlib.sha256(data).hexdigest())
        self.remote = RemoteStore(str(place / "remote"), make=True)
        self.digest = asyncio.run(self._push(place))
        self.server = Server(place / "remote")

    async def _push(self, place: Path) -> str:
        store = LayerStore(place / "store")
        await importer.import_dir(store, place / "tree", "base")
        return (await push(store, self.remote, "base")).digest


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("cold")
    made = Base(place)
    yield made
    made.server.close()
    clear(place)


@pytest.fixture
def way() -> str:
    """What holds readers back here; `both_ways` overrides it."""
    return "fanotify"


@pytest.fixture
async def cold(yard: Yard, base: Base, way: str, monkeypatch: pytest.MonkeyPatch) -> Yard:
    """A node that has nothing of the base."""
    if sentence := doctor.reason(way):
        pytest.skip(sentence)
    if way == "fuse":
        monkeypatch.setenv("DSEC_DISABLE", "fanotify")
    base.server.delay, base.server.held = 0.0, False
    base.server.log.clear()
    base.server.asked.clear()
    yard.layers = NodeLayers(LayerStore(yard.state / "layers"), RemoteStore(base.server.url))
    return yard


async def prepared(yard: Yard) -> tuple[Any, LayerRef]:
    backend = await yard.backend(remote=True)
    await yard.layers.ensure(["base"])
    return backend, yard.layers.lookup("base")


async def hashed(box: Any, *names: str) -> list[str]:
    op = os.urandom(16).hex()
    await box.link.start(op, ExecSpec(argv=("/bin/sh", "-c", HASH + " ".join(names or FILES))))
    status = await box.link.wait(op, 60)
    assert status.exit_code == 0, status.stderr.data()
    return str(status.stdout.data().decode()).split()


@both_ways
async def test_many_sandboxes_on_one_cold_base_fetch_each_chunk_once(leftovers: object, cold: Yard, base: Base) -> None:
    """They start before their base has come, and each reads all of its data right."""
    backend, ref = await prepared(cold)
    plans = [cold.plan(backend.node, base=ref, resources=SMALL) for _ in range(8)]
    gate = asyncio.Semaphore(8)

    async def one(plan: LaunchPlan) -> list[str]:
        async with gate:
            box = await backend.launch(plan)
        return await hashed(box)

    found = await asyncio.gather(*(one(plan) for plan in plans))
    assert all(hashes == base.hashes for hashes in found)
    chunks = base.server.chunks()
    assert len(chunks) == len(set(chunks))


@both_ways
async def test_holder_and_worker_killed_in_the_middle_of_a_read(leftovers: object, cold: Yard, base: Base) -> None:
    """The Edge's copies keep readers waiting; the next holder and its worker serve them."""
    backend, ref = await prepared(cold)
    cold.layers.patience = 60.0
    box = await backend.launch(cold.plan(backend.node, base=ref, resources=SMALL))
    await hashed(box, "/etc/passwd")  # Python itself is there now
    for name, right, victims in zip(FILES, base.hashes, ({"worker"}, {"holder"}, {"worker", "holder"}), strict=True):
        pids = {"worker": (await backend._holder.request("ondemand"))["pid"], "holder": (await backend._holder.request("hello"))["pid"]}
        base.server.asked.clear()
        base.server.held = True  # so that nothing comes of what is asked, also by a worker that is to be replaced
        work = asyncio.create_task(hashed(box, name))
        assert await asyncio.to_thread(base.server.asked.wait, 30)
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        await replaced(backend, pids["worker"])
        base.server.held = False
        assert await work == [right]
    await box.stop()


async def replaced(backend: Any, worker: int) -> None:
    """Another worker serves, and that one is gone."""
    end = asyncio.get_running_loop().time() + 50
    while asyncio.get_running_loop().time() < end:
        with contextlib.suppress(DsecError):
            await backend._ensure_holder()
            if (await backend._holder.request("ondemand"))["pid"] not in (0, worker) and not os.path.exists(f"/proc/{worker}"):
                return
        await asyncio.sleep(0.05)
    raise AssertionError("nobody takes over")


@both_ways_slowly
async def test_edge_killed_in_the_middle_of_a_read(leftovers: object, cold: Yard, base: Base) -> None:
    """Readers go on without an Edge; the next one adopts the sandbox and finds the right answer."""
    base.server.delay = 0.02
    arguments = [cold.edge, str(cold.state), base.server.url, HASH + " ".join(FILES), str(ROOT)]
    edge = await asyncio.create_subprocess_exec(sys.executable, "-c", EDGE, *arguments, stdout=subprocess.PIPE, cwd=ROOT)
    assert edge.stdout is not None
    plan = msgspec.json.decode(await edge.stdout.readline(), type=LaunchPlan)
    edge.kill()
    await edge.wait()
    next(cold.generations)
    backend = await cold.backend(remote=True)
    box = await backend.adopt(plan)
    assert box is not None
    status = await box.link.wait("ab" * 16, 60)
    assert status.stdout.data().decode().split() == base.hashes
    await box.stop()


@pytest.mark.parametrize(
    ("worker_too", "way"),
    [
        pytest.param(False, "fanotify", id="worker-lives"),
        pytest.param(True, "fanotify", id="all-three"),
        pytest.param(True, "fuse", id="all-three-fuse"),
        pytest.param(False, "fuse", id="worker-lives-fuse", marks=pytest.mark.slow),
    ],
)
async def test_edge_and_holder_killed_together(leftovers: object, cold: Yard, base: Base, worker_too: bool) -> None:
    """While the worker lives it completes the layer and the sandbox is adopted; when all three died it ends as broken."""
    first, ref = await prepared(cold)
    plan = cold.plan(first.node, base=ref, resources=SMALL)
    await first.launch(plan)
    worker = (await first._holder.request("ondemand"))["pid"]
    holder = (await first._holder.request("hello"))["pid"]
    await first.close()
    for name in list(first._holder.kits):
        first._holder.drop_kit(name)
    os.kill(holder, signal.SIGKILL)
    if worker_too:
        os.kill(worker, signal.SIGKILL)
    second = await cold.backend(remote=True)
    box = await second.adopt(plan)
    if worker_too:
        assert box is None
        assert (await second.last_exit(plan.ulid)).reason is ExitReason.BROKEN
        assert await second.reap(frozenset()) == (plan.ulid,)
    else:
        assert box is not None
        assert await hashed(box) == base.hashes
        await box.stop()
    fresh = await second.launch(cold.plan(second.node, base=ref, resources=SMALL))
    assert await hashed(fresh) == base.hashes
    await fresh.stop()


@both_ways_slowly
async def test_the_cache_makes_room_by_layers_that_no_sandbox_stands_on(leftovers: object, cold: Yard, base: Base) -> None:
    """A mounted layer stays while its sandbox lives, and goes afterwards; the next sandbox fetches it again."""
    backend, ref = await prepared(cold)
    cold.layers.cache, cold.layers.release = 1, backend.drop_layer
    box = await backend.launch(cold.plan(backend.node, base=ref, resources=SMALL))
    assert await hashed(box, FILES[0]) == base.hashes[:1]
    assert await cold.layers.evict() == ()
    await box.stop()
    assert await cold.layers.evict() == (ref.digest,)
    assert (await backend._holder.request("ondemand"))["layers"] == []
    await cold.layers.fetch("base")
    box = await backend.launch(cold.plan(backend.node, base=ref, resources=SMALL))
    assert await hashed(box, FILES[0]) == base.hashes[:1]
    await box.stop()


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["fanotify", "fanotify,overlay_fd"])
async def test_a_whole_layer_leaves_fuse_when_the_last_sandbox_behind_it_ends(
    leftovers: object, cold: Yard, base: Base, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sandbox stands on the plain file; the loader serves the first one to its end, and then nothing."""
    monkeypatch.setenv("DSEC_DISABLE", lacking)
    backend, ref = await prepared(cold)
    first = await backend.launch(cold.plan(backend.node, base=ref, resources=SMALL))
    assert cold.layers.way == "fuse"
    await cold.layers.pull(ref.digest)
    assert await hashed(first) == base.hashes
    await asyncio.sleep(1.5)  # the loader looks every half second
    second = await backend.launch(cold.plan(backend.node, base=ref, resources=SMALL))
    assert await hashed(second) == base.hashes
    await asyncio.sleep(35)  # the mount that was replaced is kept for launches under way
    assert (await backend._holder.request("ondemand"))["layers"] == [ref.digest]
    await first.stop()
    for _ in range(100):
        if (await backend._holder.request("ondemand"))["layers"] == []:
            break
        await asyncio.sleep(0.1)
    assert (await backend._holder.request("ondemand"))["layers"] == []
    assert backend._holder.kits == {}
    assert await hashed(second) == base.hashes
    await second.stop()
