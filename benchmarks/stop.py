"""The end of sandboxes: one after another, and a thousand at once."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace

import libdsec
from benchmarks import density, harness, machine

ABOUT = "stop of one sandbox after another, and of N in one request"
KEYS = ("stop_ms_p50", "stop_1000_s")
DEFAULTS = {"n": 1_000, "singles": 100}


async def run(options: Namespace) -> dict[str, object]:
    async with harness.session(options, density.roomy(options.n + options.singles)) as session:
        spec = libdsec.spec(session.image, **density.LIMITS)
        async with session.client.sandbox(spec) as sandbox:
            await harness.answered(sandbox)
            features = await harness.features(session, sandbox)
        pids = [session.edge.pid, *harness.holders(str(session.cluster.dir))]
        empty = await density.before(session)
        live: list[libdsec.Sandbox] = []
        await density.fill(session, spec, options.singles, live, 500)
        times = []
        for sandbox in live:
            started = time.perf_counter()
            await sandbox.stop()
            times.append((time.perf_counter() - started) * 1e3)
        live.clear()
        await density.fill(session, spec, options.n, live, 500)
        await asyncio.sleep(1.0)
        cpu = machine.cpu_ms(pids)
        started = time.perf_counter()
        outcomes = await session.client.stop(everything=True)
        seconds = time.perf_counter() - started
        cpu = machine.cpu_ms(pids) - cpu
        wrong = [outcome for outcome in outcomes if outcome.error is not None]
        if wrong or len(outcomes) != options.n:
            raise harness.WrongAnswer(f"{len(outcomes)} of {options.n} were stopped, {len(wrong)} with an error: {wrong[:3]}")
        remains = await machine.left(empty)
    return {
        "stop_ms_p50": harness.rounded(harness.percentile(times, 50)),
        "stop_1000_s": harness.rounded(seconds * 1000 / options.n, 3),
        "stop_ms_p99": harness.rounded(harness.percentile(times, 99)),
        "node_cpu_ms_per_stop": harness.rounded(cpu / options.n),
        "n": options.n,
        "seconds": harness.rounded(seconds, 3),
        "left": remains,
        "features": features,
        "driver": session.driver,
    }
