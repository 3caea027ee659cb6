"""Placement: filters with names, two choices, local counts, and speed."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dsec.actors import capacity
from dsec.actors.placement import Picture, requirement
from dsec.bus.messages import CreateItem, Heartbeat, NodeLoad
from dsec.model import GIB, MIB, Resources, SandboxSpec


def load(slots: int = 100, memory: int = 64 * GIB, cpus: float = 64.0, pids: int = 100_000) -> NodeLoad:
    return NodeLoad(
        memory_free=memory, memory_total=memory, cpus_total=cpus, slots_free=slots, slots_total=slots, pids_free=pids, starting_max=8
    )


def beat(name: str, n: int = 1, **more: Any) -> Heartbeat:
    fields: dict[str, Any] = {"edge": name, "incarnation": "i.1", "n": n, "arch": "x86_64", "backends": ("container",), "load": load()}
    return Heartbeat(**(fields | more))


def picture(*beats: Heartbeat, k: int = 2) -> Picture:
    made = Picture(k, random.Random(7))
    made.see(beats)
    return made


def spec(**more: Any) -> SandboxSpec:
    return SandboxSpec(image="debian", **more)


def place(p: Picture, one: SandboxSpec, count: int = 1, who: str = "me", without: frozenset[str] = frozenset()) -> Any:
    return p.place([requirement(one)], [CreateItem(spec=0, first=0, count=count)], who, without)


def refused_by(p: Picture, one: SandboxSpec, who: str = "me") -> tuple[str, bool]:
    placed, unplaced = place(p, one, who=who)
    assert not placed
    return unplaced[0].filter, unplaced[0].final


def test_each_filter_names_itself() -> None:
    """What no node takes is refused by the name of the filter that took the last node away."""
    assert refused_by(picture(), spec()) == ("nodes", False)
    assert refused_by(picture(beat("a")), spec(backend="microvm")) == ("backend", True)
    assert refused_by(picture(beat("a")), spec(arch="aarch64")) == ("arch", True)
    assert refused_by(picture(beat("a")), spec(devices=("gpu",))) == ("devices", True)
    assert refused_by(picture(beat("a")), spec(node_labels={"zone": "b"})) == ("labels", True)
    assert refused_by(picture(beat("a", draining=True)), spec()) == ("draining", False)
    assert refused_by(picture(beat("a", load=load(slots=0))), spec()) == ("slots", False)
    assert refused_by(picture(beat("a", load=load(pids=3))), spec()) == ("pids", False)
    assert refused_by(picture(beat("a", load=load(memory=GIB))), spec(resources=Resources(memory=2 * GIB))) == ("memory", True)
    assert refused_by(picture(beat("a", load=load(cpus=1.0))), spec(resources=Resources(cpus=2))) == ("cpus", True)


def test_a_tmpfs_upper_counts_as_memory() -> None:
    """The same spec fits a node with disk uppers and not one whose uppers are memory."""
    big = spec(resources=Resources(memory=GIB, disk=4 * GIB))
    small = load(memory=2 * GIB)
    assert place(picture(beat("a", load=small)), big)[0]
    assert refused_by(picture(beat("a", load=small, tmpfs_upper=True)), big) == ("memory", True)


def test_disk_is_placed_by_where_it_is_counted() -> None:
    """A node whose store is promised away takes no more, one whose writable layers are memory does, and one without a size always."""
    wanted = spec(resources=Resources(memory=GIB, disk=2 * GIB))
    full = msgspec.structs.replace(load(), disk_free=3 * GIB, disk_total=8 * GIB)
    placed, unplaced = place(picture(beat("a", load=full)), wanted, 2)
    assert (len(placed["a"]), [(row.filter, row.final) for row in unplaced]) == (1, [("disk", False)])
    assert len(place(picture(beat("a", load=full, tmpfs_upper=True)), wanted, 2)[0]["a"]) == 2
    assert len(place(picture(beat("a", load=load())), wanted, 2)[0]["a"]) == 2
    small = msgspec.structs.replace(load(), disk_free=GIB, disk_total=GIB)
    assert refused_by(picture(beat("a", load=small)), wanted) == ("disk", True)


def test_isolation_keeps_users_apart() -> None:
    """isolation="user" goes only where nobody else is, and keeps others away at once, before any heartbeat shows it."""
    mine = spec(isolation="user")
    assert refused_by(picture(beat("a", principals={"you": 1})), mine) == ("isolation", False)
    assert refused_by(picture(beat("a", exclusive="you")), spec()) == ("isolation", False)
    p = picture(beat("a"))
    assert place(p, mine)[0]
    assert refused_by(p, spec(), who="you") == ("isolation", False)
    assert place(p, mine)[0]


def test_never_more_than_a_node_has() -> None:
    """150 sandboxes for two nodes of 50 slots: 100 are placed, 50 refused."""
    placed, unplaced = place(picture(beat("a", load=load(slots=50)), beat("b", load=load(slots=50))), spec(), 150)
    assert {name: len(pairs) for name, pairs in placed.items()} == {"a": 50, "b": 50}
    assert len(unplaced) == 50
    assert {row.filter for row in unplaced} == {"slots"}


def test_own_placements_count_until_heartbeats_show_them() -> None:
    """What was placed is taken off until the second heartbeat after it, and then no more."""
    p = picture(beat("a", load=load(slots=10)))
    assert len(place(p, spec(), 10)[0]["a"]) == 10
    assert refused_by(p, spec()) == ("slots", False)
    p.see([beat("a", n=2, load=load(slots=10))])
    assert refused_by(p, spec()) == ("slots", False)
    p.see([beat("a", n=3, load=load(slots=10))])
    assert place(p, spec())[0]


def test_an_answer_is_fresher_than_a_heartbeat() -> None:
    """The ledger in an Edge's answer replaces the local count of that batch."""
    p = picture(beat("a", load=load(slots=10)))
    place(p, spec(), 10)
    p.answered("a", msgspec.structs.replace(load(slots=10), slots_free=4, admitted=6), 10, 10)
    assert len(place(p, spec(), 9)[0]["a"]) == 4


