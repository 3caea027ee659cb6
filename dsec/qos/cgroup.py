"""Control groups, v1 and v2, behind one small set of functions.

A node has one parent group an Edge (``dsec/<edge>``) and below it one group a sandbox, in every hierarchy that is needed.
Existing groups and mounts are left as they are; on v2 the controllers are switched on for the children of the groups on the
way down, which is the only thing written outside our own groups.

``cpus`` is a hard cap (CFS bandwidth, as Docker's ``--cpus``) and also the weight among neighbours; memory has no swap beside it. A
best-effort group has a small weight, the same for all (paper, QoS: LS and BE), and none while `give_way` says so: then it runs when no
other sandbox of its node wants the core (cpu.idle; measured on one core under eight busy loops of such groups, a latency-sensitive
task that works for 4 ms answers as if it were alone, beside the small weight at times 3 ms later, beside equal weights 30).

All functions touch the kernel's files and may sleep for a moment: call them in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping

import msgspec

from dsec import syscalls
from dsec.errors import NodeError, Unsupported

PERIOD_US = 100_000  # what a new group has
QUOTA = "cpu.cfs_quota_us"  # v1
NEEDED = ("cpu", "cpuacct", "memory", "pids", "freezer")
# Pages of shared layers stay charged to the group that read them first and keep it as a dead one after its removal. Dead groups
# slow every shrinker walk, but emptying a group (v1 memory.force_empty) takes 100 ms and drops cache that neighbours use: it
# is done only where this many have gathered.
MANY_GROUPS = 8000
FREEZE_S = 5.0  # seconds for all processes of a group to stand still, on a node that has not more to run than it has cores
# Seconds until the first version's freezer is told again: it asks each process once, and misses one that is just going to wait for its
# child (vfork), about once in a thousand times on a busy node (measured); the group then stays FREEZING for ever.
FREEZE_AGAIN = 0.1
STANDING = ("__refrigerator", "do_freezer_trap")  # where a frozen process waits, by version
LEAD = 4.0  # what a core of a latency-sensitive sandbox weighs; all are capped at 25 of them on v2, at 64 on v1
BEST_EFFORT = 0.06  # of a core: little beside LEAD, much beside the groups that give way, which weigh 0.003 (WEIGHT_IDLEPRIO)
SPARE = "spare-"  # begins the name of a group that waits for its sandbox (dsec/qos/spares.py)
AHEAD = "ahead-"  # and of one in which a process waits too (launcher/ahead.c)
AHEAD_ENDS_S = 2.0  # seconds until a process that waits in one has ended, once it is killed
PID_RESERVE = 4096  # process ids that sandboxes never get, so that the node stays usable


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one group; 0 is no limit. Bytes, cores, processes; ``best_effort``: the small weight, whatever ``cpus``."""

    memory: int = 0
    cpus: float = 0.0
    pids: int = 0
    best_effort: bool = False


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a group has used: milliseconds of CPU, bytes, processes, processes killed for memory."""

    cpu_ms: int = 0
    memory: int = 0
    memory_peak: int = 0
    pids: int = 0
    oom_kills: int = 0


class Order(msgspec.Struct, frozen=True):
    """What makes one group: directories, then what is written where; and the files by which its first process joins, writing 0.

    On v1 that is ``tasks``: a thread that moves itself takes no lock of all thread groups, whose RCU grace period costs 7 to 12 ms.
    """

    directories: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    joins: tuple[str, ...]


class Hierarchy(msgspec.Struct, frozen=True, kw_only=True):
    """Where the controllers are. ``roots`` maps each to its mount point (one on v2); ``unified`` is the cgroup2 mount, if any."""

    version: int
    roots: dict[str, str]
    unified: str = ""
    others: tuple[str, ...] = ()  # v1 mounts of further controllers

    @property
    def hybrid(self) -> bool:
        """Controllers on v1 with a cgroup2 mount beside them (crun 1.8 refuses this)."""
        return self.version == 1 and bool(self.unified)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in NEEDED if name not in self.roots)


def parse(mountinfo: str, v2_controllers: Mapping[str, str]) -> Hierarchy:
    """The hierarchy from the text of /proc/self/mountinfo; ``v2_controllers`` maps a cgroup2 mount to its cgroup.controllers."""
    v1: dict[str, str] = {}
    unified = ""
    points: dict[str, None] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        fstype, _, options = right.split(" ", 2)
        if fstype == "cgroup2" and not unified:
            unified = point
        elif fstype == "cgroup":
            points[point] = None
            for name in options.split(","):
                if name in (*NEEDED, "devices"):
                    v1.setdefault(name, point)
    offered = v2_controllers.get(unified, "").split()
    if "memory" in offered:  # cpuacct and freezer are part of v2's core
        return Hierarchy(version=2, roots={n: unified for n in NEEDED if n in offered or n in ("freezer", "cpuacct")}, unified=unified)
    return Hierarchy(version=1, roots=v1, unified=unified, others=tuple(points))


def detect() -> Hierarchy:
    """What this node has, as this process's mount namespace shows it."""
    with open("/proc/self/mountinfo") as file:
        text = file.read()
    offered = {}
    for line in text.splitlines():
        if " - cgroup2 " in line:
            point = line.split()[4]
            with contextlib.suppress(OSError), open(f"{point}/cgroup.controllers") as file:
                offered[point] = file.read()
    return parse(text, offered)


