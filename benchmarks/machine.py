"""What a node has left after a run: memory, cgroups (dying ones too), mounts, processes, descriptors."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

SETTLE = 20.0  # seconds in which the kernel frees what belongs to the dead

Figures = dict[str, int]


def available() -> int:
    """Bytes that new programs could have: MemAvailable, and the free pages that each core keeps for itself, which the kernel does not count
    there. It gives them back over seconds, and at once when memory is short; a pause frees hundreds of MiB to these lists."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 + free_by_core(Path("/proc/zoneinfo").read_text())
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def free_by_core(zoneinfo: str) -> int:
    """Bytes of free pages that cores keep, from the text of /proc/zoneinfo (pure)."""
    pages = sum(int(line.split()[1]) for line in zoneinfo.splitlines() if line.lstrip().startswith("count: "))
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_cgroups() -> int:
    """Memory groups that the kernel holds, removed ones that are still charged included."""
    stat = Path("/sys/fs/cgroup/cgroup.stat")
    if stat.exists():
        return sum(
            int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith(("nr_descendants", "nr_dying_descendants"))
        )
    return next(int(line.split()[2]) for line in Path("/proc/cgroups").read_text().splitlines() if line.startswith("memory\t"))


def figures(pids: list[int]) -> Figures:
    """``pids``: processes whose descriptors are counted."""
    return {
        "memory_cgroups": memory_cgroups(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "processes": sum(entry.isdigit() for entry in os.listdir("/proc")),
        "descriptors": sum(_count(f"/proc/{pid}/fd") for pid in pids),
        "available_mib": available() >> 20,
    }


def cpu_ms(pids: list[int]) -> float:
    """Milliseconds of CPU that processes have used, in user and kernel mode."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks * 1e3 / os.sysconf("SC_CLK_TCK")


def _count(path: str) -> int:
    try:
        return len(os.listdir(path))
    except OSError:
        return 0


async def left(before: Figures, pids: list[int]) -> Figures:
    """What there is more of than before (memory: less of, in MiB), once it no longer falls or `SETTLE` has passed."""
    end = time.monotonic() + SETTLE
    while True:
        now = figures(pids)
        more = {name: now[name] - before[name] for name in before if name != "available_mib"}
        more["memory_mib"] = before["available_mib"] - now["available_mib"]
        if time.monotonic() > end or all(more[name] <= 2 for name in ("memory_cgroups", "mounts", "processes")):
            return more
        await asyncio.sleep(0.5)
