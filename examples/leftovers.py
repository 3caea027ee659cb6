"""What a run leaves on the machine: processes, mounts and cgroups that bear its mark, counted from /proc and /sys.

The mark is a word that only this run uses (it is in the Edge's name, so in every cgroup, and in the state directory's path, so in
every mount and command line), which makes the count exact on a machine where other things come and go.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Traces(msgspec.Struct, frozen=True):
    """What bears the mark. ``files``: the state directory's path while it exists."""

    processes: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def any(self) -> bool:
        return bool(self.processes or self.mounts or self.cgroups or self.files)

    def counts(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in self.__struct_fields__}


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # the process ended, or is not ours to read
        return ""


def processes(mark: str) -> tuple[str, ...]:
    """``pid command`` of every process whose cgroup, command line or environment bears the mark, except this one."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        command = _read(f"{entry.path}/cmdline").replace("\0", " ").strip()
        if mark in command or mark in _read(f"{entry.path}/cgroup") or mark in _read(f"{entry.path}/environ"):
            found.append(f"{entry.name} {command[:100] or _read(f'{entry.path}/comm').strip()}")
    return tuple(found)


def mounts(mark: str) -> tuple[str, ...]:
    """Lines of this mount namespace's mountinfo that bear the mark."""
    return tuple(line for line in _read("/proc/self/mountinfo").splitlines() if mark in line)


def cgroups(mark: str) -> tuple[str, ...]:
    """Cgroups below every hierarchy whose path bears the mark."""
    found: list[str] = []
    for line in _read("/proc/self/mountinfo").splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1] if "-" in fields else ""
        if kind in ("cgroup", "cgroup2"):
            found.extend(folder for folder, _, _ in os.walk(fields[4]) if mark in folder)
    return tuple(found)


def traces(mark: str, state: Path | None = None) -> Traces:
    """Everything at this moment; ``state`` is the directory that must be gone in the end."""
    files = (str(state),) if state is not None and state.exists() else ()
    return Traces(processes(mark), mounts(mark), cgroups(mark), files)


def totals() -> dict[str, int]:
    """The whole machine's counts, for people: other things on it move them too."""
    return {
        "processes": sum(1 for name in os.listdir("/proc") if name.isdigit()),
        "mounts": len(_read("/proc/self/mountinfo").splitlines()),
        "cgroups": len(cgroups("/")),
    }
