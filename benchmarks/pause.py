"""Pause of one sandbox with memory that it has touched: how long, what the node gets back, and how soon it answers again."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace

import libdsec
from benchmarks import harness
from benchmarks.machine import available

ABOUT = "a sandbox paused and resumed by its next command: what its memory gives back, and what that costs"
KEYS = ("mb", "random_share", "swap", "pause_ms", "released_share", "resume_first_exec_ms", "touch_all_ms")
DEFAULTS = {"mb": 200, "random_share": 0.5, "swap": "zram", "rounds": 5, "settle": 0.3}
TOUCHER = "/tmp/toucher"


class Holder:
    """A sandbox with a program in it that holds memory; use `touch` to see that all of it is there."""

    def __init__(self, sandbox: libdsec.Sandbox, process: libdsec.Process) -> None:
        self.sandbox, self.process = sandbox, process
        self._lines = process.lines()

    @classmethod
    async def start(cls, sandbox: libdsec.Sandbox, program: bytes, mb: int, share: float) -> Holder:
        await sandbox.files.write(TOUCHER, program, mode=0o755)
        process = await sandbox.start([TOUCHER, str(mb), str(share)]).__aenter__()
        holder = cls(sandbox, process)
        if await holder.line() != "ready":
            raise harness.WrongAnswer("the program that holds memory did not start")
        return holder

    async def line(self) -> str:
        return (await asyncio.wait_for(anext(self._lines), 120)).strip()

    async def touch(self) -> tuple[float, str]:
        """Milliseconds until it had read all of it, and its sum."""
        await self.process.write(b"\n")
        took, _, total = (await self.line()).partition(" ")
        return float(took), total


async def run(options: Namespace) -> dict[str, object]:
    room = options.mb * harness.MIB
    rooms = {"pause": {"swap": options.swap, "swap_bytes": 4 * room + 256 * harness.MIB}}
    program = await harness.program(options, "toucher")
    times: dict[str, list[float]] = {"pause": [], "released": [], "told": [], "resume": [], "touch": [], "untouched": []}
    async with (
        harness.session(options, rooms=rooms) as session,
        session.client.sandbox(session.image, memory=room + 64 * harness.MIB, disk=64 * harness.MIB, pids=64, idle_timeout=None) as sandbox,
    ):
        features = await harness.features(session, sandbox)
        holder = await Holder.start(sandbox, program, options.mb, options.random_share)
        await harness.answered(sandbox)
        untouched, want = await holder.touch()
        times["untouched"].append(untouched)
        for number in range(options.rounds):
            # Written anew each round: pages that lie in swap already would be given back for nothing.
            if number:
                await holder.process.signal(9)
                await holder.process.wait()
                holder = await Holder.start(sandbox, program, options.mb, options.random_share)
                _, want = await holder.touch()
            await asyncio.sleep(options.settle)
            before = available()
            began = time.perf_counter()
            paused = await sandbox.pause()
            times["pause"].append((time.perf_counter() - began) * 1e3)
            times["released"].append((available() - before) / room)
            times["told"].append(paused.released / room)
            times["resume"].append(await harness.answered(sandbox))
            took, total = await holder.touch()
            times["touch"].append(took)
            if total != want:
                raise harness.WrongAnswer("its memory is not what it was before the pause")
        middle = {name: harness.percentile(values, 50) for name, values in times.items()}
        return {
            "mb": options.mb,
            "random_share": options.random_share,
            "swap": options.swap,
            "pause_ms": harness.rounded(middle["pause"], 1),
            "released_share": harness.rounded(middle["released"], 3),
            "resume_first_exec_ms": harness.rounded(middle["resume"], 1),
            "touch_all_ms": harness.rounded(middle["touch"], 1),
            "untouched_ms": harness.rounded(middle["untouched"], 1),
            "told_share": harness.rounded(middle["told"], 3),
            "freeze_ms": paused.freeze_ms,
            "pause_ms_all": [round(value, 1) for value in times["pause"]],
            "resume_ms_all": [round(value, 1) for value in times["resume"]],
            "note": paused.note,
            "features": features,
            "driver": session.driver,
        }
