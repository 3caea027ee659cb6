"""Which hierarchy a node has, and what is written into a group, are decided without touching it."""

from __future__ import annotations

from dsec.model import MIB
from dsec.qos.cgroup import Limits, parse, patience, settings, yielding

V1 = "\n".join(
    f"{n} 31 0:{n} / /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"
    for n, name in enumerate(("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids"), 32)
)
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def test_v1() -> None:
    """Controllers on v1 are found one by one."""
    found = parse(V1, {})
    assert (found.version, found.hybrid, found.missing) == (1, False, ())
    assert found.roots["memory"] == "/sys/fs/cgroup/memory"


def test_joint_mounts() -> None:
    """cpu and cpuacct on one mount are one place."""
    line = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
    found = parse(line, {})
    assert found.roots["cpu"] == found.roots["cpuacct"]
    assert found.missing == ("memory", "pids", "freezer")


def test_hybrid() -> None:
    """A cgroup2 mount without memory beside v1 controllers is the hybrid kind."""
    found = parse(f"{V1}\n{UNIFIED}", {"/sys/fs/cgroup/unified": "hugetlb"})
    assert (found.version, found.hybrid) == (1, True)


def test_v2() -> None:
    """cgroup2 with memory is v2; freezing and accounting are part of its core."""
    found = parse(V2, {"/sys/fs/cgroup": "cpuset cpu io memory pids"})
    assert (found.version, found.missing) == (2, ())
    assert set(found.roots.values()) == {"/sys/fs/cgroup"}


def test_cpus_is_a_hard_cap_and_a_weight() -> None:
    """cpus becomes a quota as with Docker, and the share among neighbours."""
    limits = Limits(memory=64 * MIB, cpus=0.5, pids=100)
    v1, v2 = settings(1, limits), settings(2, limits)
    assert v1["cpu"] == [("cpu.cfs_quota_us", "50000"), ("cpu.shares", "2048")]
    assert v2["cpu"] == [("cpu.max", "50000 100000"), ("cpu.weight", "200")]
    assert v1["memory"] == [("memory.limit_in_bytes", str(64 * MIB)), ("memory.memsw.limit_in_bytes", str(64 * MIB))]
    assert v2["memory"] == [("memory.max", str(64 * MIB)), ("memory.swap.max", "0")]
    assert v1["pids"] == v2["pids"] == [("pids.max", "100")]


def test_best_effort_weighs_alike_and_little() -> None:
    """Whatever its cpus, a best-effort group has the same small weight; one that gives way has none, or the least without cpu.idle."""
    for cpus in (0.0, 2.0):
        limits = Limits(cpus=cpus, best_effort=True)
        assert (settings(1, limits)["cpu"][-1], settings(2, limits)["cpu"][-1]) == (("cpu.shares", "61"), ("cpu.weight", "6"))
    for version, small, least in ((1, ("cpu.shares", "61"), ("cpu.shares", "2")), (2, ("cpu.weight", "6"), ("cpu.weight", "1"))):
        assert yielding(version, True, can_idle=True) == [("cpu.idle", "1")]
        assert yielding(version, False, can_idle=True) == [("cpu.idle", "0"), small]
        assert yielding(version, True, can_idle=False) == [least]
        assert yielding(version, False, can_idle=False) == [small]


def test_no_limits_write_nothing() -> None:
    """0 is no limit."""
    assert not any(settings(1, Limits()).values())


def test_a_busy_node_has_more_time_to_hold_a_group_still() -> None:
    """Five seconds where nobody waits for a core, more in proportion to who does, a minute at most."""
    assert [patience(load, 2) for load in (0.0, 2.0, 20.0, 500.0)] == [5.0, 5.0, 50.0, 60.0]
