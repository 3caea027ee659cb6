"""Many sandboxes asked for in one call; each counts once it has answered a nonce made for it."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace

import libdsec
from benchmarks import harness

ABOUT = "a burst of N sandboxes in one call, each until its first exec answers"
KEYS = ("n", "ok", "per_s", "p50_ms", "p99_ms", "loop_lag_ms_p99")
DEFAULTS = {"n": 200}


async def run(options: Namespace) -> dict[str, object]:
    # Limits small enough for a burst of this size on a small machine; every limit is enforced all the same.
    spec_options: libdsec.Options = {"memory": 32 * harness.MIB, "disk": 16 * harness.MIB, "pids": 32, "cpus": 0.2}
    async with harness.session(options) as session:
        spec = libdsec.spec(session.image, **spec_options)
        async with session.client.sandbox(session.image, **spec_options) as sandbox:
            await harness.answered(sandbox)
            features = await harness.features(session, sandbox)
        times: list[float] = []
        ready: list[float] = []

        async def first_answer(sandbox: libdsec.Sandbox) -> None:
            await harness.answered(sandbox)
            times.append((time.perf_counter() - started) * 1e3)

        async with session.heartbeats() as heartbeats:
            started = time.perf_counter()
            async with session.client.burst(spec, options.n, deadline=300) as burst:
                tasks = []
                async for sandbox in burst:
                    ready.append((time.perf_counter() - started) * 1e3)
                    tasks.append(asyncio.create_task(first_answer(sandbox)))
                results = await asyncio.gather(*tasks, return_exceptions=True)
                seconds = time.perf_counter() - started
                failed = [str(error) for _, error in burst.failed] + [str(error) for error in results if error is not None]
                stopping = time.perf_counter()
            stopped = time.perf_counter() - stopping
        for text in failed[:5]:
            harness.say(f"failed: {text}")
        return {
            "n": options.n,
            "ok": len(times),
            "per_s": harness.rounded(len(times) / seconds, 1),
            "p50_ms": harness.rounded(harness.percentile(times, 50)),
            "p99_ms": harness.rounded(harness.percentile(times, 99)),
            "loop_lag_ms_p99": harness.rounded(harness.percentile([beat.loop_lag_ms for beat in heartbeats] or [0.0], 99)),
            "seconds": harness.rounded(seconds, 3),
            "ready_per_s": harness.rounded(len(ready) / max(ready, default=1.0) * 1e3, 1),
            "stop_seconds": harness.rounded(stopped, 3),
            "failed": len(failed),
            "features": features,
            "driver": session.driver,
        }
