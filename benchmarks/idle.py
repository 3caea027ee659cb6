"""What sandboxes cost that do nothing: the Edge's memory, and the machine's for each sandbox."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import libdsec
from benchmarks import harness, machine

ABOUT = "memory of the Edge and of each idle sandbox, with N live"
KEYS = ("edge_rss_mib", "mib_per_sandbox")
DEFAULTS = {"n": 200, "settle": 2.0}


def charged(edge: str) -> int:
    """Bytes that the kernel charges to all sandboxes of an Edge together (their memory cgroups' parent)."""
    for file in (f"memory/dsec/{edge}/memory.usage_in_bytes", f"dsec/{edge}/memory.current"):
        path = Path("/sys/fs/cgroup", file)
        if path.exists():
            return int(path.read_text())
    return 0


async def run(options: Namespace) -> dict[str, object]:
    limits: libdsec.Options = {"memory": 32 * harness.MIB, "disk": 16 * harness.MIB, "pids": 32, "cpus": 0.1}
    async with harness.session(options) as session:
        spec = libdsec.spec(session.image, **limits)
        async with session.client.sandbox(session.image, **limits) as sandbox:  # what the first one warms is not the second one's cost
            await harness.answered(sandbox)
            features = await harness.features(session, sandbox)
        await asyncio.sleep(options.settle)
        before, edge_before = machine.available(), session.edge_rss()
        async with session.client.burst(spec, options.n, deadline=300) as burst:
            sandboxes = [sandbox async for sandbox in burst]
            await asyncio.gather(*(harness.answered(sandbox) for sandbox in sandboxes))
            await asyncio.sleep(options.settle)
            group = charged(session.edge.name)
            after, edge_after = machine.available(), session.edge_rss()
            stats = [await harness.answered(sandbox) for sandbox in sandboxes[:20]]
        return {
            "edge_rss_mib": harness.rounded(edge_after / harness.MIB, 1),
            "mib_per_sandbox": harness.rounded((before - after) / harness.MIB / len(sandboxes), 3),
            "n": len(sandboxes),
            "charged_mib_per_sandbox": harness.rounded(group / harness.MIB / len(sandboxes), 3),
            "edge_rss_mib_empty": harness.rounded(edge_before / harness.MIB, 1),
            "exec_ms_p50_after": harness.rounded(harness.percentile(stats, 50)),
            "features": features,
            "driver": session.driver,
        }
