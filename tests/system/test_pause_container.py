"""Pause and resume of real containers: memory to swap of the Edge's own and back, every kind of request, deaths, nothing left."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

import libdsec
from dsec.actors.up import Cluster
from dsec.backends.pause import Pauser
from dsec.config import PauseConfig
from dsec.layers.store import LayerStore
from dsec.model import State
from dsec.qos.cgroup import Cgroups, detect
from dsec.qos.swap import Swap, areas
from dsec.trees import clear
from tests.busybox_box import busybox
from tests.census import Census

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.needs("root", "cgroup", "oci", "guest"),
    pytest.mark.guest,
    pytest.mark.timeout(240),
]
SIZE = 24_000_000  # bytes that a process holds
OPTIONS: libdsec.Options = {"cpus": 1, "memory": "96MiB", "disk": "64MiB", "pids": 32, "idle_timeout": None}
# A process with the file's bytes in its memory, which says what they are when the fifo is written to.
HOLD = f"mkfifo /go; ( {{ cat /f; cat /go; }} | tail -c {SIZE} | sha256sum >/out; echo >/over ) </dev/null >/dev/null 2>&1 & "
# The same with bytes that are no file's.
HOLD_ONLY = (
    f"mkfifo /go; ( {{ head -c {SIZE} /dev/urandom; cat /go; }} | tail -c {SIZE} | wc -c >/out; echo >/over ) </dev/null >/dev/null 2>&1 & "
)


def able(place: Path, kinds: tuple[str, ...] = ("zram", "file")) -> str:
    """The kind of swap that this node can have; skips where it can have none."""
    why = ""
    for name in kinds:
        own = Swap(name, 64 << 20, str(place))
        try:
            own.open()
        except libdsec.Unsupported as error:
            why = str(error)
        else:
            own.close()
            return name
    pytest.skip(f"no swap can be made here: {why}")


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Zram, or a file where there is none."""
    return able(tmp_path_factory.mktemp("swap"))


def own_swap(cluster: Cluster) -> str:
    """What the Edge swaps to, of its own; "" when there is none."""
    own = Swap("off", 0, next(iter(cluster.edges.values())).config.edge.state_dir)
    own.open()
    return own.path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kind: str) -> AsyncIterator[Cluster]:
    """One Edge for most of the tests."""
    place = Path(tempfile.mkdtemp(prefix="dsec-t-", dir="/tmp"))
    try:
        async with cluster_with(place, f"t{secrets.token_hex(4)}", kind) as (cluster, _):
            yield cluster
    finally:
        await asyncio.to_thread(clear, place)


@pytest_asyncio.fixture(loop_scope="module")
async def sb(cluster: Cluster) -> AsyncIterator[libdsec.Sandbox]:
    async with libdsec.connect(cluster.url) as dsec, dsec.sandbox("busybox", **OPTIONS) as sandbox:
        yield sandbox


@asynccontextmanager
async def cluster_with(state_dir: Path, edge: str, kind: str) -> AsyncIterator[tuple[Cluster, libdsec.client.Client]]:
    cluster = Cluster(state_dir, edges=(edge,), overrides={"pause": {"swap": kind, "swap_bytes": 512 << 20}, "edge": {"sweep_ms": 100}})
    await busybox(LayerStore(cluster.layer_store))
    async with cluster, libdsec.connect(cluster.url) as dsec:
        yield cluster, dsec
    assert own_swap(cluster) == ""


async def hold(sb: libdsec.Sandbox) -> str:
    """Memory of random bytes in one of its processes; their sum."""
    await sb.exec(f"head -c {SIZE} /dev/urandom >/f", check=True)
    await sb.exec(HOLD, check=True)
    want = (await sb.exec("sha256sum </f", check=True)).stdout.text
    await filled(sb)
    return want


async def filled(sb: libdsec.Sandbox) -> None:
    """Waits until tail has read it all: it waits for the fifo then."""
    async with asyncio.timeout(60):
        while int((await sb.exec("grep VmRSS /proc/$(pidof tail)/status | tr -dc 0-9")).stdout.text or 0) < SIZE // 1024:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.05)


async def held(sb: libdsec.Sandbox) -> str:
    return (await sb.exec(": >/go; until [ -e /over ]; do sleep 0.02; done; cat /out", check=True, timeout=120)).stdout.text