def settings(version: int, limits: Limits) -> dict[str, list[tuple[str, str]]]:
    """What is written where, in order, by controller (pure; `dsec inspect --plan` prints it)."""
    writes: dict[str, list[tuple[str, str]]] = {"memory": [], "cpu": [], "pids": []}
    if limits.memory:
        size = str(limits.memory)
        if version == 2:
            writes["memory"] += [("memory.max", size), ("memory.swap.max", "0")]
        else:
            writes["memory"] += [("memory.limit_in_bytes", size), ("memory.memsw.limit_in_bytes", size)]
    if limits.cpus:
        quota = str(max(1000, round(limits.cpus * PERIOD_US)))
        if version == 2:
            writes["cpu"].append(("cpu.max", f"{quota} {PERIOD_US}"))
        else:
            writes["cpu"].append((QUOTA, quota))  # the period is the kernel's own; each write walks all groups of the node
    if limits.best_effort:
        writes["cpu"].append(weight(version, BEST_EFFORT))
    elif limits.cpus:
        writes["cpu"].append(weight(version, LEAD * limits.cpus))
    if limits.pids:
        writes["pids"].append(("pids.max", str(limits.pids)))
    return writes


def weight(version: int, cores: float) -> tuple[str, str]:
    """The file and the value that weigh as so many cores do among processes of no group (pure)."""
    file, unit, least, most = ("cpu.weight", 100, 1, 10_000) if version == 2 else ("cpu.shares", 1024, 2, 262_144)
    return file, str(min(most, max(least, round(cores * unit))))


def yielding(version: int, on: bool, *, can_idle: bool) -> list[tuple[str, str]]:
    """What makes a best-effort group give way to all others, or have its weight again (pure). Where the kernel has no cpu.idle
    (``can_idle``) it gets the least weight. An idle group takes no weight (EINVAL), and what it had is forgotten."""
    if not can_idle:
        return [weight(version, 0 if on else BEST_EFFORT)]
    return [("cpu.idle", "1")] if on else [("cpu.idle", "0"), weight(version, BEST_EFFORT)]


# What a device group lets through: making nodes (which needs a capability anyway), and the usual character devices.
DEVICES = ("c *:* m", "b *:* m", "c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:0 rwm", "c 5:2 rwm", "c 136:* rwm")

_DEVICE_RULES = (("devices.deny", "a"), *(("devices.allow", rule) for rule in DEVICES))

# Where a kernel without swap accounting has no such file, there is no swap to limit either.
_OPTIONAL = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max"})


def patience(load: float, cores: int) -> float:
    """Seconds that processes may take to stand still: each must run for a moment before it does, and waits for its turn like all others."""
    return min(FREEZE_S * max(1.0, load / cores), 60.0)


