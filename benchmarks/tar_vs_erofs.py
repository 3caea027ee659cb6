"""Environments from layers against environments unpacked from a tar, for tasks of several lengths, several at a time.

Both ways give each task the same files, a sandbox of the same runtime, and the same work: ``task_s`` seconds of CPU time and a small write.
The tar way first unpacks a copy for each task, as pipelines do that ship environments as archives, and then runs the same task in the
same kind of sandbox: its unpacked tree is not even read, and removing it is not counted. Bytes written are those of the whole
machine's disks (/proc/diskstats), with the unpacked trees on the same disk as the store.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks import harness
from dsec import trees

ABOUT = "tasks on layers against tasks on unpacked tars, at several task lengths"
KEYS = ("rows",)
DEFAULTS = {"n": 8, "parallel": 4, "lengths": "0,1,4"}


def written() -> int:
    """Bytes written to this machine's disks so far."""
    total = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if fields[2].startswith(("vd", "sd", "nvme", "xvd")) and not fields[2][-1].isdigit():
            total += int(fields[9]) * 512
    return total


async def many(n: int, parallel: int, one: Callable[[int], Awaitable[None]]) -> tuple[float, int]:
    """Seconds until all are done, and bytes written."""
    gate = asyncio.Semaphore(parallel)

    async def run(number: int) -> None:
        async with gate:
            await one(number)

    before, started = written(), time.perf_counter()
    await asyncio.gather(*(run(number) for number in range(n)))
    took = time.perf_counter() - started
    sync = await asyncio.create_subprocess_exec("sync")
    await sync.wait()
    return took, written() - before


async def run(options: Namespace) -> dict[str, object]:
    async with harness.session(options) as session:
        place = Path(tempfile.mkdtemp(prefix="dsec-tar-", dir=options.cache))
        try:
            tar = place / "base.tar.gz"
            async with harness.rootfs(session) as tree:
                packer = await asyncio.create_subprocess_exec("tar", "-C", str(tree), "-czf", str(tar), ".")
                if await packer.wait():
                    raise RuntimeError("tar failed")
            rows = []
            for length in (float(word) for word in options.lengths.split(",")):
                rows.append(await row(options, session, tar, length))
                harness.say(str(rows[-1]))
            async with session.client.sandbox(session.image) as sandbox:
                facts = await harness.features(session, sandbox)
            return {"rows": rows, "parallel": options.parallel, "base": session.image, "features": facts, "driver": session.driver}
        finally:
            await asyncio.to_thread(trees.clear, place)


async def row(options: Namespace, session: harness.Session, tar: Path, length: float) -> dict[str, object]:
    # CPU time, which unpacking competes for on the same cores; the shell reads its own, in ticks of 10 ms, without starting anything.
    used = "read _ _ _ _ _ _ _ _ _ _ _ _ _ u s _ </proc/self/stat"
    script = f"{used}; while [ $((u+s)) -lt {round(length * 100)} ]; do {used}; done; echo done >/root/x; cat /root/x"

    async def task(image: str) -> None:
        async with session.client.sandbox(image, memory=128 * harness.MIB) as sandbox:
            result = await sandbox.exec(script, timeout=600)
            if result.stdout.text != "done\n":
                raise harness.WrongAnswer(result.stdout.text + result.stderr.text)

    async def by_layer(_: int) -> None:
        await task(session.image)

    async def by_tar(number: int) -> None:
        unpacked = tar.parent / f"task{number}"
        unpacked.mkdir()
        unpacker = await asyncio.create_subprocess_exec("tar", "-C", str(unpacked), "-xzf", str(tar), "--numeric-owner")
        if await unpacker.wait():
            raise RuntimeError("the tar did not unpack")
        await task(session.image)

    await task(session.image)
    erofs_s, erofs_written = await many(options.n, options.parallel, by_layer)
    try:
        tar_s, tar_written = await many(options.n, options.parallel, by_tar)
    finally:
        for number in range(options.n):
            await asyncio.to_thread(trees.clear, tar.parent / f"task{number}")
    return {
        "task_s": length,
        "n": options.n,
        "erofs_s": harness.rounded(erofs_s, 2),
        "tar_s": harness.rounded(tar_s, 2),
        "speedup": harness.rounded(tar_s / erofs_s, 2),
        "written_ratio": harness.rounded(tar_written / max(erofs_written, 1), 1),
    }
