"""The admission ledger."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsec.actors.capacity import Demand, Ledger, Limits, demand, limits
from dsec.config import EdgeConfig
from dsec.model import GIB, MIB, Resources

LIMITS = Limits(memory=8 * GIB, cpus=16.0, slots=4, pids=1000, starting=4)


def test_a_refusal_names_its_filter() -> None:
    """Memory, cpus, pids and slots each say who refused, and with which figures."""
    ledger = Ledger(LIMITS)
    assert ledger.refuses(Demand(9 * GIB, 1, 1)) == "memory"
    assert ledger.refuses(Demand(GIB, 17, 1)) == "cpus"
    assert ledger.refuses(Demand(GIB, 1, 1001)) == "pids"
    for n in range(4):
        assert ledger.reserve(f"s{n}", Demand(GIB, 1, 1)) == ""
    assert ledger.reserve("s4", Demand(GIB, 1, 1)) == "slots"
    assert "4 of 4 slots" in ledger.explain("slots", Demand(GIB, 1, 1))
    assert ledger.never_fits(Demand(9 * GIB, 1, 1)) == "memory"


def test_each_reservation_has_one_owner() -> None:
    """Reserving or releasing twice changes nothing."""
    ledger = Ledger(LIMITS)
    ledger.reserve("a", Demand(GIB, 0.1, 10))
    ledger.reserve("a", Demand(GIB, 0.1, 10))
    assert ledger.memory == GIB
    assert ledger.release("a")
    assert not ledger.release("a")
    assert (ledger.memory, ledger.cpus, ledger.pids) == (0, 0.0, 0)


def test_a_tmpfs_upper_is_memory() -> None:
    """Its bytes are admitted beside the memory limit; on a disk they are admitted by the disk; what has no limit is in nobody's sum."""
    asked = Resources(memory=GIB, disk=2 * GIB)
    found = {mode: demand(asked, mode) for mode in ("tmpfs", "loop", "btrfs", "quota", "dir")}
    assert {mode: each.memory // GIB for mode, each in found.items()} == {"tmpfs": 3, "loop": 1, "btrfs": 1, "quota": 1, "dir": 1}
    assert {mode: each.disk // GIB for mode, each in found.items()} == {"tmpfs": 0, "loop": 2, "btrfs": 2, "quota": 2, "dir": 0}


def test_disk_limits_fit_into_the_store_times_its_overcommit() -> None:
    """The sum of what may be written is bounded; one limit above the whole store never fits; a node that knows no size admits all."""
    got = limits(EdgeConfig(disk_overcommit=2.0), memory=8 * GIB, cpus=2, pid_max=32768, disk=4 * GIB)
    assert (got.disk, got.largest_disk) == (8 * GIB, 4 * GIB)
    assert limits(EdgeConfig(disk=GIB), memory=8 * GIB, cpus=2, pid_max=32768, disk=4 * GIB).largest_disk == GIB
    ledger = Ledger(got)
    assert ledger.reserve("large", Demand(MIB, 0.1, 1, 4 * GIB + 1)) == "disk"
    want = Demand(MIB, 0.1, 1, 3 * GIB)
    assert [ledger.reserve(name, want) for name in ("a", "b", "c")] == ["", "", "disk"]
    assert ledger.explain("disk", want) == "3072 MiB of disk wanted, 2048 of 8192 MiB free, 4096 at most for one sandbox"
    assert (ledger.never_fits(want), ledger.never_fits(Demand(MIB, 0.1, 1, 5 * GIB))) == ("", "disk")
    assert (ledger.load(0).disk_free, ledger.load(0).disk_total) == (2 * GIB, 8 * GIB)
    assert Ledger(limits(EdgeConfig(), memory=8 * GIB, cpus=2, pid_max=32768)).reserve("a", Demand(MIB, 0.1, 1, 1 << 60)) == ""


def test_a_paused_sandbox_keeps_its_disk() -> None:
    """What it gave back it may be refused when it resumes, but not its disk, which nobody else could have until it ended."""
    ledger = Ledger(Limits(memory=GIB, cpus=16.0, slots=4, pids=1000, starting=4, disk=GIB))
    want = Demand(GIB, 1, 1, GIB)
    assert ledger.reserve("a", want) == ""
    ledger.release("a")
    assert ledger.reserve("b", Demand(MIB, 1, 1, MIB)) == "disk"
    assert ledger.reserve("a", want) == ""
    ledger.release("a")
    ledger.free_disk("a")
    ledger.free_disk("a")
    assert (ledger.disk, ledger.reserve("b", want)) == (0, "")


def test_limits_come_from_the_node_and_the_configuration() -> None:
    """0 means: what the node has, less the reserve, times the overcommit; 4 to 8 start at one time."""
    config = EdgeConfig(memory_reserve=2 * GIB, memory_overcommit=1.5, cpu_overcommit=10, pids_overcommit=2)
    got = limits(config, memory=10 * GIB, cpus=2, pid_max=32768)
    assert got == Limits(memory=12 * GIB, cpus=20.0, slots=4000, pids=57344, starting=4, largest=8 * GIB)
    assert limits(EdgeConfig(starting_max=3), memory=GIB, cpus=64, pid_max=4096).starting == 3
    assert limits(EdgeConfig(), memory=GIB, cpus=64, pid_max=4096).starting == 8


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 4000), st.floats(0.1, 8), st.integers(1, 400)), max_size=80))
def test_c36_c37_never_above_a_limit_at_any_instant(moves: list[tuple[bool, int, int, float, int]]) -> None:
    """Whatever is asked in whatever order, no sum ever passes its limit, and all is free again at the end."""
    ledger = Ledger(LIMITS)
    for take, owner, memory, cpus, pids in moves:
        if take:
            ledger.reserve(f"o{owner}", Demand(memory * MIB, cpus, pids))
        else:
            ledger.release(f"o{owner}")
        assert ledger.memory <= LIMITS.memory
        assert ledger.cpus <= LIMITS.cpus + 1e-6
        assert ledger.pids <= LIMITS.pids
        assert len(ledger.held) <= LIMITS.slots
        assert ledger.memory == sum(each.memory for each in ledger.held.values())
    for owner in list(ledger.held):
        ledger.release(owner)
    assert (ledger.memory, ledger.cpus, ledger.pids) == (0, 0.0, 0)
