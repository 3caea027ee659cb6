"""What every benchmark shares: the cluster, the nonce that proves an answer, percentiles, facts of the machine, interleaving."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import libdsec
from dsec import syscalls, trees
from dsec.actors.up import Cluster
from dsec.backends.guest.build import FLAGS, compile_files, native_arch
from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import Heartbeat
from dsec.layers import mounts
from dsec.layers.bootstrap import bootstrap_debian, bootstrap_tiny
from dsec.layers.store import LayerStore

if TYPE_CHECKING:
    from argparse import Namespace

CACHE = Path(__file__).resolve().parent.parent / ".cache"
MIB = 1 << 20
_SETTLE = 0.1  # seconds between two measurements


class WrongAnswer(RuntimeError):
    """A command answered something else than the nonce that was made for it: the figure would be worth nothing."""


class Session:
    """A running cluster with one Edge, a client of it, and the name of the base layer."""

    def __init__(self, cluster: Cluster, client: libdsec.Client, store: LayerStore, image: str) -> None:
        self.cluster, self.client, self.store, self.image = cluster, client, store, image
        self.edge = next(iter(cluster.edges.values()))
        self.driver = "libdsec over NATS, container backend"

    def records(self) -> int:
        """Bytes of the Edge's records on disk."""
        return sum(path.stat().st_size for path in (self.cluster.dir / "edges" / self.edge.name).glob("*.db*"))

    def edge_rss(self) -> int:
        """Resident bytes of the Edge's process and of its holder's."""
        return rss(self.edge.pid) + sum(rss(pid) for pid in holders(str(self.cluster.dir)))

    @asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[list[Heartbeat]]:
        """Collects the Edge's heartbeats while the block runs, and waits for one more at its end: it tells of the last second."""
        beats: list[Heartbeat] = []
        bus = await Bus.connect(self.cluster.url, name="benchmark")
        try:
            await bus.subscribe(subjects.heartbeat_all(bus.unit), Heartbeat, lambda beat, _: beats.append(beat))
            yield beats
            await asyncio.sleep(1.1)
        finally:
            await bus.close()


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks. Raises `ValueError` of nothing."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def ratio(peer: float | None, ours: float) -> float | None:
    """How many times the peer's time is ours; None when there is no peer."""
    return None if peer is None else round(peer / ours, 2)


def environment() -> dict[str, object]:
    """Facts that a reader of the figures needs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def run(main: Coroutine[Any, Any, dict[str, object]]) -> dict[str, object]:
    """Run with uvloop where it is installed, as the actors do."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@asynccontextmanager
async def rootfs(session: Session) -> AsyncIterator[Path]:
    """The base layer as a read-only directory, for the peers."""
    plan = await session.store.mount_plan((await session.store.resolve(session.image)).digest)
    place = Path(tempfile.mkdtemp(prefix="dsec-bench-root-"))
    layer = await asyncio.to_thread(mounts.open_layer, plan)
    try:
        syscalls.move_mount(layer, str(place))
        try:
            yield place
        finally:
            syscalls.umount2(str(place), syscalls.MNT_DETACH)
    finally:
        os.close(layer)
        place.rmdir()


async def make_base(store: LayerStore, name: str) -> str:
    """The base layer's name, once it is in the store."""
    ref = await (bootstrap_tiny(store, progress=say) if name == "busybox" else bootstrap_debian(store, name=name, progress=say))
    return ref.name


@asynccontextmanager
async def session(
    options: Namespace, edge: Mapping[str, object] | None = None, rooms: Mapping[str, Mapping[str, object]] | None = None
) -> AsyncIterator[Session]:
    """A cluster of one node with an empty state directory, gone afterwards; the layer store in the cache stays. ``edge``: settings of
    the node's, beside the defaults; ``rooms``: of any other room of the configuration."""
    mark = f"bench-{secrets.token_hex(4)}"
    store = LayerStore(Path(options.cache) / "layers")
    image = await make_base(store, options.base)
    state = Path(tempfile.mkdtemp(prefix=f"dsec-{mark}-"))
    overrides: dict[str, dict[str, object]] = {
        "layers": {"store_dir": str(store.root)},
        "edge": {"orphan_grace_ms": 60_000} | dict(edge or {}),
    }
    overrides |= {room: dict(table) for room, table in (rooms or {}).items()}
    try:
        async with Cluster(state, edges=(mark,), overrides=overrides) as cluster, libdsec.connect(cluster.url) as client:
            session = Session(cluster, client, store, image)
            async with session.heartbeats() as beats:
                pass
            session.driver += f" ({beats[-1].drivers.get('container', 'no driver')})"
            yield session
    finally:
        await asyncio.to_thread(trees.clear, state)


