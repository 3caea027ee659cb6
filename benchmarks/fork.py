"""Fork: one sandbox's state captured once, and N sandboxes that begin from it, each checked by what it reads."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace

import libdsec
from benchmarks import harness

ABOUT = "a sandbox with changed files forked into N: capture, and until each child has read them"
KEYS = ("n", "kind", "seconds", "p50_ms")
DEFAULTS = {"n": 64, "kind": "disk", "mb": 32, "rounds": 3}
FILL = "mkdir -p /srv/work && for i in $(seq 32); do head -c {size} /dev/urandom >/srv/work/$i; done; cat /srv/work/* | sha256sum"
# A process that holds as much in its memory, and says on demand what that is.
HOLDER = """
mkdir -p /srv; x=$(head -c {size} /dev/urandom | base64); mkfifo /srv/ask
printf %s "$x" | sha256sum >/srv/held; echo ready
while read -r word </srv/ask; do printf %s "$x" | sha256sum >/srv/told; done
"""
ASK = "echo word >/srv/ask; until cmp -s /srv/held /srv/told; do sleep 0.01; done; cat /srv/work/* | sha256sum"
LIMITS: libdsec.Options = {"memory": 64 * harness.MIB, "pids": 32, "cpus": 1}


async def reads(child: libdsec.Sandbox, want: str, command: str, gate: asyncio.Semaphore) -> float:
    """Seconds in which a child reads all that its parent wrote, and its process what it holds. Raises `WrongAnswer`."""
    async with gate:
        begun = time.perf_counter()
        if (await child.exec(command, timeout=60)).stdout.text != want:
            raise harness.WrongAnswer("a child reads something else than its parent wrote")
        return time.perf_counter() - begun


async def hold(sandbox: libdsec.Sandbox, mb: int) -> None:
    """Until a process in there holds about ``mb`` megabytes."""
    async with sandbox.start(HOLDER.format(size=mb * 750_000)) as process:
        async for _ in process:
            break
        process.detach()


async def run(options: Namespace) -> dict[str, object]:
    space = options.mb * 2_000_000 + 32 * harness.MIB
    totals: list[float] = []
    frozen: list[float] = []
    first: list[float] = []
    gate = asyncio.Semaphore(4)
    memory = options.kind == "memory"
    limits: libdsec.Options = {**LIMITS, "memory": (64 + 6 * options.mb * memory) * harness.MIB}
    check = ASK if memory else "cat /srv/work/* | sha256sum"
    async with harness.session(options) as session, session.client.sandbox(session.image, disk=space, **limits) as sandbox:
        features = await harness.features(session, sandbox)
        if memory:
            await hold(sandbox, options.mb)
        for number in range(options.rounds):
            filled = await sandbox.exec(FILL.format(size=options.mb * 1_000_000 // 32), timeout=600, check=True)
            began = time.perf_counter()
            async with await sandbox.fork(options.n, kind=options.kind, min_ready=options.n, timeout=300) as children:
                totals.append(time.perf_counter() - began)
                frozen.append(children.checkpoint.frozen_ms)

                first += await asyncio.gather(*(reads(child, filled.stdout.text, check, gate) for child in children))
            await sandbox.exec(f"echo {number} >/srv/round", check=True)
        # One child at a time: from the call to a sandbox that answers, capture included.
        single: list[float] = []
        for _ in range(options.rounds * 5):
            began = time.perf_counter()
            async with await sandbox.fork(kind=options.kind, timeout=300) as children:
                await children.sandboxes[0].exec("true", check=True)
                single.append((time.perf_counter() - began) * 1e3)
        return {
            "n": options.n,
            "kind": options.kind,
            "mb": options.mb,
            "seconds": harness.rounded(harness.percentile(totals, 50), 3),
            "p50_ms": harness.rounded(harness.percentile(single, 50), 1),
            "frozen_ms": harness.rounded(harness.percentile(frozen, 50), 1),
            "read_ms": harness.rounded(harness.percentile(first, 50) * 1e3, 1),
            "features": features,
            "driver": session.driver,
        }