def test_answers_do_not_make_two_schedulers_herd() -> None:
    """Two Schedulers that place by turns, and hear the ledgers of the nodes that they sent to, fill 160 nodes evenly."""
    want = capacity.demand(spec().resources, "tmpfs")
    ledgers = [capacity.Ledger(capacity.Limits(memory=4096 * GIB, cpus=4096, slots=1000, pids=1 << 20, starting=8)) for _ in range(160)]
    two = [Picture(rng=random.Random(seed)) for seed in (1, 2)]
    for each in two:
        each.see([beat(str(at), load=ledger.load(0)) for at, ledger in enumerate(ledgers)])
    for turn in range(32):
        placed, unplaced = place(two[turn % 2], spec(), 1000)
        assert not unplaced
        for name, pairs in placed.items():
            ledger = ledgers[int(name)]
            for number in range(len(pairs)):
                assert not ledger.reserve(f"{turn}.{number}", want)
            two[turn % 2].answered(name, ledger.load(0), len(pairs), len(pairs))
    assert max(len(ledger.held) for ledger in ledgers) <= 1.03 * 200


def test_what_an_answer_counted_is_not_counted_again() -> None:
    """A heartbeat that shows a batch ends its local count at once; an older one, still on its way when the batch was sent, does not."""
    p = picture(beat("a", load=load(slots=10)))
    place(p, spec(), 4)
    p.answered("a", msgspec.structs.replace(load(slots=10), slots_free=6, admitted=4), 4, 4)
    p.see([beat("a", n=2, load=load(slots=10))])
    assert len(place(p, spec(), 9)[0]["a"]) == 6
    p.answered("a", msgspec.structs.replace(load(slots=10), slots_free=0, admitted=10), 6, 6)
    p.see([beat("a", n=3, load=msgspec.structs.replace(load(slots=10), slots_free=8, admitted=10))])
    assert len(place(p, spec(), 9)[0]["a"]) == 8


