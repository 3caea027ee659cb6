"""What a node has left after a run: memory, cgroups (dying ones too), mounts, processes, descriptors."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SETTLE = 20.0  # seconds in which the kernel frees what belongs to the dead
CGROUPS = Path("/sys/fs/cgroup")
NAMED = 10  # of what is left, at most
_KERNEL = 0x00200000  # PF_KTHREAD


class Process(NamedTuple):
    """``resident``: bytes of its own, without those of files."""

    parent: int
    name: str
    resident: int = 0


Processes = Mapping[int, Process]


@dataclass(frozen=True, slots=True)
class State:
    """What there is at one moment. ``pids``: processes that belong to the run, with all that they start."""

    pids: frozenset[int]
    counts: dict[str, int]
    available: int
    groups: frozenset[str]
    running: Processes


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
    stat = CGROUPS / "cgroup.stat"
    if stat.exists():
        return sum(
            int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith(("nr_descendants", "nr_dying_descendants"))
        )
    return next(int(line.split()[2]) for line in Path("/proc/cgroups").read_text().splitlines() if line.startswith("memory\t"))


def running() -> Processes:
    """Every process but the kernel's own, which come and go as the kernel likes."""
    return {pid: process for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (process := _process(pid)) is not None}


def _process(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except OSError:  # it has ended
        return None
    fields = text.rpartition(")")[2].split()
    if int(fields[6]) & _KERNEL:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]
    return Process(int(fields[1]), name, (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"))


def own(before: Processes, now: Processes, pids: frozenset[int]) -> Iterator[int]:
    """Who of ``now`` belongs to a run (pure): ``pids`` and what they started, and new ones that are nobody's, which init has taken over.
    What others start on this machine meanwhile is theirs: it descends from somebody who was there ``before``."""
    for pid in now:
        line = [pid]
        while (parent := now[line[-1]].parent) in now and parent != 1:
            line.append(parent)
        if not pids.isdisjoint(line) or before.keys().isdisjoint(line):
            yield pid


def look(pids: Collection[int]) -> State:
    """``pids``: processes that belong to the run; their descriptors are counted, but for this process's own. Takes a moment where there
    are thousands of processes."""
    groups = frozenset(folder for folder, _, _ in os.walk(CGROUPS / "memory" if (CGROUPS / "memory").exists() else CGROUPS))
    counts = {
        "memory_cgroups": len(groups),
        "dying_memory_cgroups": memory_cgroups() - len(groups),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": sum(_count(f"/proc/{pid}/fd") for pid in pids if pid != os.getpid()),
    }
    return State(frozenset(pids), counts, available(), groups, running())


def cpu_ms(pids: Collection[int]) -> float:
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


def more(before: State, now: State) -> dict[str, Any]:
    """What there is more of than before (pure): counts, memory (less of it available, and of that what the run's processes have, in MiB),
    and in ``named`` which groups and processes."""
    found: dict[str, Any] = {name: now.counts[name] - count for name, count in before.counts.items()}
    ours, theirs = set(own(before.running, now.running, now.pids)), set(own(before.running, before.running, before.pids))
    found["processes"] = len(ours) - len(theirs)
    found["memory_mib"] = (before.available - now.available) >> 20
    found["processes_mib"] = (sum(now.running[pid].resident for pid in ours) - sum(before.running[pid].resident for pid in theirs)) >> 20
    named = [*sorted(now.groups - before.groups), *(f"{now.running[pid].name} ({pid})" for pid in sorted(ours - theirs))]
    if found["processes"] > 0 or now.groups - before.groups:
        found["named"] = named[:NAMED]
    return found


async def left(before: State) -> dict[str, Any]:
    """What there is `more` of than before, once nothing is or `SETTLE` has passed; and in ``without_caches`` how that is when the kernel
    has dropped what it keeps of files only because nobody needs the memory: a removed group stays while a page is charged to it."""
    end = time.monotonic() + SETTLE
    while True:
        found = more(before, await asyncio.to_thread(look, before.pids))
        if time.monotonic() > end or all(found[name] <= 0 for name in ("memory_cgroups", "dying_memory_cgroups", "mounts", "processes")):
            break
        await asyncio.sleep(0.5)
    await asyncio.to_thread(drop_caches)
    found["without_caches"] = more(before, await asyncio.to_thread(look, before.pids))
    return found


def drop_caches() -> None:
    """Of files, directories and inodes. What is dirty is written first. Blocks for a second or so."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
