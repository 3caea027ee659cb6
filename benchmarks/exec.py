"""One command after another in one sandbox."""

from __future__ import annotations

from argparse import Namespace

from benchmarks import harness

ABOUT = "a small command in a running sandbox, one after another"
KEYS = ("exec_ms_p50", "exec_ms_p99")
DEFAULTS = {"n": 1000}


async def run(options: Namespace) -> dict[str, object]:
    async with harness.session(options) as session, session.client.sandbox(session.image) as sandbox:
        for _ in range(min(20, options.n)):
            await harness.answered(sandbox)
        times = [await harness.answered(sandbox) for _ in range(options.n)]
        return {
            "exec_ms_p50": harness.rounded(harness.percentile(times, 50), 3),
            "exec_ms_p99": harness.rounded(harness.percentile(times, 99), 3),
            "n": options.n,
            "features": await harness.features(session, sandbox),
            "driver": session.driver,
        }
