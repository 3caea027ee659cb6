"""One sandbox's commands while others of its node do their worst."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from contextlib import AsyncExitStack

import libdsec
from benchmarks import density, harness

ABOUT = "a small command in one sandbox, before and while others of its node are hostile"
KEYS = ("before_p50_ms", "during_p50_ms", "before_p99_ms", "during_p99_ms", "factor", "onset_p99_ms")
DEFAULTS = {"n": 400, "rounds": 10, "hostile": 1, "kind": "fork", "cpus": 1.0, "live": 0, "onset": 4.0}

# What each kind of hostile sandbox runs, for ever. The process limit of the sandbox bounds the fork bomb.
KINDS = {
    # A shell that is not interactive ends with the first fork that is refused; this one takes the next line.
    "fork": "yes 'f() { f | f & }; f' | sh -i",
    "cpu": "for i in 1 2 3 4 5 6 7 8; do while :; do :; done & done; wait",
    "output": "yes",
    "disk": "while :; do dd if=/dev/zero of=/tmp/x bs=65536 count=400 2>/dev/null; rm /tmp/x; done",
    "pty": "exec /tmp/hog pty",
    "fd": "exec /tmp/hog fd",
    "inotify": "exec /tmp/hog inotify",
    "quiet": "sleep 3600",
}
CROWD = ("fork", "pty", "fork", "fd", "fork", "inotify")  # --kind crowd: half fork bombs, half of the others
LIMITS: libdsec.Options = {"memory": "96MiB", "disk": "64MiB", "pids": 64}


async def phase(sandbox: libdsec.Sandbox, count: int) -> list[float]:
    return [await harness.answered(sandbox) for _ in range(count)]


async def onset(sandbox: libdsec.Sandbox, seconds: float) -> list[float]:
    """What commands take in the first seconds of the others' hostility, while the node finds out whose it is; apart from the rest."""
    times, end = await phase(sandbox, 20), time.perf_counter() + seconds
    while time.perf_counter() < end:
        times += await phase(sandbox, 1)
    return times


async def run(options: Namespace) -> dict[str, object]:
    if options.kind not in (*KINDS, "crowd"):
        raise SystemExit(f"--kind {options.kind}: one of {', '.join(KINDS)} or crowd")
    kinds = [CROWD[at % len(CROWD)] if options.kind == "crowd" else options.kind for at in range(options.hostile)]
    hog = await harness.program(options, "hog")
    async with harness.session(options, density.roomy(options.live + options.hostile + 1)) as session, AsyncExitStack() as stack:
        limits: libdsec.Options = {**LIMITS, "cpus": options.cpus}
        spec = libdsec.spec(session.image, **limits)
        live: list[libdsec.Sandbox] = []
        await density.fill(session, libdsec.spec(session.image, **density.LIMITS), options.live, live, 500)
        sandbox = await stack.enter_async_context(session.client.sandbox(spec))
        hostile = [await stack.enter_async_context(session.client.sandbox(spec)) for _ in range(options.hostile)]
        for box, kind in zip(hostile, kinds, strict=True):
            await box.files.write("/tmp/hog", hog, mode=0o755)
            async with box.start(KINDS[kind], stdin=False) as process:
                process.detach()  # nobody reads its output: it is not held back
        first = await onset(sandbox, options.onset)
        before: list[float] = []
        during: list[float] = []
        for _ in range(options.rounds):  # in turns, so that whatever else the machine does meets both alike
            await asyncio.gather(*(box.pause() for box in hostile))
            before += await phase(sandbox, options.n // options.rounds)
            await asyncio.gather(*(box.resume() for box in hostile))
            await asyncio.sleep(0.2)
            during += await phase(sandbox, options.n // options.rounds)
        usage = [(await box.info()).usage for box in hostile]
        ids = [box.id for box in (*hostile, *live)]
        for at in range(0, len(ids), 1000):
            await session.client.stop(ids=ids[at : at + 1000])
        figures = {
            f"{name}_p{percent}_ms": harness.rounded(harness.percentile(times, percent), 3)
            for name, times in (("before", before), ("during", during))
            for percent in (50, 99)
        }
        return {
            **figures,
            "factor": harness.rounded(harness.percentile(during, 99) / harness.percentile(before, 99), 2),
            "onset_p99_ms": harness.rounded(harness.percentile(first, 99), 3),
            "n": len(before),
            "hostile": options.hostile,
            "kind": options.kind,
            "live": len(live),
            "hostile_pids": [item.pids for item in usage if item],
            "hostile_cpu_ms": [item.cpu_ms for item in usage if item],
            "features": await harness.features(session, sandbox),
            "driver": session.driver,
        }