class Cgroups:
    """The groups of one Edge below ``parent`` (a relative path such as ``dsec/node-1``).

    With ``devices`` each group opens only the usual character devices (v1 only): for nodes without user namespaces, where a device
    node that a layer brings could be opened.
    """

    def __init__(self, parent: str, hierarchy: Hierarchy | None = None, *, devices: bool = False) -> None:
        if not parent or parent.startswith("/") or ".." in parent.split("/"):
            raise ValueError(f"not a group below the root: {parent!r}")
        self.hierarchy = hierarchy or detect()
        self.parent = parent
        self.version = self.hierarchy.version
        self.can_idle = False  # known once `open` has returned
        self._live = 0
        self._absent: frozenset[str] = frozenset()  # files that this kernel does not have; known once `open` has returned
        self._devices = devices and self.version == 1 and "devices" in self.hierarchy.roots

    def open(self, memory: int = 0) -> None:
        """Make the parent groups; ``memory`` bytes are the limit of all sandboxes together (0: none), so that admitting more than the
        node has costs a sandbox and never the node. Raises `Unsupported` where memory or pids cannot be limited."""
        lacking = [name for name in ("memory", "pids", "cpu", "freezer") if name not in self.hierarchy.roots]
        if lacking:
            raise Unsupported(f"no {', '.join(lacking)} cgroup controller here", reason="cgroup", fix="mount the controllers (dsec doctor)")
        self._drop_spares()
        for root in self._mounts():
            path = root
            for part in self.parent.split("/"):
                if self.version == 2:
                    _write(f"{path}/cgroup.subtree_control", "+cpu +memory +pids")
                path = f"{path}/{part}"
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o755)
                if root == self.hierarchy.roots["cpu"]:
                    self._weigh(path)
            if self.version == 2:
                _write(f"{path}/cgroup.subtree_control", "+cpu +memory +pids")
        self._absent = frozenset(name for name in _OPTIONAL if not os.path.exists(f"{self.path('memory', '')}/{name}"))
        self.can_idle = os.path.exists(f"{self.path('cpu', '')}/cpu.idle") and not syscalls.disabled("cpu_idle")
        with open("/proc/sys/kernel/pid_max") as file:
            most = int(file.read()) - PID_RESERVE
        _write(f"{self.path('pids', '')}/pids.max", str(max(most, 1024)))
        if memory:
            _write(f"{self.path('memory', '')}/{'memory.max' if self.version == 2 else 'memory.limit_in_bytes'}", str(memory))

    def _weigh(self, path: str) -> None:
        """All sandboxes together weigh as much as one busy process a core, as Kubernetes weighs its pods: a group weighs as much as
        one process however much is in it, so that launches would starve beside anything else on the node."""
        cores = os.cpu_count() or 1
        file, value = weight(self.version, cores)
        _write(f"{path}/{file}", value)

    def order(self, name: str, limits: Limits, *, has_quota: bool = False) -> Order:
        """What makes the group of one sandbox with its limits; it counts as one of ours from now on, until `destroy`. ``has_quota``: it is
        there already, with these ``cpus``, so that no directory is to be made."""
        self._live += 1
        writes = [(f"{self.path('devices', name)}/{file}", rule) for file, rule in _DEVICE_RULES] if self._devices else []
        for controller, wanted in settings(self.version, limits).items():
            writes += [
                (f"{self.path(controller, name)}/{file}", value)
                for file, value in wanted
                if file not in self._absent and not (has_quota and file == QUOTA)
            ]
        directories = self.directories(name)
        joint = "cgroup.procs" if self.version == 2 else "tasks"
        return Order(() if has_quota else directories, tuple(writes), tuple(f"{path}/{joint}" for path in directories))

    def create(self, name: str, limits: Limits) -> Order:
        """Carry an `order` out. A group of that name left by an earlier try is used again.

        Raises `NodeError`; what was made is then removed.
        """
        order = self.order(name, limits)
        try:
            for path in order.directories:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path, 0o755)
            for file, value in order.settings:
                _write(file, value)
        except OSError as error:
            with contextlib.suppress(NodeError):
                self.destroy(name, timeout=1.0)
            raise NodeError(f"cgroup {self.parent}/{name}: {error}", reason="cgroup") from error
        return order

    def pids(self, name: str) -> tuple[int, ...]:
        """Processes of the group as this process numbers them; empty when the group does not exist."""
        try:
            with open(f"{self.path('pids', name)}/cgroup.procs") as file:
                return tuple(int(line) for line in file)
        except (FileNotFoundError, OSError) as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return ()
            raise

    def directories(self, name: str) -> tuple[str, ...]:
        """The group's directory in each hierarchy."""
        return tuple(f"{root}/{self.parent}/{name}" for root in self._mounts())

    def names(self) -> frozenset[str]:
        """Every child group of the parent, in any hierarchy, but for those that wait for a sandbox."""
        return frozenset(name for name in self._children() if not name.startswith((SPARE, AHEAD)))

    def _children(self) -> set[str]:
        found: set[str] = set()
        for root in self._mounts():
            with contextlib.suppress(FileNotFoundError), os.scandir(f"{root}/{self.parent}") as entries:
                found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return found

    def _drop_spares(self) -> None:
        """Those that an Edge left behind which did not end in order, and what zygotes have made ahead, which their end does not remove."""
        for name in self._children():
            if name.startswith((SPARE, AHEAD)):
                with contextlib.suppress(NodeError):
                    self.kill(name)
                    self.destroy(name, timeout=AHEAD_ENDS_S if name.startswith(AHEAD) else 0.0)

    def renamed(self) -> None:
        """A spare, which was counted as one of ours, is a sandbox's from now on, which `order` counts."""
        self._live = max(0, self._live - 1)

    def freeze(self, name: str, on: bool, timeout: float = 0.0) -> None:
        """Stop or continue every process of the group; returns when the kernel says that all are. ``timeout`` seconds, 0: `patience`.
        Raises `NodeError` on time-out, with what holds it up, and with the group thawed again."""
        path, told = self.path("freezer", name), ("0", "1") if self.version == 2 else ("THAWED", "FROZEN")
        state = f"{path}/{'cgroup.freeze' if self.version == 2 else 'freezer.state'}"
        _write(state, told[on])
        began = asked = time.monotonic()
        bound = timeout or patience(os.getloadavg()[0], os.cpu_count() or 1)
        while self.frozen(name) is not on:
            now = time.monotonic()
            if now - began > bound:
                held_up = self._held_up(name) if on else ""
                if on:
                    self.freeze(name, False)
                text = f"cgroup {self.parent}/{name} did not {'freeze' if on else 'thaw'} in {bound:.3g} s{held_up}"
                raise NodeError(text, reason="freezer")
            if on and self.version == 1 and now - asked > FREEZE_AGAIN:
                _write(state, told[on])
                asked = now
            time.sleep(0.0005)

    def _held_up(self, name: str) -> str:
        """Which processes do not stand still, and where the kernel says that they are."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError, IndexError):
                with open(f"/proc/{pid}/stat") as file:
                    command, _, rest = file.read().partition(" (")[2].rpartition(") ")
                with open(f"/proc/{pid}/wchan") as file:
                    where = file.read()
                if where not in STANDING:
                    found.append(f"{command} {pid} ({rest[0]}, {where})")
        return f": {', '.join(found[:3])}" if found else ""

    def frozen(self, name: str) -> bool:
        path = self.path("freezer", name)
        if self.version == 2:
            return _fields(f"{path}/cgroup.events").get("frozen") == 1
        with open(f"{path}/freezer.state") as file:
            return file.read().strip() == "FROZEN"

    def freezing(self, name: str) -> bool:
        """Whether the group was told to stand still, whether or not all of its processes do yet."""
        path = self.path("freezer", name)
        with open(f"{path}/{'cgroup.freeze' if self.version == 2 else 'freezer.state'}") as file:
            return file.read().strip() in ("1", "FROZEN", "FREEZING")

    def kill(self, name: str) -> int:
        """SIGKILL to every process of the group, thawing it first (a v1 frozen process does not die). Answers how many there were."""
        pids = self.pids(name)
        if not pids:
            return 0
        with contextlib.suppress(OSError, NodeError):
            if self.version == 1:
                self.freeze(name, False, timeout=1.0)
        if self.version == 2:
            try:
                _write(f"{self.path('pids', name)}/cgroup.kill", "1")
                return len(pids)
            except FileNotFoundError:  # before Linux 5.14
                pass
        for pid in pids:
            _kill_member(pid, f"{self.parent}/{name}")
        return len(pids)

    def usage(self, name: str) -> GroupUsage:
        """Raises `FileNotFoundError` when the group does not exist."""
        memory, pids = self.path("memory", name), self.path("pids", name)
        if self.version == 2:
            return GroupUsage(
                cpu_ms=_fields(f"{pids}/cpu.stat").get("usage_usec", 0) // 1000,
                memory=_number(f"{memory}/memory.current"),
                memory_peak=_number(f"{memory}/memory.peak", 0),
                pids=_number(f"{pids}/pids.current"),
                oom_kills=_fields(f"{memory}/memory.events").get("oom_kill", 0),
            )
        return GroupUsage(
            cpu_ms=_number(f"{self.path('cpuacct', name)}/cpuacct.usage", 0) // 1_000_000,
            memory=_number(f"{memory}/memory.usage_in_bytes"),
            memory_peak=_number(f"{memory}/memory.max_usage_in_bytes"),
            pids=_number(f"{pids}/pids.current"),
            oom_kills=self.oom_kills(name),
        )

    def cpu_ns(self, name: str) -> int:
        """CPU time that the group and those below it have used, in nanoseconds; "" is the parent. Raises `FileNotFoundError`."""
        if self.version == 2:
            if "usage_usec" not in (stat := _fields(f"{self.path('cpuacct', name)}/cpu.stat")):
                raise FileNotFoundError(errno.ENOENT, "no such group", name)
            return stat["usage_usec"] * 1000
        fd = os.open(f"{self.path('cpuacct', name)}/cpuacct.usage", os.O_RDONLY | os.O_CLOEXEC)  # a third of what open() takes
        try:
            return int(os.read(fd, 32))
        finally:
            os.close(fd)

    def give_way(self, name: str, on: bool) -> None:
        """Whether a best-effort group takes only CPU time that no other group here wants. Raises OSError."""
        for file, value in yielding(self.version, on, can_idle=self.can_idle):
            _write(f"{self.path('cpu', name)}/{file}", value)

    def yields(self, name: str) -> bool:
        """Whether it does. Raises `FileNotFoundError`."""
        file, value = yielding(self.version, True, can_idle=self.can_idle)[0]
        return _number(f"{self.path('cpu', name)}/{file}") == int(value)

    def oom_kills(self, name: str) -> int:
        """Processes that the kernel killed in this group because its memory limit was reached; 0 when the group is gone."""
        path = self.path("memory", name)
        with contextlib.suppress(FileNotFoundError):
            return _fields(f"{path}/{'memory.events' if self.version == 2 else 'memory.oom_control'}").get("oom_kill", 0)
        return 0

    def destroy(self, name: str, timeout: float = 5.0) -> None:
        """Remove the group everywhere; its processes must have been killed. Idempotent. Raises `NodeError` while one is still there."""
        end = time.monotonic() + timeout
        for root in self._everywhere():
            path = f"{root}/{self.parent}/{name}"
            if root == self.hierarchy.roots.get("memory") and self.version == 1 and _memory_groups() > MANY_GROUPS + 2 * self._live:
                with contextlib.suppress(OSError):
                    _write(f"{path}/memory.force_empty", "0")
            _remove_tree(path, end)
        self._live = max(0, self._live - 1)

    def close(self) -> None:
        """Remove the parent groups where nothing lives below them."""
        self._drop_spares()
        for root in self._everywhere():
            parts = self.parent.split("/")
            for depth in range(len(parts), 0, -1):
                with contextlib.suppress(OSError):
                    os.rmdir("/".join([root, *parts[:depth]]))

    def _mounts(self) -> Iterator[str]:
        # The memory group is joined last: what the joining itself allocates stays with whoever launches.
        names = (
            ("devices", "pids", "freezer", "cpu", "cpuacct", "memory") if self._devices else ("pids", "freezer", "cpu", "cpuacct", "memory")
        )
        yield from dict.fromkeys(self.hierarchy.roots[name] for name in names if name in self.hierarchy.roots)

    def _everywhere(self) -> Iterator[str]:
        """Also the hierarchies that we do not use: runc makes a group in each."""
        yield from dict.fromkeys((*self._mounts(), *self.hierarchy.others))

    def path(self, controller: str, name: str) -> str:
        """Where the group lies below that controller's mount; "" is the parent."""
        root = self.hierarchy.roots[controller]
        return f"{root}/{self.parent}/{name}" if name else f"{root}/{self.parent}"


