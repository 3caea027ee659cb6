"""What the doctor asks of the node itself: kernel, rights, cgroups, and tables that all its processes share."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from dsec import doctor_probes as probes
from dsec.doctor_rules import Answer, Rule, Rules

rules = Rules()
tables = Rules()


@rules.check("kernel", "EROFS without a loop device needs 6.12, layers by descriptor 6.15, idmapped layers 5.19", "use a newer kernel")
def _kernel() -> Answer:
    release = platform.release()
    found = release.split("-", 1)[0]
    if probes.at_least(found, 6, 12):
        return "ok", release
    return ("fallback" if probes.at_least(found, 5, 19) else "missing"), release


_CAPABILITIES = {"SYS_ADMIN": 21, "NET_ADMIN": 12, "SETUID": 7, "SETGID": 6, "CHOWN": 0, "MKNOD": 27, "KILL": 5, "DAC_OVERRIDE": 1}


@rules.check("root", "a node (Edge) needs root; the client does not", "run the Edge as root")
def _root() -> Answer:
    effective = _effective()
    lacking = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if os.geteuid() == 0 and not lacking:
        return "ok", "root with the capabilities that are needed"
    return "missing", f"uid {os.geteuid()}, without CAP_{', CAP_'.join(lacking)}" if lacking else f"uid {os.geteuid()}"


@rules.check("sys_resource", "oom_score_adj cannot be lowered, so it is raised in sandboxes instead; RLIMIT_NOFILE stays at its hard limit")
def _sys_resource() -> Answer:
    return ("ok", "CAP_SYS_RESOURCE") if _effective() >> 24 & 1 else ("fallback", "without CAP_SYS_RESOURCE")


def _effective() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


# --- cgroups -----------------------------------------------------------------------------------------------------------

_LIMITS = ("memory", "cpu", "pids")


@rules.check("cgroup", "limits on memory, CPU and processes cannot be kept", "mount the cgroup controllers (systemd does)")
def _cgroup() -> Answer:
    mounts = probes.cgroup_mounts()
    on_v2 = probes.v2_controllers(mounts)
    if all(name in on_v2 for name in _LIMITS):
        return "ok", f"v2 at {mounts['2']}"
    lacking = [name for name in _LIMITS if name not in mounts and name not in on_v2]
    if lacking:
        return "missing", f"no controller for {', '.join(lacking)}"
    hybrid = ", hybrid: v2 without them" if "2" in mounts else ""
    return "ok", f"v1 ({', '.join(f'{name} at {mounts[name]}' for name in _LIMITS if name in mounts)}){hybrid}"


@rules.check(
    "cgroup2",
    "cgroup v1 is used: limits hold, but memory.high and memory.reclaim are not there",
    "boot with systemd.unified_cgroup_hierarchy=1",
)
def _cgroup2() -> Answer:
    mounts = probes.cgroup_mounts()
    on_v2 = probes.v2_controllers(mounts)
    if all(name in on_v2 for name in _LIMITS):
        return "ok", mounts["2"]
    if all(name in mounts for name in _LIMITS):
        return "fallback", "controllers are on v1" + (f"; v2 at {mounts['2']} has none of them" if "2" in mounts else "")
    return "missing", "no controllers"


@rules.check("freezer", "sandboxes cannot be paused")
def _freezer() -> Answer:
    mounts = probes.cgroup_mounts()
    if "2" in mounts:
        return "ok", f"cgroup.freeze at {mounts['2']}"
    return ("ok", f"v1 at {mounts['freezer']}") if "freezer" in mounts else ("missing", "no freezer")


@rules.check("memory_reclaim", "memory of a paused sandbox is sent to swap process by process, and what none maps by a limit below it")
def _memory_reclaim() -> Answer:
    mounts = probes.cgroup_mounts()
    if "memory" in probes.v2_controllers(mounts):
        root = Path(mounts["2"])
        if any(root.glob("memory.reclaim")) or any(root.glob("*/memory.reclaim")):
            return "ok", "memory.reclaim"
        return "fallback", "v2 without memory.reclaim (it came with 5.19)"
    if "memory" in mounts and Path(mounts["memory"], "memory.memsw.limit_in_bytes").exists():
        return "fallback", "v1: MADV_PAGEOUT and memory.limit_in_bytes"
    if "memory" in mounts and Path(mounts["memory"], "memory.force_empty").exists():
        return "fallback", "v1: MADV_PAGEOUT and memory.force_empty (swap is not counted)"
    return "fallback", "MADV_PAGEOUT"


@rules.check("cpu_idle", 'qos="be" is kept by the least weight: it still delays the first wake-up of others', "use a kernel >= 5.15")
def _cpu_idle() -> Answer:
    mounts = probes.cgroup_mounts()
    roots = [Path(mounts[name]) for name in ("cpu", "2") if name in mounts]
    for root in roots:  # the file is in every group but the root
        if next(root.glob("*/cpu.idle"), None):
            return "ok", f"cpu.idle at {root}"
    if probes.at_least(platform.release().split("-", 1)[0], 5, 15):
        return "ok", "cpu.idle (by the kernel's version; no group to look at)"
    return "fallback", "no cpu.idle (it came with 5.15)"


@rules.check(
    "swap", "a pause only freezes: the memory stays", "set pause.swap to zram or file in the configuration: the Edge makes its own"
)
def _swap() -> Answer:
    active = [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    if active:
        return "ok", ", ".join(active)
    return "fallback", "no swap is on" + (
        ", zram is there" if Path("/sys/class/zram-control").exists() or Path("/sys/block/zram0").exists() else ""
    )


# --- tables that the whole node shares --------------------------------------------------------------------------------


def _table(name: str, path: str, enough: int, consequence: str, sysctl: str) -> None:
    def answer() -> Answer:
        value = probes.number(path)
        if value is None:
            return "ok", "no limit found"
        return ("ok" if value >= enough else "fallback"), str(value)

    tables[name] = Rule(answer, consequence, f"sysctl -w {sysctl}={enough}")


_table("pid_max", "/proc/sys/kernel/pid_max", 131_072, "admission counts expected processes and keeps 4,096 for the node", "kernel.pid_max")


@tables.check("nofile", "fewer sandboxes fit: each may need a descriptor of the Edge", "raise LimitNOFILE= of the service, or ulimit -Hn")
def _nofile() -> Answer:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        "ok" if hard == resource.RLIM_INFINITY or hard >= 65_536 else "fallback"
    ), "no limit" if hard == resource.RLIM_INFINITY else str(hard)


_table(
    "inotify",
    "/proc/sys/fs/inotify/max_user_instances",
    8_192,
    "tools that watch files fail early when many sandboxes share one user",
    "fs.inotify.max_user_instances",
)
_table("ptys", "/proc/sys/kernel/pty/max", 4_096, "few terminals at a time", "kernel.pty.max")
_table(
    "neighbours",
    "/proc/sys/net/ipv4/neigh/default/gc_thresh3",
    16_384,
    "networks of many sandboxes use permanent neighbours",
    "net.ipv4.neigh.default.gc_thresh3",
)
_table(
    "conntrack",
    "/proc/sys/net/netfilter/nf_conntrack_max",
    262_144,
    "many connections of open sandboxes fill the table",
    "net.netfilter.nf_conntrack_max",
)