def test_who_refused_is_left_alone_until_its_next_heartbeat() -> None:
    """A node that nobody serves gets nothing until it is heard again."""
    p = picture(beat("a"), beat("b"))
    p.forget("a")
    assert set(place(p, spec(), 20)[0]) == {"b"}
    p.see([beat("a", n=2), beat("b", n=2)])
    assert set(place(p, spec(), 20)[0]) == {"a", "b"}


def test_nodes_without_the_layer_are_not_asked_again() -> None:
    """A refusal for a layer leads elsewhere; with nobody left the filter is "layers"."""
    p = picture(beat("a"), beat("b"))
    assert set(place(p, spec(), 20, without=frozenset("a"))[0]) == {"b"}
    _, unplaced = place(p, spec(), 1, without=frozenset("ab"))
    assert unplaced[0].filter == "layers"


def test_two_choices_spread_the_load() -> None:
    """The fullest of 100 nodes stays near the mean, which one random choice does not achieve."""
    nodes = [beat(f"n{i}", load=load(slots=1000, memory=1 << 42, cpus=1000.0)) for i in range(100)]
    one = place(picture(*nodes, k=1), spec(), 10_000)[0]
    two = place(picture(*nodes, k=2), spec(), 10_000)[0]
    fullest = max(len(pairs) for pairs in two.values())
    assert fullest <= 108
    assert fullest < max(len(pairs) for pairs in one.values())


def test_32000_over_160_nodes_is_quick() -> None:
    """10,000 distinct specs, 32,000 sandboxes, 160 nodes: far below half a second."""
    p = picture(*(beat(f"n{i}", load=load(slots=1000, memory=1 << 42, cpus=4096.0, pids=1 << 20)) for i in range(160)))
    specs = [spec(resources=Resources(memory=(64 + i) * MIB), labels={"n": str(i)}) for i in range(10_000)]
    started = time.process_time()
    needs = [requirement(each) for each in specs]
    placed, unplaced = p.place(needs, [CreateItem(spec=i % 10_000, first=i) for i in range(32_000)], "me")
    assert time.process_time() - started < 0.5
    assert not unplaced
    assert sorted(index for pairs in placed.values() for index, _ in pairs) == list(range(32_000))


def test_a_full_cluster_is_refused_quickly() -> None:
    """32,000 requests that fit nowhere cost no search each."""
    p = picture(*(beat(f"n{i}", load=load(slots=1)) for i in range(160)))
    started = time.process_time()
    placed, unplaced = place(p, spec(), 32_000)
    assert time.process_time() - started < 2.0
    assert (sum(len(pairs) for pairs in placed.values()), len(unplaced)) == (160, 31_840)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8), st.sampled_from([0.5, 4.0])), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.25, 1.0])), min_size=1, max_size=30),
)
def test_no_limit_is_ever_passed(nodes: list[tuple[int, int, float]], wants: list[tuple[int, float]]) -> None:
    """For any nodes and any requests: all are accounted for once, and no node gets more than it has."""
    beats = [beat(f"n{i}", load=load(slots=s, memory=m * GIB, cpus=c)) for i, (s, m, c) in enumerate(nodes)]
    p = picture(*beats)
    specs = [spec(resources=Resources(memory=m * GIB, cpus=c)) for m, c in wants]
    placed, unplaced = p.place([requirement(each) for each in specs], [CreateItem(spec=i, first=i) for i in range(len(specs))], "me")
    seen = [index for pairs in placed.values() for index, _ in pairs] + [row.index for row in unplaced]
    assert sorted(seen) == list(range(len(specs)))
    for name, pairs in placed.items():
        has = next(each.load for each in beats if each.edge == name)
        assert len(pairs) <= has.slots_free
        assert sum(specs[s].resources.memory for _, s in pairs) <= has.memory_free
        assert sum(specs[s].resources.cpus for _, s in pairs) <= has.cpus_total + 1e-6
