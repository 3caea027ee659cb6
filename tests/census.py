"""Counts what DSec makes on a machine: processes, mounts, cgroups, namespaces, interfaces, loop devices, files.

A census looks only at things that carry one of its tokens (the name of a test's Edge, which every kernel name derives from), that lie
under one of its roots, or that descend from this process, so tests that run side by side on one machine do not see each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

Snapshot = dict[str, frozenset[str]]


class Census:
    """Takes snapshots and compares them.

    Args:
        roots: directories whose mounts, files and mentions in command lines belong to the test.
        tokens: words that DSec-derived names contain: the Edge's name, a sandbox's ULID.
        keep: paths below a root that may stay (a layer cache); everything under them is not counted as a file.
    """

    def __init__(self, roots: Iterable[str | Path] = (), tokens: Iterable[str] = (), keep: Iterable[str | Path] = ()) -> None:
        self.roots = [str(root) for root in roots]
        self.tokens = [token for token in tokens if token]
        self.keep = [str(path) for path in keep]

    def watch(self, token: str) -> None:
        """Counts things named after `token` as well, from the next snapshot on."""
        if token and token not in self.tokens:
            self.tokens.append(token)

    def snapshot(self) -> Snapshot:
        """What is there now, as readable names by kind."""
        return {
            "processes": frozenset(self._processes()),
            "mounts": frozenset(self._mounts()),
            "cgroups": frozenset(self._cgroups()),
            "netns": frozenset(self._named(["/run/netns", "/var/run/netns"])),
            "links": frozenset(self._named(["/sys/class/net"])),
            "loops": frozenset(self._loops()),
            "files": frozenset(self._files()),
        }

    @staticmethod
    def diff(before: Snapshot, after: Snapshot) -> dict[str, list[str]]:
        """What came and did not go, by kind; empty when nothing was left."""
        left = {kind: sorted(after[kind] - before[kind]) for kind in after}
        return {kind: names for kind, names in left.items() if names}

    def left_since(self, before: Snapshot, seconds: float = 0.0) -> dict[str, list[str]]:
        """`diff` against now, asked again for up to `seconds` until nothing is left (exits and lazy unmounts take a moment)."""
        end = time.monotonic() + seconds
        while (left := self.diff(before, self.snapshot())) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def _ours(self, text: str) -> bool:
        return any(word in text for word in (*self.roots, *self.tokens))

    def _processes(self) -> Iterable[str]:
        parents: dict[int, int] = {}
        about: dict[int, tuple[str, str]] = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            pid = int(entry)
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                groups = Path(f"/proc/{pid}/cgroup").read_text()
            except OSError:  # it went away while we looked
                continue
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            fields = stat[stat.rindex(")") + 2 :].split()
            if fields[0] == "Z" and int(fields[1]) != os.getpid():
                continue  # another parent's zombie holds nothing; our own would be a missing wait
            parents[pid] = int(fields[1])
            about[pid] = (command or f"[{name}]", groups)
        above = {os.getpid()}
        pid = os.getpid()
        while pid in parents and (pid := parents[pid]) not in above:
            above.add(pid)
        for pid, (command, groups) in about.items():
            if pid in above:
                continue
            line, seen = pid, set()
            while line in parents and line not in seen and line != os.getpid():
                seen.add(line)
                line = parents[line]
            if line == os.getpid() or self._ours(command) or self._ours(groups):
                yield f"{pid} {command[:160]}"

    def _mounts(self) -> Iterable[str]:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if self._ours(line):
                yield line.split(" ", 4)[4]

    def _cgroups(self) -> Iterable[str]:
        if not self.tokens:
            return
        tops = set()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            if right.split()[0] in {"cgroup", "cgroup2"}:
                tops.add(left.split()[4])
        for top in sorted(tops):
            for folder, below, _ in os.walk(top):
                for name in below:
                    path = os.path.join(folder, name)
                    if any(token in path for token in self.tokens):
                        yield path

    def _named(self, folders: list[str]) -> Iterable[str]:
        for folder in folders:
            if os.path.isdir(folder):
                yield from (f"{folder}/{name}" for name in os.listdir(folder) if self._ours(name))

    def _loops(self) -> Iterable[str]:
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                source = backing.read_text().strip()
            except OSError:
                continue
            if self._ours(source):
                yield f"{backing.parts[3]} {source}"

    def _files(self) -> Iterable[str]:
        for root in self.roots:
            if root in self.keep:
                continue
            for folder, below, names in os.walk(root):
                below[:] = [name for name in below if os.path.join(folder, name) not in self.keep]
                for name in (*names, *below):
                    path = os.path.join(folder, name)
                    if path not in self.keep:
                        yield path
