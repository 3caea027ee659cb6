"""A whole job paused by its label in one call: many sandboxes with memory that each has touched."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace

import libdsec
from benchmarks import harness
from benchmarks.machine import available
from benchmarks.pause import Holder

ABOUT = "a job of N sandboxes paused by its label, each with memory that it has touched"
KEYS = ("n", "mib_each", "seconds", "released_mib")
DEFAULTS = {"n": 200, "mib_each": 32, "random_share": 0.5, "swap": "zram", "settle": 1.0}
STARTING = 16  # holders started at one time


async def run(options: Namespace) -> dict[str, object]:
    room = options.mib_each * harness.MIB
    rooms = {"pause": {"swap": options.swap, "swap_bytes": 2 * options.n * room}}
    program = await harness.program(options, "toucher")
    limits: libdsec.Options = {
        "memory": room + 24 * harness.MIB,
        "disk": 8 * harness.MIB,
        "pids": 32,
        "cpus": 1,
        "labels": {"job": "bench"},
    }
    async with harness.session(options, rooms=rooms) as session:
        async with session.client.burst(libdsec.spec(session.image, **limits), options.n, deadline=300) as burst:
            sandboxes = [sandbox async for sandbox in burst]
            features = await harness.features(session, sandboxes[0])
            gate = asyncio.Semaphore(STARTING)

            async def hold(sandbox: libdsec.Sandbox) -> tuple[Holder, str]:
                async with gate:
                    holder = await Holder.start(sandbox, program, options.mib_each, options.random_share)
                    return holder, (await holder.touch())[1]

            held = await asyncio.gather(*(hold(sandbox) for sandbox in sandboxes))
            await asyncio.sleep(options.settle)
            before = available()
            steps: list[int] = []
            began = time.perf_counter()
            results = await session.client.pause(labels={"job": "bench"}, progress=lambda done, _: steps.append(done))
            seconds = time.perf_counter() - began
            released = available() - before
            if len(results) != len(sandboxes) or len(steps) != len(sandboxes) or not all(result.ok for result in results):
                raise harness.WrongAnswer(f"not all were paused: {[result.error for result in results if result.error][:3]}")
            told = sum(result.paused.released for result in results if result.paused)
            began = time.perf_counter()
            resumed = await session.client.resume(labels={"job": "bench"})
            resume_s = time.perf_counter() - began
            if not all(result.ok for result in resumed):
                raise harness.WrongAnswer("not all were resumed")

            async def same(holder: Holder, want: str) -> bool:
                async with gate:
                    return (await holder.touch())[1] == want

            if not all(await asyncio.gather(*(same(*each) for each in held))):
                raise harness.WrongAnswer("memory is not what it was before the pause")
        return {
            "n": len(sandboxes),
            "mib_each": options.mib_each,
            "seconds": harness.rounded(seconds, 2),
            "released_mib": harness.rounded(released / harness.MIB, 0),
            "told_mib": harness.rounded(told / harness.MIB, 0),
            "random_share": options.random_share,
            "swap": options.swap,
            "resume_seconds": harness.rounded(resume_s, 2),
            "features": features,
            "driver": session.driver,
        }
