"""What a writable layer costs by what it lives on: making it, writing to it, taking it away, and the memory that its bytes take."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Literal

import libdsec
from benchmarks import harness

ABOUT = "create, write and stop of a sandbox by what its writable layer lives on, in turns"
KEYS = ("rows",)
DEFAULTS = {"n": 30, "write_mib": 96}
KINDS: tuple[Literal["tmpfs", "btrfs", "quota", "loop"], ...] = ("tmpfs", "btrfs", "quota", "loop")
STORE = 4 << 30


async def run(options: Namespace) -> dict[str, object]:
    """``rows``: for each kind that is here, {disk_mode, create_exec_ms_p50, stop_ms_p50, write_mib_s, memory_mib}; ``memory_mib``: what
    the sandbox is charged for after ``write_mib`` were written, under a limit of 64 MiB beside its disk."""
    async with harness.session(options, rooms={"container": {"disk_store_bytes": STORE}}) as session:
        limits: libdsec.Options = {"memory": "64MiB", "disk": "128MiB", "cpus": 1, "pids": 64}
        kinds = [kind for kind in KINDS if await _there(session, {**limits, "disk_mode": kind})]
        times: dict[str, dict[str, list[float]]] = {kind: {"create": [], "stop": []} for kind in kinds}
        for number in range(-2, options.n):
            for kind in kinds:
                begun = time.perf_counter()
                sandbox = await session.client.create(session.image, **{**limits, "disk_mode": kind})
                await harness.answered(sandbox)
                made = time.perf_counter()
                await sandbox.stop()
                if number >= 0:
                    times[kind]["create"].append((made - begun) * 1e3)
                    times[kind]["stop"].append((time.perf_counter() - made) * 1e3)
        rows = []
        for kind in kinds:
            async with session.client.sandbox(session.image, **{**limits, "disk_mode": kind}) as sandbox:
                begun = time.perf_counter()
                done = await sandbox.exec(f"dd if=/dev/zero of=/root/x bs=65536 count={options.write_mib * 16}", check=True)
                took = time.perf_counter() - begun
                usage = (await sandbox.info()).usage
                rows.append(
                    {
                        "disk_mode": kind,
                        "create_exec_ms_p50": harness.rounded(harness.percentile(times[kind]["create"], 50), 2),
                        "stop_ms_p50": harness.rounded(harness.percentile(times[kind]["stop"], 50), 2),
                        "write_mib_s": harness.rounded(options.write_mib / took, 0),
                        "memory_mib": (usage.memory >> 20) if usage is not None and done.exit_code == 0 else None,
                    }
                )
        return {"rows": rows, "n": options.n, "features": {"store": "btrfs in a sparse file"}, "driver": session.driver}


async def _there(session: harness.Session, asked: libdsec.Options) -> bool:
    try:
        async with session.client.sandbox(session.image, **asked) as sandbox:
            await harness.answered(sandbox)
            return True
    except libdsec.Unsupported as error:
        harness.say(f"{asked['disk_mode']}: {error}")
        return False