async def test_memory_goes_to_swap_and_comes_back(sb: libdsec.Sandbox, kind: str) -> None:
    """Paused, a process's memory and the files of a tmpfs lie in swap and the node has them back; resumed, each byte is as it was."""
    want = await hold(sb)
    before = (await sb.info()).usage
    paused = await sb.pause()
    info = await sb.info()
    assert info.state is State.PAUSED
    assert info.paused == paused
    assert info.usage is not None
    assert before is not None
    assert paused.note == ""
    assert paused.swapped >= SIZE * 0.9
    assert before.memory - info.usage.memory >= SIZE * 0.9
    if kind == "file":
        assert paused.released >= SIZE * 0.9
    else:  # random bytes do not shrink: what zram takes for them is no gain, and is not called one
        assert paused.released <= (before.memory - info.usage.memory) * 0.7
    assert (await sb.pause()).swapped == paused.swapped
    assert await held(sb) == want
    assert (await sb.info()).paused is None


def memory_group(sb: libdsec.Sandbox) -> Path:
    """Its memory group, on v1; skips on v2."""
    hierarchy = detect()
    if hierarchy.version == 2:
        pytest.skip("cgroup v2: memory.reclaim does at once what takes a second step and a limit on v1")
    (found,) = Path(hierarchy.roots["memory"]).glob(f"*/*/{sb.id.rpartition('-')[2]}")
    return found


async def test_a_swap_file_gives_memory_back_at_once(state_dir: Path, edge_name: str) -> None:
    """Paused to a file, memory that only a process holds is the node's again when the pause answers: what is written does not stay in
    the swap cache."""
    kind = able(state_dir, ("file",))
    async with cluster_with(state_dir, edge_name, kind) as (_, dsec), dsec.sandbox("busybox", **OPTIONS) as sb:
        await sb.exec(HOLD_ONLY, check=True)
        await filled(sb)
        memory_group(sb)
        before = (await sb.info()).usage
        paused = await sb.pause()
        after = (await sb.info()).usage
        assert before is not None
        assert after is not None
        assert paused.swapped >= SIZE * 0.9
        assert before.memory - after.memory >= SIZE * 0.9
        assert await held(sb) == f"{SIZE}\n"


