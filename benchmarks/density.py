"""How many sandboxes one node holds, and what each costs when there are many: one base, limits enforced, all of them answering."""

from __future__ import annotations

import asyncio
import os
import random
import time
from argparse import Namespace
from collections.abc import Sequence

import libdsec
from benchmarks import harness, idle, machine
from dsec.bus.messages import Heartbeat

ABOUT = "N live sandboxes on one node: memory of each, what one more costs beside none, some and all, all stopped"
KEYS = (
    "live",
    "create_per_s",
    "create_ms_p50_first",
    "create_ms_p50_last",
    "mib_per_sandbox",
    "exec_ms_p50",
    "exec_ms_p99",
    "stop_all_s",
    "costs",
    "filling_loop_lag_ms_p99",
    "left",
    "left_after_end",
)
DEFAULTS = {"n": 10_000, "singles": 40, "execs": 500, "slice": 500, "watch": 20.0}
LEVELS = (1_000, 3_200)  # live sandboxes beside which the cost of one more is taken, besides none and all
LIMITS: libdsec.Options = {"memory": 32 * harness.MIB, "disk": 16 * harness.MIB, "pids": 32, "cpus": 0.15}


def roomy(n: int) -> dict[str, object]:
    """Settings of an Edge that admits ``n`` small sandboxes: their limits are promises that few of them use."""
    return {
        "slots": n + 64,
        "memory_overcommit": 64.0,
        "cpu_overcommit": 1_000.0,
        "pids_overcommit": 1000.0,
        "queue_max": max(20_000, n),
        "stop_parallel": 64,
    }


async def singles(session: harness.Session, spec: libdsec.SandboxSpec, n: int, keep: list[libdsec.Sandbox]) -> list[float]:
    """One create after another until its first exec answers, in milliseconds."""
    times = []
    for _ in range(n):
        started = time.perf_counter()
        sandbox = await session.client.create(spec)
        await harness.answered(sandbox)
        times.append((time.perf_counter() - started) * 1e3)
        keep.append(sandbox)
    return times


async def fill(session: harness.Session, spec: libdsec.SandboxSpec, n: int, live: list[libdsec.Sandbox], most: int) -> float:
    """``n`` more, in bursts of ``most``, each answering once; the seconds that took."""
    began, wanted = time.perf_counter(), len(live) + n
    while (missing := wanted - len(live)) > 0:
        made = await session.client.create_many(spec, min(most, missing), timeout=600)
        await asyncio.gather(*(harness.answered(sandbox) for sandbox in made))
        live += made
        if len(live) % 2000 < most:
            harness.say(f"{len(live)} live")
    return time.perf_counter() - began


async def stop(session: harness.Session, live: list[libdsec.Sandbox]) -> float:
    """Stop them all; the seconds that took."""
    began = time.perf_counter()
    outcomes = [
        outcome
        for at in range(0, len(live), 1000)  # a request has 30 s
        for outcome in await session.client.stop(ids=[sandbox.id for sandbox in live[at : at + 1000]])
    ]
    took = time.perf_counter() - began
    if wrong := [outcome for outcome in outcomes if outcome.error is not None]:
        raise harness.WrongAnswer(f"{len(wrong)} of {len(live)} were not stopped: {wrong[:3]}")
    return took


async def cost(session: harness.Session, spec: libdsec.SandboxSpec, live: list[libdsec.Sandbox], options: Namespace) -> dict[str, object]:
    """What one more costs beside those that live: create until its first exec answers, commands in any of them, its stop."""
    more: list[libdsec.Sandbox] = []
    creates = await singles(session, spec, options.singles, more)
    execs = [await harness.answered(random.choice(live or more)) for _ in range(options.execs)]
    stops = []
    for sandbox in more:
        began = time.perf_counter()
        await sandbox.stop()
        stops.append((time.perf_counter() - began) * 1e3)
    return {
        "live": len(live),
        "create_ms_p50": harness.rounded(harness.percentile(creates, 50)),
        "exec_ms_p50": harness.rounded(harness.percentile(execs, 50), 3),
        "exec_ms_p99": harness.rounded(harness.percentile(execs, 99), 3),
        "stop_ms_p50": harness.rounded(harness.percentile(stops, 50)),
    }


def lag(beats: Sequence[Heartbeat]) -> float | None:
    """How late the Edge's loop was, in ms: p99 of the worst moments of each second."""
    return harness.rounded(harness.percentile([beat.loop_lag_ms for beat in beats] or [0.0], 99))


async def before(session: harness.Session) -> machine.State:
    """What there is on a node that is warm, each of its zygotes with namespaces made ahead, as long as nothing lives there."""
    await stop(session, await session.client.create_many(libdsec.spec(session.image, **LIMITS), 4 * (os.cpu_count() or 1)))
    await asyncio.sleep(2.0)
    await asyncio.to_thread(machine.drop_caches)
    return await asyncio.to_thread(machine.look, [os.getpid(), session.edge.pid, *harness.holders(str(session.cluster.dir))])


async def run(options: Namespace) -> dict[str, object]:
    at_first = machine.look([os.getpid()])
    result = await measure(options)
    return result | {"left_after_end": await machine.left(at_first)}


async def measure(options: Namespace) -> dict[str, object]:
    async with harness.session(options, roomy(options.n + options.singles)) as session:
        spec = libdsec.spec(session.image, **LIMITS)
        async with session.client.sandbox(spec) as sandbox:  # what the first one warms is not the others' cost
            await harness.answered(sandbox)
            features = await harness.features(session, sandbox)
        empty = await before(session)
        live: list[libdsec.Sandbox] = []
        full = 0
        costs = [await cost(session, spec, live, options)]
        edge_before, seconds = session.edge_rss(), 0.0
        async with session.heartbeats() as heartbeats:
            for level in (*(level for level in LEVELS if level < options.n), options.n):
                seconds += await fill(session, spec, level - len(live), live, options.slice)
                await asyncio.sleep(2.0)
                full = len(heartbeats)  # what comes after the last level's is of a full node
                costs.append(await cost(session, spec, live, options))
            await asyncio.sleep(options.watch)
        edge_after = session.edge_rss()
        charged = idle.charged(session.edge.name)
        count = len(live)
        spent = (empty.available - machine.available()) / harness.MIB
        stopped = await stop(session, live)
        if still := await session.client.list():
            raise harness.WrongAnswer(f"{len(still)} of {count} are still there")
        del live
        remains = await machine.left(empty)
    return {
        "live": count,
        "create_per_s": harness.rounded(count / seconds, 1),
        "create_ms_p50_first": costs[0]["create_ms_p50"],
        "create_ms_p50_last": costs[-1]["create_ms_p50"],
        "mib_per_sandbox": harness.rounded(spent / count, 3),
        "exec_ms_p50": costs[-1]["exec_ms_p50"],
        "exec_ms_p99": costs[-1]["exec_ms_p99"],
        "stop_all_s": harness.rounded(stopped, 2),
        "costs": costs,
        "charged_mib_per_sandbox": harness.rounded(charged / harness.MIB / count, 3),
        "edge_kib_per_sandbox": harness.rounded((edge_after - edge_before) / 1024 / count, 1),
        "loop_lag_ms_p99": lag(heartbeats[full:]),
        "filling_loop_lag_ms_p99": lag(heartbeats[:full]),
        "left": remains,
        "features": features,
        "driver": session.driver,
    }