class Group:
    """One sandbox's group, for who asks about it now and then and is handed around by the thousand."""

    __slots__ = ("_groups", "_name")

    def __init__(self, groups: Cgroups, name: str) -> None:
        self._groups, self._name = groups, name

    def oom_kills(self) -> int:
        return self._groups.oom_kills(self._name)

    def frozen(self) -> bool:
        return self._groups.frozen(self._name)


def _kill_member(pid: int, group: str) -> None:
    """Kill ``pid`` if it still is in ``group``: the descriptor is opened first, so a number that was used again is not hit."""
    try:
        pidfd = syscalls.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            if f"/{group}\n" in file.read():
                syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    finally:
        os.close(pidfd)


def _remove_tree(path: str, end: float) -> None:
    while True:
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                raise NodeError(f"{path}: {error}", reason="cgroup") from error
            with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        _remove_tree(entry.path, end)
            if time.monotonic() > end:
                raise NodeError(f"{path}: processes are still in it", reason="cgroup") from error
            time.sleep(0.002)


def _memory_groups() -> int:
    """Memory groups that the kernel holds, dead ones included (v1)."""
    with open("/proc/cgroups") as file:
        return next((int(line.split()[2]) for line in file if line.startswith("memory\t")), 0)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _number(path: str, default: int | None = None) -> int:
    try:
        with open(path) as file:
            return int(file.read())
    except FileNotFoundError:
        if default is None:
            raise
        return default


def _fields(path: str) -> dict[str, int]:
    """Key-value lines of a control file; none when the group is gone (v1 answers ENODEV to a file that was open while it went)."""
    try:
        with open(path) as file:
            return {key: int(value) for key, _, value in (line.partition(" ") for line in file) if value.strip().isdigit()}
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.ENOENT):
            return {}
        raise
