"""The admission ledger."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsec.actors.capacity import Demand, Ledger, Limits, demand, limits
from dsec.config import EdgeConfig
from dsec.model import GIB, MIB, Resources, SandboxSpec

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
    """Its bytes are admitted beside the memory limit."""
    spec = SandboxSpec(image="x", resources=Resources(memory=GIB, disk=2 * GIB))
    assert demand(spec, tmpfs_upper=True).memory == 3 * GIB
    assert demand(spec, tmpfs_upper=False).memory == GIB
    loop = SandboxSpec(image="x", disk_mode="loop", resources=Resources(memory=GIB, disk=2 * GIB))
    assert demand(loop, tmpfs_upper=True).memory == GIB


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
