"""The main job: a burst of sandboxes, a recorded agent trajectory in each, a few that misbehave, and a table of what became of all.

    python -m examples.demo            (as root; `make demo` sets the machine up first)
    python -m examples.demo --json     progress on stderr, one JSON object as the last line of stdout
    python -m examples.demo --store .cache/store   the node has no layer: they come from a shared store (also s3://…) as they are read

An embedded cluster is started for it and ended with it. Exit code 0 only if every sandbox did what it should and nothing is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import libdsec
from dsec import trees
from dsec.actors.up import Cluster
from dsec.errors import DsecError
from dsec.layers.bootstrap import bootstrap_debian
from dsec.layers.fetch import push
from dsec.layers.importer import import_dir
from dsec.layers.remote import RemoteStore
from dsec.layers.store import LayerStore
from dsec.model import MIB
from examples import assets, leftovers
from examples.misbehave import COMMANDS, Verdict, misbehave
from examples.report import Reporter, Row, percentile
from examples.trajectory import Outcome, Trajectory, replay

MEMORY = 128 * MIB
DISK = 48 * MIB
PIDS = 64
CACHE = Path(__file__).resolve().parent.parent / ".cache"
AGENT = "agent"


class Member(msgspec.Struct):
    """One sandbox of the burst: what it is there for and how it went."""

    role: str
    create_ms: float
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    problems: list[str] = []

    def all_problems(self) -> list[str]:
        parts = (self.outcome.problems if self.outcome else [], self.verdict.problems if self.verdict else [], self.problems)
        return [f"{self.role}: {text}" for part in parts for text in part]


class Summary(msgspec.Struct):
    """What ``--json`` prints."""

    ok: bool
    sandboxes: int
    as_expected: int
    seconds: float
    burst_seconds: float
    groups: list[Row]
    layers_mb: float  # what the layers hold, and what of it came to the node; 0 without --store
    fetched_mb: float
    left_over: dict[str, int]
    machine_before: dict[str, int]
    machine_after: dict[str, int]
    problems: list[str]


def role_of(order: int) -> str:
    """Every eighth sandbox misbehaves, in turn in each of the four ways; the rest are agents."""
    kinds = list(COMMANDS)
    return kinds[order // 8 % len(kinds)] if order % 8 == 7 else AGENT


def rows(members: list[Member]) -> list[Row]:
    """The table, one row for each role that occurs."""
    table = []
    calm = max((member.verdict.ended for member in members if member.verdict), default=0.0)
    for role in (AGENT, *COMMANDS):
        group = [member for member in members if member.role == role]
        if not group:
            continue
        probes = [probe for member in group if member.outcome for probe in member.outcome.probes]
        times = [ms for _, ms in probes]
        passed = [member for member in group if not member.all_problems()]
        if role == AGENT:
            during, after = (percentile([ms for when, ms in probes if (when <= calm) is early], 99) for early in (True, False))
            became = f"replayed, tests mended in {len(passed)}"
            if during is not None and after is not None:
                became += f"; exec p99 {during:.0f} ms while others misbehaved, {after:.0f} ms afterwards"
            seconds = max((member.outcome.seconds for member in group if member.outcome), default=0.0)
        else:
            became = "; ".join(sorted({member.verdict.text for member in group if member.verdict and member.verdict.text}))
            seconds = max((member.verdict.seconds for member in group if member.verdict), default=0.0)
        create = percentile([member.create_ms for member in group], 50) or 0.0
        table.append(
            Row(role, len(group), len(passed), create, percentile(times, 50), percentile(times, 99), seconds, became or "see the problems")
        )
    return table


async def make_layers(trajectory: Trajectory, cache: Path, say: Reporter) -> tuple[str, str, str]:
    """Base, workspace and toolkit in the layer store; what the cache has is not made again. Returns their names."""
    store = LayerStore(cache / "layers")
    base = await bootstrap_debian(store, progress=say.say)
    workspace = await asyncio.to_thread(assets.workspace_tree, trajectory, cache / "demo")
    toolkit = await asyncio.to_thread(assets.toolkit_tree, trajectory, cache / "demo")
    source = trajectory.workspace
    first = await import_dir(store, workspace, f"{source.project}-{source.version}-bug")
    second = await import_dir(store, toolkit, "toolkit-pytest")
    return base.name, first.name, second.name


async def share(names: Sequence[str], cache: Path, url: str, say: Reporter) -> None:
    """Upload the layers to a store that nodes share; what is there stays."""
    remote = RemoteStore(url, make=True)
    for name in names:
        await push(LayerStore(cache / "layers"), remote, name, progress=say.say)


def fetched(store: Path) -> tuple[float, float]:
    """MB that the node's layers hold, and what of it is on the node."""
    sizes = [(path.stat().st_size, path.stat().st_blocks * 512) for path in (store / "blobs").glob("*.data")]
    return round(sum(size for size, _ in sizes) / 1e6, 1), round(sum(there for _, there in sizes) / 1e6, 1)


async def run_member(
    sandbox: libdsec.Sandbox, member: Member, trajectory: Trajectory, gate: asyncio.Semaphore, on_step: Callable[[], None]
) -> None:
    try:
        if member.role == AGENT:
            member.outcome = await replay(trajectory, sandbox, gate, on_step)
        else:
            member.verdict = await misbehave(sandbox, member.role, PIDS, MEMORY)
            on_step()
    except DsecError as error:
        member.problems.append(f"{type(error).__name__}: {error}")