async def program(options: Namespace, name: str) -> bytes:
    """A static program that a benchmark runs inside, compiled once from `<name>.c` here."""
    out, source = Path(options.cache) / f"{name}-{native_arch()}", Path(__file__).with_name(f"{name}.c")
    if not out.exists() or out.stat().st_mtime < max(source.stat().st_mtime, Path(__file__).stat().st_mtime):  # the flags are here
        out.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(compile_files, native_arch(), out, [source], FLAGS)
    return await asyncio.to_thread(out.read_bytes)


async def answered(sandbox: libdsec.Sandbox) -> float:
    """Run a command that must say a nonce made now; the milliseconds until it did."""
    word = secrets.token_hex(8)
    started = time.perf_counter()
    result = await sandbox.exec(["/bin/echo", word], timeout=60)
    took = (time.perf_counter() - started) * 1e3
    if result.exit_code != 0 or bytes(result.stdout) != f"{word}\n".encode():
        raise WrongAnswer(f"expected {word}, got {bytes(result.stdout)!r} (exit code {result.exit_code})")
    return took


async def features(session: Session, sandbox: libdsec.Sandbox) -> dict[str, object]:
    """What is switched on, read inside the sandbox from /proc, and what its node says that it cannot enforce."""
    script = (
        "cat /proc/self/uid_map | head -n 1; grep -E '^(Seccomp|NoNewPrivs|CapEff):' /proc/self/status;"
        " readlink /proc/self/ns/net; readlink /proc/self/ns/cgroup; grep ' / / ' /proc/self/mountinfo | head -n 1; df -k / | tail -n 1"
    )
    lines = (await sandbox.exec(script, timeout=60)).stdout.text.splitlines()
    if len(lines) < 8:
        raise WrongAnswer(f"facts of the sandbox are incomplete: {lines}")
    inside = dict(line.split(":", 1) for line in lines[1:4])
    info = await sandbox.info()
    return {
        "userns": lines[0].split() != ["0", "0", "4294967295"],
        "netns": lines[4] != os.readlink("/proc/self/ns/net"),
        "cgroupns": lines[5] != os.readlink("/proc/self/ns/cgroup"),
        "seccomp": inside["Seccomp"].strip() == "2",
        "no_new_privs": inside["NoNewPrivs"].strip() == "1",
        "capabilities": inside["CapEff"].strip(),
        "disk_limit": int(lines[7].split()[1]) * 1024 <= info.resources.disk,
        "durable_record": session.records() > 0,
        "cgroups": "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1",
        "root": lines[6].split(" - ")[1].split()[0] if " - " in lines[6] else "",
        "root_kib": int(lines[7].split()[1]),
        "limits": {"memory": info.resources.memory, "pids": info.resources.pids, "cpus": info.resources.cpus},
        "degraded": list(info.degraded),
    }


async def interleave(
    rounds: int, ways: Mapping[str, Callable[[], Awaitable[float]]], warm_up: int = 3, *, may_fail: Container[str] = ()
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Take every way once a round, in an order of chance and after a pause, so that a change of the machine's load meets all alike and
    nobody pays for what another's end leaves to do (a daemon's clean-up goes on after its answer). Warm-ups are not counted.

    Returns the milliseconds by way, and why a way of ``may_fail`` is missing: it is left out from its first failure on.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    names = list(ways)
    chance = random.Random(0)
    for number in range(-warm_up, rounds):
        for name in chance.sample(names, len(names)):
            if name in failed:
                continue
            await asyncio.sleep(_SETTLE)
            try:
                took = await ways[name]()
            except Exception as error:
                if name not in may_fail:
                    raise
                failed[name] = f"failed in round {number}: {error}"
                del times[name]
                say(f"{name}: {failed[name]}")
                continue
            if number >= 0:
                times[name].append(took)
    return times, failed


def rss(pid: int) -> int:
    """Resident bytes of a process, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def holders(mark: str) -> list[int]:
    """Processes whose command line bears the mark and names the holder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in command and b"holder" in command:
                found.append(int(entry.name))
    return found


def peak_rss(pid: int | str = "self") -> int:
    """Highest resident bytes that a process had (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
