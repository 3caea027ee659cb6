"""The admission ledger of an Edge: what is promised to sandboxes, never above a limit at any instant. Pure.

Memory is the memory limit plus the bytes of a tmpfs upper (they are memory too). Few sandboxes use what they may, so limits are
overcommitted as CPU shares are; what all of them really use is bounded by their common cgroup, so the node itself is never at stake.
Processes are admitted by what is expected of them, slots by count; what is being started is capped apart. Disk is what a sandbox may
write where its node keeps writable layers, unless that is memory.
Each reservation has one owner (a ulid); reserving twice or releasing twice changes nothing. A sandbox that is paused gives all back but
its disk: what it has written stays where it is.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dsec.bus.messages import NodeLoad
from dsec.config import EdgeConfig
from dsec.model import Resources


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be promised, overcommit included."""

    memory: int
    cpus: float
    slots: int
    pids: int
    starting: int
    largest: int = 0  # bytes that one sandbox may be promised: what there really is; 0 = as `memory`
    disk: int = 0  # 0 = not known, and not admitted by
    largest_disk: int = 0  # as `largest`


class Demand(msgspec.Struct, frozen=True):
    """What one sandbox takes."""

    memory: int
    cpus: float
    pids: int
    disk: int = 0


def demand(resources: Resources, disk_mode: str) -> Demand:
    """What a sandbox takes. ``disk_mode``: what its upper lives on; its bytes count as memory on tmpfs, and nowhere in a plain directory,
    which has no limit."""
    memory = resources.memory + (resources.disk if disk_mode == "tmpfs" else 0)
    return Demand(memory, resources.cpus, resources.pids, resources.disk if disk_mode not in ("tmpfs", "dir") else 0)


def room(config: EdgeConfig, memory: int) -> int:
    """Bytes that all sandboxes together may really use (the limit of their common cgroup); admission may promise more."""
    return config.memory or max(0, memory - config.memory_reserve)


def limits(config: EdgeConfig, *, memory: int, cpus: int, pid_max: int, disk: int = 0) -> Limits:
    """The ledger's limits from the configuration and what the node has (``disk`` 0: nobody knows)."""
    disk = config.disk or disk
    pids = config.pids or max(64, pid_max - 4096)
    return Limits(
        memory=int(room(config, memory) * config.memory_overcommit),
        cpus=(config.cpus or cpus) * config.cpu_overcommit,
        slots=config.slots,
        pids=int(pids * config.pids_overcommit),
        starting=config.starting_max or max(4, min(8, 2 * cpus)),
        largest=room(config, memory),
        disk=int(disk * config.disk_overcommit),
        largest_disk=disk,
    )


def node_has() -> tuple[int, int, int]:
    """(bytes of memory, cores, pid_max) of this node; the one function here that reads the system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory, len(os.sched_getaffinity(0)), int(Path("/proc/sys/kernel/pid_max").read_text())


class Ledger:
    """Who holds what. All methods are O(1)."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held: dict[str, Demand] = {}
        self.admitted = 0
        self.memory = 0
        self.cpus = 0.0
        self.pids = 0
        self.disks: dict[str, int] = {}
        self.disk = 0

    def refuses(self, want: Demand) -> str:
        """The name of the first filter that has no room for ``want``, with figures; "" when it fits."""
        most = self.limits
        if len(self.held) + 1 > most.slots:
            return "slots"
        if self.memory + want.memory > most.memory:
            return "memory"
        if self.cpus + want.cpus > most.cpus + 1e-6:
            return "cpus"
        if self.pids + want.pids > most.pids:
            return "pids"
        if most.disk and (self.disk + want.disk > most.disk or want.disk > (most.largest_disk or most.disk)):
            return "disk"
        return ""

    def never_fits(self, want: Demand) -> str:
        """The filter that would refuse ``want`` even on this node when empty; "" when it could fit."""
        most = self.limits
        if want.memory > (most.largest or most.memory):
            return "memory"
        if want.cpus > most.cpus + 1e-6:
            return "cpus"
        if want.pids > most.pids:
            return "pids"
        return "disk" if most.disk and want.disk > (most.largest_disk or most.disk) else ""

    def explain(self, refused_by: str, want: Demand) -> str:
        """One sentence for a person."""
        most = self.limits
        text = {
            "slots": f"{len(self.held)} of {most.slots} slots are taken",
            "memory": f"{want.memory >> 20} MiB wanted, {(most.memory - self.memory) >> 20} of {most.memory >> 20} MiB free",
            "cpus": f"{want.cpus:g} cpus wanted, {most.cpus - self.cpus:g} of {most.cpus:g} shares free",
            "pids": f"{want.pids} processes wanted, {most.pids - self.pids} of {most.pids} free",
            "disk": f"{want.disk >> 20} MiB of disk wanted, {(most.disk - self.disk) >> 20} of {most.disk >> 20} MiB free, "
            f"{(most.largest_disk or most.disk) >> 20} at most for one sandbox",
        }
        return text.get(refused_by, refused_by)

    def reserve(self, owner: str, want: Demand, *, force: bool = False) -> str:
        """Take ``want`` for ``owner``; answers the filter that refused, or "". ``force`` is for adoption: what runs is a fact."""
        if owner in self.held:
            return ""
        if owner in self.disks:
            want = Demand(want.memory, want.cpus, want.pids)
        if not force and (refused_by := self.refuses(want)):
            return refused_by
        self.held[owner] = want
        self.admitted += 1
        self.memory += want.memory
        self.cpus += want.cpus
        self.pids += want.pids
        self.hold_disk(owner, want.disk)
        return ""

    def hold_disk(self, owner: str, size: int) -> None:
        """Count what ``owner`` may write, until `free_disk`."""
        if size and owner not in self.disks:
            self.disks[owner] = size
            self.disk += size

    def free_disk(self, owner: str) -> None:
        """What ``owner`` wrote is gone."""
        self.disk -= self.disks.pop(owner, 0)

    def release(self, owner: str) -> bool:
        """Give back what ``owner`` holds, but for its disk; False when it held nothing."""
        had = self.held.pop(owner, None)
        if had is None:
            return False
        self.memory -= had.memory
        self.cpus = self.cpus - had.cpus if self.held else 0.0  # no drift of floats
        self.pids -= had.pids
        return True

    def load(self, starting: int) -> NodeLoad:
        most = self.limits
        return NodeLoad(
            memory_free=most.memory - self.memory,
            memory_total=most.memory,
            cpus_total=most.cpus,
            cpus_reserved=self.cpus,
            slots_free=most.slots - len(self.held),
            slots_total=most.slots,
            pids_free=most.pids - self.pids,
            disk_free=most.disk - self.disk,
            disk_total=most.disk,
            starting=starting,
            starting_max=most.starting,
            admitted=self.admitted,
        )
