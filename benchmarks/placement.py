"""Placement alone: many distinct specs over many simulated Edges, through a real nats-server and the production Scheduler.

The Edges admit by their ledger and acknowledge; nothing is launched and nothing is written. A sandbox counts once its id has arrived
at the client, which cuts and reads as libdsec does.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import libdsec
from benchmarks import harness
from dsec import trees
from dsec.actors.up import Cluster
from dsec.bus import subjects
from dsec.bus.bus import Bus
from dsec.bus.messages import BurstNews, ClusterView, CreateAck, CreateRequest
from dsec.bus.subjects import Caller
from dsec.model import SandboxSpec, new_ulid
from libdsec.plan import Ledger, slices

ABOUT = "32,000 placements over 160 simulated Edges, each id acknowledged at the client"
KEYS = ("n", "edges", "distinct_specs", "seconds", "per_s")
DEFAULTS = {"n": 32_000, "edges": 160, "specs": 10_667, "rounds": 3, "schedulers": 1}
CALLER = Caller("local", "default")


def make_specs(n: int, distinct: int) -> list[SandboxSpec]:
    """``n`` specs, ``distinct`` different ones, equal ones side by side: some three rollouts of each task, as the paper reports."""
    made = [
        libdsec.spec(
            f"registry/task-{number:05d}",
            workspace=f"repository-{number:05d}@3f2a",
            toolkits=["harness-12", "pytest-8"],
            backend="fake",
            env={"TASK": f"{number}", "LANG": "C.UTF-8"},
            labels={"job": "train-7", "task": f"t{number}"},
            memory=512 * harness.MIB,
        )
        for number in range(distinct)
    ]
    return [made[index * distinct // n] for index in range(n)]


@asynccontextmanager
async def simulated(
    url: str, edges: int, processes: int = 2, *, first: int = 0, more: tuple[str, ...] = ()
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """``edges`` simulated Edges in a few processes, while the block runs; ``more``: other options of dsec.actors.simulate."""
    children: list[asyncio.subprocess.Process] = []
    try:
        for number in range(processes):
            begin, end = edges * number // processes, edges * (number + 1) // processes
            arguments = ("--url", url, "--edges", str(end - begin), "--first", str(first + begin), *more)
            command = (sys.executable, "-m", "dsec.actors.simulate", *arguments)
            children.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
        for child in children:
            assert child.stdout is not None
            if not await asyncio.wait_for(child.stdout.readline(), 30):
                raise RuntimeError("the simulated Edges did not start")
        yield children
    finally:
        for child in children:
            if child.returncode is None:
                child.terminate()
        await asyncio.gather(*(child.wait() for child in children))


async def seen(bus: Bus, edges: int) -> None:
    """Until the Watcher's view holds all Edges."""
    complete = asyncio.Event()

    def look(view: ClusterView, _: object) -> None:
        if len(view.nodes) >= edges:
            complete.set()

    subscription = await bus.subscribe(subjects.view(bus.unit), ClusterView, look)
    await asyncio.wait_for(complete.wait(), 30)
    await subscription.unsubscribe()
    await asyncio.sleep(1.0)  # the Scheduler has the same view


async def place(bus: Bus, specs: list[SandboxSpec], where: Counter[str] | None = None) -> float:
    """One burst; the seconds until the last id was acknowledged, and in ``where`` how many each Edge took. Raises `WrongAnswer` unless
    every index has exactly one id."""
    inbox = bus.new_inbox()
    ledger = Ledger(len(specs))
    owned: set[str] = set()
    over = asyncio.Event()

    def take(news: BurstNews, _: object) -> None:
        owned.update(str(sandbox) for sandbox in ledger.take(news).claims)
        if len(owned) + len(ledger.errors) >= len(specs):
            over.set()

    subscription = await bus.subscribe(inbox, BurstNews, take)
    await bus.flush()
    gate = asyncio.Semaphore(4)
    burst = new_ulid()

    async def send(number: int, request: CreateRequest) -> None:
        await bus.call(subjects.api(bus.unit, "create", CALLER), request, CreateAck, timeout=10, request_id=f"{burst}-{number}")
        gate.release()

    started = time.perf_counter()
    sending = []
    for number, part in enumerate(slices(specs)):
        await gate.acquire()
        request = CreateRequest(burst=burst, slice=number, specs=part.specs, items=part.items, inbox=inbox, deadline_ms=60_000)
        sending.append(asyncio.create_task(send(number, request)))
        await asyncio.sleep(0)
    await asyncio.gather(*sending)
    await asyncio.wait_for(over.wait(), 60)
    seconds = time.perf_counter() - started
    await subscription.unsubscribe()
    if where is not None:
        where.update(sandbox.rpartition("-")[0] for sandbox in owned)
    if len(owned) != len(specs) or ledger.errors:
        raise harness.WrongAnswer(f"{len(owned)} ids for {len(specs)} placements: {[str(e) for e in list(ledger.errors.values())[:3]]}")
    return seconds


async def run(options: Namespace) -> dict[str, object]:
    specs = make_specs(options.n, options.specs)
    state = Path(tempfile.mkdtemp(prefix="dsec-bench-place-"))
    try:
        async with (
            Cluster(state, edges=(), schedulers=options.schedulers) as cluster,
            Bus.connect(cluster.url, name="benchmark") as bus,
            simulated(cluster.url, options.edges),
        ):
            await seen(bus, options.edges)
            gc.collect()
            gc.freeze()
            times, fullest = [], []
            where: Counter[str] = Counter()  # of all rounds: what one leaves uneven the next one evens out
            for number in range(options.rounds):
                times.append(await place(bus, specs, where))
                fullest.append(max(where.values()) * options.edges / options.n / (number + 1))
                await asyncio.sleep(1.5)  # two heartbeats: the next burst meets a view that shows this one
    finally:
        await asyncio.to_thread(trees.clear, state)
    seconds = harness.percentile(times, 50)
    return {
        "n": options.n,
        "edges": options.edges,
        "distinct_specs": len({id(spec) for spec in specs}),
        "seconds": harness.rounded(seconds, 3),
        "per_s": harness.rounded(options.n / seconds, 0),
        "fullest_to_mean": harness.rounded(max(fullest), 3),
        "fullest_rounds": [harness.rounded(value, 3) for value in fullest],
        "rounds_seconds": [harness.rounded(value, 3) for value in times],
        "features": {"admission_ledger": True, "launch": False, "disk": False, "edge_processes": 2, "schedulers": options.schedulers},
        "driver": "libdsec's slices over nats-server to the production Scheduler; simulated Edges",
    }