async def test_a_limit_that_a_dead_edge_left_low_is_put_right(sb: libdsec.Sandbox) -> None:
    """A pause changes its group's limit for a moment only; where an Edge died in that moment, the resume restores it."""
    group = memory_group(sb)
    file = group / "memory.limit_in_bytes"
    whole = file.read_text()
    order = (group / "memory.swappiness").read_text()
    await sb.exec(f"head -c {SIZE} /dev/urandom >/f", check=True)
    await sb.pause()
    assert file.read_text() == whole
    assert (group / "memory.swappiness").read_text() == order
    file.write_text(str(int(whole) // 2))
    assert file.read_text() != whole
    await sb.exec("true", check=True)
    assert file.read_text() == whole


async def test_a_node_that_does_not_start_leaves_no_swap(tmp_path: Path, kind: str) -> None:
    """What this start made is removed; what an earlier Edge left, where memory may lie, stays."""
    groups, config = Cgroups(f"dsec/t{secrets.token_hex(4)}", detect()), PauseConfig(swap=kind, swap_bytes=16 << 20)
    first = Pauser(groups, config, str(tmp_path))
    await first.open()
    path = first.swap.path
    again = Pauser(groups, config, str(tmp_path))
    await again.open()
    assert again.swap.path == path
    await again.undo()
    assert path in [area.path for area in areas()]
    await first.undo()
    assert path not in [area.path for area in areas()]
    assert first.swap.path == ""


async def test_c27_c30_five_cycles_with_writes(sb: libdsec.Sandbox) -> None:
    """Files written between pauses are all there after each resume, and the tree's hash is what it was before the pause."""
    tree = "find /data -type f -exec sha256sum {} + | sort | sha256sum"
    await sb.exec("mkdir /data")
    for number in range(5):
        await sb.exec(f"head -c 300000 /dev/urandom >/data/{number}; sync", check=True)
        want = (await sb.exec(tree, check=True)).stdout
        await sb.pause()
        assert (await sb.exec(tree, check=True)).stdout == want
    assert (await sb.exec("ls /data")).stdout.text.split() == [str(number) for number in range(5)]


async def test_c33_any_request_resumes(sb: libdsec.Sandbox) -> None:
    """A command, a file, a shell that was open, a connection that was open and a new one: each finds the sandbox as it was."""
    server = sb.start("while true; do nc -l -p 8000 -e cat; done")
    async with server, sb.session() as shell:
        await shell.run("cd /tmp; word=kept")
        await sb.exec("until netstat -tln | grep -q 8000; do sleep 0.05; done", check=True)
        async with sb.connect(8000) as connection:
            await connection.send(b"before")
            assert await connection.receive() == b"before"
            await sb.pause()
            await connection.send(b"after")
            assert await connection.receive() == b"after"
        await sb.pause()
        assert (await shell.run("echo $word $PWD")).stdout == b"kept /tmp\n"
        await sb.pause()
        await sb.files.write("/f", b"x")
        await sb.pause()
        assert await sb.files.read("/f") == b"x"
        await sb.pause()
        found = await asyncio.gather(*(sb.exec(f"echo {number}") for number in range(20)))
        assert [result.stdout.text.strip() for result in found] == [str(number) for number in range(20)]
    story = await sb.log()
    assert sum("paused -> resuming" in line for line in story) == 5


async def test_time_outs_stand_still(sb: libdsec.Sandbox) -> None:
    """A command paused for longer than its time-out ends as it would have, and its client, which waits, hears so; one that was asked to
    be over by the clock is over."""
    await sb.exec("mkfifo /go", check=True)
    running = asyncio.create_task(sb.exec("read word </go; echo $word", timeout=5))
    by_clock = asyncio.create_task(sb.exec("sleep 600", timeout=5, wall_timeout=True))
    await asyncio.sleep(0.3)
    await sb.pause()
    await asyncio.sleep(6)
    assert (await sb.info()).state is State.PAUSED
    await sb.exec("echo in time >/go", check=True)
    result = await running
    assert (result.stdout, result.timed_out) == (b"in time\n", False)
    assert (await by_clock).timed_out


async def test_c28_c29_idle_pauses_race_with_writes(cluster: Cluster) -> None:
    """Paused each time that nobody uses it for a moment, while it is written to and synced: all is there; resumes and pauses again and
    right after each other are fine."""
    options: libdsec.Options = {**OPTIONS, "idle_timeout": 0.05}
    async with libdsec.connect(cluster.url) as dsec, dsec.sandbox("busybox", **options) as sb:
        for number in range(12):
            await sb.exec(f"head -c 20000 /dev/urandom | tee /new | sha256sum >>/sums; sync; mv /new /{number}", check=True)
            await asyncio.sleep(0.05 * (number % 4))
        async with asyncio.timeout(60):
            while (await sb.info()).state is not State.PAUSED:  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0.05)
        want = (await sb.files.read("/sums")).split(b"\n")
        found = (await sb.exec("for n in $(seq 0 11); do sha256sum </$n; done", check=True)).stdout.split(b"\n")
        assert found == want
        for _ in range(3):
            await asyncio.gather(sb.pause(), sb.pause())
            await asyncio.gather(sb.resume(), sb.resume())
        assert (await sb.exec("echo here")).stdout == b"here\n"


async def test_a_job_through_kill_9_of_its_edge(state_dir: Path, edge_name: str, leftovers: Census, kind: str) -> None:
    """Killed in the middle of a job's pause, and again when all is paused: adopted as paused on the swap that is there, resumed whole,
    stopped while paused; and then neither processes nor swap are left."""
    async with cluster_with(state_dir, edge_name, kind) as (cluster, dsec):
        options: libdsec.Options = {**OPTIONS, "labels": {"job": "j"}}
        spec = libdsec.spec("busybox", **options)
        made = await dsec.create_many(spec, 6)
        sums = await asyncio.gather(*(hold(sb) for sb in made[:2]))
        edge = cluster.edges[edge_name]
        pausing = asyncio.create_task(dsec.pause(labels={"job": "j"}, parallel=2))
        await asyncio.sleep(0.05)
        await edge.kill()
        mine = own_swap(cluster)
        assert mine
        await edge.start()
        results = await pausing
        assert len(results) == 6
        assert all(result.ok for result in results), [result.error for result in results]
        assert own_swap(cluster) == mine
        await edge.kill()
        await edge.start()
        assert {info.state for info in await dsec.list({"job": "j"})} == {State.PAUSED}
        assert own_swap(cluster) == mine
        assert [await held(sb) for sb in made[:2]] == sums
        assert {info.state for info in await dsec.list(ids=[sb.id for sb in made[2:]])} == {State.PAUSED}
        results = await dsec.stop(labels={"job": "j"})
        assert all(result.ok for result in results)
        assert await dsec.list() == []
