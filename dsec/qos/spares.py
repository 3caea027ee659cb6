"""Groups made ahead, for the next sandboxes of a node that has very many.

Two steps of making a group grow with all that lives (cgroup v1): a new memory group gets a map of every file system there is, several
hundred KiB with 10,000 sandboxes, and writing a CFS quota walks over all CPU groups. A spare has both behind it; it gets its sandbox's
name by rename, which costs the same whatever lives, and its other limits are written as ever. Spares are new: no sandbox was in one, so
nothing is charged to it. cgroup v2 renames no group.

`make`, `become` and `remove` touch the kernel's files: call them in a thread; all else is for the event loop's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque

import msgspec

from dsec.errors import NodeError
from dsec.qos.cgroup import SPARE, Cgroups, Limits

MOST = 64  # spares at one time


class Spare(msgspec.Struct, frozen=True):
    """A group of no sandbox, and the cores of its quota."""

    name: str
    cpus: float


class Spares:
    """The spares of one Edge's groups."""

    def __init__(self, groups: Cgroups) -> None:
        self._groups = groups
        self._ready: deque[Spare] = deque()
        self._numbers = itertools.count(1)
        self.cpus = 0.0  # what was asked for last, and is made next

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def wanting(self) -> bool:
        """Whether there may be more."""
        return self._groups.version == 1 and len(self._ready) < MOST

    def put(self, spare: Spare) -> None:
        self._ready.append(spare)

    def take(self, limits: Limits) -> Spare | None:
        """One whose quota is right, else any; None when there is none."""
        self.cpus = limits.cpus
        if not self._ready:
            return None
        found = next((spare for spare in self._ready if spare.cpus == limits.cpus), self._ready[0])
        self._ready.remove(found)
        return found

    def take_all(self) -> list[Spare]:
        spares = list(self._ready)
        self._ready.clear()
        return spares

    def make(self, cpus: float) -> Spare:
        """One with this quota, not `put` yet. Raises `NodeError`; then nothing is left of it."""
        spare = Spare(f"{SPARE}{next(self._numbers)}", cpus)
        self._groups.create(spare.name, Limits(cpus=cpus))
        return spare

    def become(self, spare: Spare, name: str) -> bool:
        """Give a spare this name everywhere; False when it is not whole, and then what has not got the name is gone."""
        try:
            for old, new in zip(self._groups.directories(spare.name), self._groups.directories(name), strict=True):
                os.rename(old, new)
        except OSError:
            self.remove([spare])
            return False
        self._groups.renamed()
        return True

    def remove(self, spares: list[Spare]) -> None:
        for spare in spares:
            with contextlib.suppress(NodeError):  # `Cgroups.open` and `close` find it
                self._groups.destroy(spare.name)
