"""Create a sandbox until its first command answers, one at a time, beside crun, bubblewrap and Docker doing the same."""

from __future__ import annotations

import time
from argparse import Namespace
from contextlib import AsyncExitStack

from benchmarks import harness, peers

ABOUT = "create until the first exec answers, with crun, bubblewrap and Docker interleaved"
KEYS = ("create_exec_ms_p50", "create_exec_ms_p95", "crun_ratio", "docker_ratio", "bwrap_ratio")
DEFAULTS = {"n": 40}


async def run(options: Namespace) -> dict[str, object]:
    async with harness.session(options) as session, AsyncExitStack() as stack:

        async def ours() -> float:
            started = time.perf_counter()
            sandbox = await session.client.create(session.image)
            try:
                await harness.answered(sandbox)
                return (time.perf_counter() - started) * 1e3
            finally:
                await sandbox.stop()

        root = await stack.enter_async_context(harness.rootfs(session))
        ways = {"dsec": ours}
        absent: dict[str, str] = {}
        for name in peers.NAMES if options.peers else ():
            try:
                peer = await stack.enter_async_context(peers.peer(name, root))
            except peers.Absent as error:
                absent[name] = str(error)
                harness.say(f"{name}: {error}")
            else:
                ways[name] = peer.once
        times, failed = await harness.interleave(options.n, ways, may_fail=peers.NAMES)
        absent |= failed
        async with session.client.sandbox(session.image) as sandbox:
            features = await harness.features(session, sandbox)
        medians = {name: harness.percentile(values, 50) for name, values in times.items()}
        mine = medians["dsec"]
        return {
            "create_exec_ms_p50": harness.rounded(mine),
            "create_exec_ms_p95": harness.rounded(harness.percentile(times["dsec"], 95)),
            "crun_ratio": harness.ratio(medians.get("crun"), mine),
            "docker_ratio": harness.ratio(medians.get("docker"), mine),
            "bwrap_ratio": harness.ratio(medians.get("bwrap"), mine),
            "n": options.n,
            "peer_ms_p50": {name: harness.rounded(value) for name, value in medians.items() if name != "dsec"},
            "absent": absent,
            "features": features,
            "driver": session.driver,
        }