async def job(url: str, layers: tuple[str, str, str], trajectory: Trajectory, count: int, say: Reporter) -> tuple[list[Member], float]:
    """The burst and all that happens in it; every sandbox is stopped when this returns."""
    image, workspace, toolkit = layers
    spec = libdsec.spec(
        image,
        workspace=workspace,
        toolkits=[toolkit],
        cpus=1,
        memory=MEMORY,
        disk=DISK,
        pids=PIDS,
        env=trajectory.environment,
        workdir=f"/{trajectory.workspace.target}",
        labels={"job": "demo"},
    )
    gate = asyncio.Semaphore(2 * (os.cpu_count() or 1))
    members: list[Member] = []
    async with libdsec.connect(url) as dsec:
        started = time.perf_counter()
        say.say(f"burst of {count}: {image} + {workspace} + {toolkit}")
        async with dsec.burst(spec, count, deadline=120) as burst:
            with say.bar("sandboxes ready", count) as created:
                pairs = []
                async for sandbox in burst:
                    member = Member(role_of(len(members)), (time.perf_counter() - started) * 1e3, problems=[])
                    members.append(member)
                    pairs.append((sandbox, member))
                    created.step()
            took = time.perf_counter() - started
            say.say(f"{len(members)} ready in {took:.2f} s ({len(members) / took:.0f}/s)")
            calls = sum(len(trajectory.steps) if member.role == AGENT else 1 for _, member in pairs)
            with say.bar("tool calls answered", calls) as answered:
                tasks = [asyncio.create_task(run_member(sandbox, member, trajectory, gate, answered.step)) for sandbox, member in pairs]
                await asyncio.gather(*tasks)
            for index, error in burst.failed:
                members.append(Member(AGENT, 0.0, problems=[f"sandbox {index} was not created: {error}"]))
    return members, took


async def run(count: int, say: Reporter, cache: Path, store: str = "") -> Summary:
    """Start a cluster, run the job, end the cluster, count what is left. ``store``: the node begins without any layer, and reads them from
    there."""
    started = time.perf_counter()
    trajectory = Trajectory.load()
    mark = f"demo-{secrets.token_hex(4)}"
    before = leftovers.totals()
    state = Path(tempfile.mkdtemp(prefix=f"dsec-{mark}-"))
    members: list[Member] = []
    took = layers_mb = fetched_mb = 0.0
    problems: list[str] = []
    node_store = cache / "layers"
    try:
        layers = await make_layers(trajectory, cache, say)
        say.say("starting nats-server, Scheduler, Watcher and one Edge")
        overrides: dict[str, dict[str, object]] = {"layers": {"store_dir": str(node_store)}}
        if store:
            await share(layers, cache, store, say)
            node_store = Path(tempfile.mkdtemp(prefix=f"dsec-{mark}-", dir=cache))  # on the disk that holds layers, not in memory
            overrides = {"layers": {"store_dir": str(node_store), "remote": store}}
        async with Cluster(state, edges=(mark,), overrides=overrides) as cluster:
            members, took = await job(cluster.url, layers, trajectory, count, say)
            if store:
                layers_mb, fetched_mb = fetched(node_store)
                say.say(f"of {layers_mb} MB in the store's layers {fetched_mb} MB came to the node")
            say.say("stopping")
    except DsecError as error:
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        await asyncio.to_thread(trees.clear, state)
        if store and node_store != cache / "layers":
            await asyncio.to_thread(trees.clear, node_store)
    left = await gone(mark, state)
    problems += [text for member in members for text in member.all_problems()]
    problems += [f"left over: {line}" for name in left.__struct_fields__ for line in getattr(left, name)]
    passed = sum(1 for member in members if not member.all_problems())
    return Summary(
        ok=passed == count == len(members) and not left.any() and not problems,
        sandboxes=len(members),
        as_expected=passed,
        seconds=round(time.perf_counter() - started, 2),
        burst_seconds=round(took, 3),
        groups=rows(members),
        layers_mb=layers_mb,
        fetched_mb=fetched_mb,
        left_over=left.counts(),
        machine_before=before,
        machine_after=leftovers.totals(),
        problems=problems,
    )


async def gone(mark: str, state: Path) -> leftovers.Traces:
    """What is left once the last processes had two seconds to be reaped."""
    for _ in range(20):
        left = await asyncio.to_thread(leftovers.traces, mark, state)
        if not left.any():
            break
        await asyncio.sleep(0.1)
    return left


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="a burst of sandboxes replays a recorded agent trajectory")
    parser.add_argument("--n", type=int, default=64, help="how many sandboxes (default 64); every eighth misbehaves on purpose")
    parser.add_argument("--json", action="store_true", help="progress on stderr, one JSON object as the last line of stdout")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where layers and downloads are kept (default .cache in the checkout)")
    parser.add_argument(
        "--store", default="", metavar="DIR|URL", help="share the layers there, and begin with a node that has none of them"
    )
    return parser.parse_args(arguments)


def store_url(text: str) -> str:
    """A directory by its whole path; the node does not start where this program does."""
    return text if "://" in text or not text else os.path.abspath(text)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if os.geteuid() != 0:
        print("the demo makes namespaces, mounts and cgroups: run it as root", file=sys.stderr)
        return 2
    say = Reporter(sys.stderr if options.json else sys.stdout)
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(run(options.n, say, options.cache, store_url(options.store)))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            summary = loop.run_until_complete(task)
        except asyncio.CancelledError:
            say.say("interrupted: everything was stopped")
            return 130
    say.table(summary.groups)
    for text in summary.problems[:20]:
        say.say(f"PROBLEM {text}")
    say.say(
        f"{'ok' if summary.ok else 'NOT OK'}: {summary.as_expected} of {summary.sandboxes} as expected in {summary.seconds:.1f} s; "
        f"left over: {', '.join(f'{count} {name}' for name, count in summary.left_over.items())}"
    )
    if options.json:
        print(msgspec.json.encode(summary).decode(), flush=True)
    return 0 if summary.ok else 1


if __name__ == "__main__":
    sys.exit(main())
