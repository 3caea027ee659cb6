"""One command after another in one sandbox, alone on its node or beside many that do nothing."""

from __future__ import annotations

from argparse import Namespace

import libdsec
from benchmarks import density, harness

ABOUT = "a small command in a running sandbox, one after another; --live N: beside N others"
KEYS = ("exec_ms_p50", "exec_ms_p99")
DEFAULTS = {"n": 1000, "live": 0}
SLICE = 500


async def run(options: Namespace) -> dict[str, object]:
    async with harness.session(options, density.roomy(options.live) if options.live else None) as session:
        others: list[libdsec.Sandbox] = []
        async with session.client.sandbox(session.image) as sandbox:
            await density.fill(session, libdsec.spec(session.image, **density.LIMITS), options.live, others, SLICE)
            for _ in range(min(20, options.n)):
                await harness.answered(sandbox)
            times = [await harness.answered(sandbox) for _ in range(options.n)]
            features = await harness.features(session, sandbox)
        await density.stop(session, others)
        return {
            "exec_ms_p50": harness.rounded(harness.percentile(times, 50), 3),
            "exec_ms_p99": harness.rounded(harness.percentile(times, 99), 3),
            "live": len(others),
            "n": options.n,
            "features": features,
            "driver": session.driver,
        }
